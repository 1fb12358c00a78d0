"""What type checkers must see: read by mypy in `make check`, run by nobody.

An ignored error that is none is an error itself, so that a name which is no longer known as a function is found.
"""

import torch

import flatscope as fs
import flatscope.generalization_bounds.psi as psi_bounds
from flatscope import extend
from flatscope.training import Store, evaluate


def both(problem: fs.Problem) -> tuple[fs.Table, fs.Table]:
    print(psi_bounds.pac_bayes_psi.__name__)
    return fs.bounds(problem, delta=0.1), fs.measure(problem)


def wrong_arguments() -> None:
    fs.bounds(3)  # type: ignore[arg-type]
    fs.measure(3)  # type: ignore[arg-type]
    fs.report(3, 4)  # type: ignore[arg-type]
    fs.landscape(3)  # type: ignore[arg-type]
    fs.audit(3)  # type: ignore[arg-type]


def own_measure(ctx: fs.Context) -> extend.Value:
    weights = extend.flatten(ctx.params)
    return extend.Value(float(weights.abs().max()), stderr=0.0)


def own_section(kind: extend.Kind) -> None:
    kind.register("drifts", before="bounds")
    kind.register(3)  # type: ignore[arg-type]


def wrong_names() -> None:
    extend.nothing  # type: ignore[attr-defined]  # noqa: B018
    extend.Value("much")  # type: ignore[arg-type]
    extend.flatten(torch.ones(3))  # type: ignore[arg-type]
    Store(3)  # type: ignore[arg-type]
    evaluate(3)  # type: ignore[call-arg, arg-type]
