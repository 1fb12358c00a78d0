"""The handful of measures to look at first: one or two of each family, in a few words each."""

from __future__ import annotations

from flatscope.report.comparison import Line

MANY = 20  # lines of a table beyond which these come first
HEADLINES = {
    "gradient_norm": "slope of the loss; 0 at a minimum",
    "hessian_trace": "curvature, all directions summed",
    "hessian_max_eigenvalue": "curvature, sharpest direction",
    "kappa_max": "sharpest layer, relative to weights",
    "kappa_trace_sum": "all layers, relative to weights",
    "rho_sum": "all units, relative to weights",
    "psi_trace": "curvature in path space",
    "expected_sharpness": "rise of the loss under noise",
    "sharpness": "largest rise of the loss nearby",
    "margin": "lead of the right class",
    "spectral_norm_over_margin": "spectral norms over margin, squared",
    "l2_path_norm_over_margin": "path norm over margin, squared",
}


def headlines(lines: list[Line]) -> list[tuple[Line, str]]:
    """Those of the lines that come first, in the order above, with their words; of several options the first."""
    found: dict[str, Line] = {}
    for line in lines:
        found.setdefault(line.name, line)
    return [(found[name], words) for name, words in HEADLINES.items() if name in found]
