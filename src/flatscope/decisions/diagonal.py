"""`diagonal`: the diagonal of a curvature matrix as a dictionary like a state_dict, with standard errors."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from flatscope.charts import Bars
from flatscope.context import Context, Effort, make_effort
from flatscope.decisions.curvature_diagonals import hessian_diagonals, output_diagonals
from flatscope.errors import InputError, refuse_unknown
from flatscope.formatting import numbered, readable_number
from flatscope.isolation import own_settings
from flatscope.params import Params
from flatscope.problem import Problem
from flatscope.result import DRAWN, Result, reading
from flatscope.tensor_files import read_tensors, tensor_bytes

MATRICES = ("hessian", "gauss_newton", "empirical_fisher")
WORDS = {"hessian": "Hessian", "gauss_newton": "Gauss-Newton matrix", "empirical_fisher": "empirical Fisher matrix"}
STDERR, HEAD = "stderr:", "flatscope_diagonal"


class Diagonal(Result, Mapping[str, Tensor]):
    """The diagonal of a curvature matrix: {parameter: tensor of its shape}, in the order of the state dict.

    Attributes:
        matrix: "hessian", "gauss_newton" or "empirical_fisher".
        stderr: standard errors of the entries, {parameter: tensor}; zero where they are exact.
        ways: how each was computed, {parameter: words}.
        meta: provenance.

    Example:
        >>> import torch, flatscope as fs
        >>> model = torch.nn.Linear(2, 1, bias=False).double()
        >>> problem = fs.Problem(model, train=(torch.tensor([[1.0, 0], [0, 3]]), torch.zeros(2)), loss="mse")
        >>> fs.diagonal(problem)["weight"].round(decimals=6)
        tensor([[1., 9.]], dtype=torch.float64)
    """

    WORD = "diagonal"
    ENDINGS = (".safetensors", ".csv", ".md", ".html", *DRAWN)
    READABLE = (".safetensors",)

    def __init__(
        self, values: Params, stderr: Params, ways: Mapping[str, str], matrix: str, meta: Mapping[str, Any]
    ) -> None:
        self._values, self.stderr, self.ways = dict(values), dict(stderr), dict(ways)
        self.matrix, self.meta = matrix, dict(meta)

    def __getitem__(self, name: str) -> Tensor:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    @property
    def exact(self) -> bool:
        """True if every entry is free of the noise of random draws."""
        return all(not bool(error.any()) for error in self.stderr.values())

    @property
    def trace(self) -> float:
        """Sum of all entries."""
        return float(sum(float(value.double().sum()) for value in self.values()))

    def headline_lines(self) -> list[str]:
        """Size, sum, signs and errors of the entries."""
        size = sum(value.numel() for value in self.values())
        below = sum(int((value < 0).sum()) for value in self.values())
        lines = [
            f"Diagonal of the {WORDS[self.matrix]}: {size:,} entries of {numbered(len(self), 'parameter')}, sum "
            f"{readable_number(self.trace)}, {'exact' if self.exact else 'estimated in part'}."
        ]
        if below:
            lines.append(f"{below:,} entries are negative: do not divide by them, nor take their roots.")
        noisy = [name for name, error in self.stderr.items() if bool(error.any())]
        if noisy:
            worst = max(noisy, key=lambda name: _relative_error(self[name], self.stderr[name]))
            share = 100 * _relative_error(self[worst], self.stderr[worst])
            lines.append(
                f"Standard errors up to {readable_number(share, 2)} % of the entries' size ({worst}); see .stderr."
            )
        return lines

    def __repr__(self) -> str:
        return self.headline

    def __eq__(self, other: object) -> bool:
        """Equal entries and errors of the same parameters."""
        if not isinstance(other, Diagonal) or self.keys() != other.keys():
            return False
        pairs = [(self[name], other[name]) for name in self]
        pairs += [(self.stderr[name], other.stderr[name]) for name in self]
        return self.matrix == other.matrix and all(torch.equal(one, two) for one, two in pairs)

    __hash__ = None  # type: ignore[assignment]

    def to_frame(self) -> pd.DataFrame:
        """One row per parameter: number of entries, their sum, smallest and largest, how it was computed."""
        rows = [
            (name, value.numel(), float(value.double().sum()), float(value.min()), float(value.max()), self.ways[name])
            for name, value in self.items()
        ]
        return pd.DataFrame(rows, columns=["parameter", "entries", "sum", "smallest", "largest", "way"])

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """The same as text."""
        rows = [
            [
                row["parameter"],
                f"{row['entries']:,}",
                *(readable_number(row[name]) for name in ("sum", "smallest", "largest")),
            ]
            for row in self.to_frame().to_dict("records")
        ]
        return ["parameter", "entries", "sum", "smallest", "largest"], rows

    def chart(self) -> Bars:
        """Mean entry of every parameter."""
        means = [float(value.double().mean()) for value in self.values()]
        return Bars(list(self), {"mean": means}, axis=f"mean entry, {WORDS[self.matrix]}")

    def _head(self) -> dict[str, Any]:
        return {"matrix": self.matrix, "ways": self.ways, "meta": self.meta, "order": list(self)}

    def _content(self, ending: str) -> bytes:
        """Of a .safetensors file: entries by the names of the parameters, errors as "stderr:NAME"."""
        if ending != ".safetensors":
            return super()._content(ending)
        tensors = {name: value.cpu().contiguous() for name, value in self.items()}
        tensors |= {STDERR + name: e.cpu().contiguous() for name, e in self.stderr.items() if bool(e.any())}
        return tensor_bytes(tensors, {HEAD: json.dumps(self._head(), default=str)})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Diagonal:
        """Read what `save` wrote; nothing in the file is run."""
        with reading("a diagonal that flatscope saved", str(path)):
            tensors, stored = read_tensors(path)
            head = json.loads(stored[HEAD])
            values = {name: tensors[name] for name in head["order"]}
            stderr = {name: tensors.get(STDERR + name, torch.zeros_like(value)) for name, value in values.items()}
            if wrong := [name for name, error in stderr.items() if error.shape != values[name].shape]:
                raise ValueError(f"errors of {wrong[0]} of another shape")
            refuse_unknown(head["matrix"], MATRICES, "matrix")
            return cls(values, stderr, head["ways"], head["matrix"], head["meta"])


def _relative_error(value: Tensor, stderr: Tensor) -> float:
    size = float(value.double().norm())
    return float(stderr.double().norm()) / size if size else float("inf")


def diagonal(
    problem: Problem,
    matrix: str = "hessian",
    *,
    precision: float = 0.02,
    budget: float | str | None = None,
    memory: int | str | None = None,
    seed: int = 0,
) -> Diagonal:
    """The diagonal of a curvature matrix of the mean training loss, over all trainable parameters.

    The Hessian's is exact where a parameter's block is that of the Gauss-Newton matrix (piecewise-linear networks) or
    where few parameters are left, else estimated from products with random vectors. That of the Gauss-Newton matrix is
    exact for up to 17 classes, else from random columns. For "cross_entropy" and "bce" the Gauss-Newton matrix is the
    true Fisher matrix; for "mse" twice that of unit noise, for "next_token" that of a sequence over its number of
    tokens. The empirical Fisher's is the mean over samples of the squared gradient of each sample's loss, exact; not
    the square of the mean gradient.

    Args:
        problem: model, data, loss.
        matrix: "hessian", "gauss_newton" or "empirical_fisher".
        precision: where it is estimated: error of a parameter's tensor relative to its norm; 0 for exact values.
        budget: time after which estimates end with what they have.
        memory: what a pass may use: bytes, or "8GiB".
        seed: of random vectors.

    Example:
        >>> import torch, flatscope as fs
        >>> problem = fs.Problem(torch.nn.Linear(3, 2), train=(torch.eye(3), torch.tensor([0, 1, 0])))
        >>> fs.diagonal(problem, "empirical_fisher").exact
        True
    """
    if not isinstance(problem, Problem):
        raise InputError("a Problem", type(problem).__name__, "diagonal", "Make one: Problem(model, train=(x, y))")
    refuse_unknown(matrix, MATRICES, "matrix")
    with own_settings(problem.generators):
        return _compute_diagonal(problem, matrix, make_effort(precision, budget, memory), seed)


def _compute_diagonal(problem: Problem, matrix: str, effort: Effort, seed: int) -> Diagonal:
    begun = time.perf_counter()
    ctx = Context(problem, seed=seed, effort=effort)
    names = list(problem.trainable)
    if matrix == "hessian":
        diagonals = hessian_diagonals(ctx, names, effort.precision)
    else:
        diagonals = output_diagonals(ctx, names, matrix, effort.precision)

    def shaped(values: Params) -> Params:
        return {name: values[name].to(problem.device, problem.dtype) for name in names}

    meta = {**ctx.provenance(begun), "matrix": matrix, "remarks": [*problem.remarks, *ctx.remarks]}
    return Diagonal(shaped(diagonals.values), shaped(diagonals.stderrs), diagonals.ways, matrix, meta)
