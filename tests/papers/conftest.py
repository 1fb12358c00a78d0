"""What tests of studies run under."""

from __future__ import annotations

from typing import Any

import pytest

from flatscope_papers import study_runs


@pytest.fixture(autouse=True)
def one_picture_of_a_smoke_run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a smoke run goes into its figure, drawn as SVG and again as PNG: here as SVG only."""
    if not request.node.name.startswith("test_smoke"):
        return
    drawn = study_runs.figure_bytes

    def svg_only(figure: Any, kind: str, **given: Any) -> bytes:
        return drawn(figure, kind, **given) if kind == "svg" else b""

    monkeypatch.setattr(study_runs, "figure_bytes", svg_only)
