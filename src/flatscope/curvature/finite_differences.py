"""Hessian products from central differences of the gradient, for networks whose second derivative cannot be had.

(g(w + εv) − g(w − εv)) / 2ε needs one backward pass of whatever computes the gradient. Every product is computed with
two steps; how far these differ is its error. On networks with ReLU, max or abs a difference counts the kinks that it
crosses, in the shorter step fewer, but more sharply: that is another quantity than the exact product, and the two
steps need not agree on it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from flatscope.context import Context
from flatscope.curvature.hessian_products import Product
from flatscope.curvature.operators import BatchLoss, CurvatureOperator
from flatscope.errors import NotApplicable, NumericalWarning
from flatscope.formatting import first_of_names, readable_number
from flatscope.network.operations import TABLE
from flatscope.network.program import Step
from flatscope.params import Params
from flatscope.samples import Batch

# Steps along vectors of length one, relative to the length of the weights, and the ratio of the second to the first. A
# central difference errs by h² and by rounding over h: the cube root of the rounding is best, up to what is curved.
STEPS = {torch.float64: 1e-5, torch.float32: 3e-3}
RATIO = 0.5
# Operations that the table does not know whose slopes jump.
_OTHER_KINKS = ("topk", "sort", "median", "round", "floor", "ceil")


class FiniteDifferences(CurvatureOperator):
    """Hessian of the mean training loss by central differences of its gradient.

    Args:
        ctx: the point in weight space.
        names: parameter tensors; all trainable ones by default.
        groups: parts of the data that may have vectors of their own; these take the first step alone.
        precision: a product is refused whose two steps differ by more than this share of the largest product so far
            (of vectors of one length).
        step: the first, relative to the length of the weights; by default by the network's precision.

    Attributes:
        step: the first step.
        spread: largest difference between the products of two steps so far, relative to the largest product.
        kinks: operations of the network at which its slope jumps.
    """

    def __init__(
        self,
        ctx: Context,
        names: Iterable[str] | None = None,
        groups: int = 1,
        *,
        precision: float = 0.05,
        step: float | None = None,
    ) -> None:
        super().__init__(ctx, names, groups)
        self.precision, self.spread, self._largest = precision, 0.0, 0.0
        self.step = STEPS.get(ctx.problem.dtype, STEPS[torch.float32]) if step is None else step
        self._at = self.step
        self._length = max(float(sum(ctx.params[name].double().square().sum() for name in self.names)) ** 0.5, 1e-12)
        self.kinks = sorted({step.place for step in ctx.structure.program.steps if _has_kinks(step)})
        if self.kinks:
            text = (
                f"finite differences count the kinks that a step crosses ({first_of_names(self.kinks, 3)}): they are "
                "another quantity than exact products, which this network has; see the spread between two steps"
            )
            ctx.remark(text)
            warnings.warn(text, NumericalWarning, stacklevel=4)

    def __matmul__(self, vectors: Tensor) -> Tensor:
        """Products with a vector (p,) or with columns (p, k), refused where the two steps disagree."""
        first, second = self.by_both_steps(vectors)
        lengths, sizes, gaps = (
            part.double().reshape(self.size, -1).norm(dim=0).to(first) for part in (vectors, first, first - second)
        )
        given = lengths > 0
        if not bool(given.any()):
            return first
        # Relative to the largest product so far: of directions that are flat rounding is all there is.
        self._largest = max(self._largest, float((sizes[given] / lengths[given]).max()))
        found = float((gaps[given] / lengths[given]).max()) / max(self._largest, 1e-300)
        self.spread = max(self.spread, found)
        if found > self.precision:
            why = "the network has kinks" if self.kinks else "rounding, or a step that is too long"
            raise NotApplicable(
                f"products whose two steps differ by at most {self.precision:.2g}",
                f"{readable_number(found, 2)} at steps of {self.step:.2g} and {self.step * RATIO:.2g} of the weights: "
                f"{why}",
                "finite differences",
                "Use exact products, a problem in float64, another step=, or ask for less precision",
            )
        return first

    def left_open(self, vector: Tensor) -> Tensor:
        """Length of the difference between a vector's products with the two steps."""
        first, second = self.by_both_steps(vector)
        gap: Tensor = torch.linalg.vector_norm(first - second)
        return gap

    def by_both_steps(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Products with the first step and with the second, none refused."""
        found = []
        for step in (self.step, self.step * RATIO):
            self._at = step
            try:
                found.append(super().__matmul__(vectors))
            finally:
                self._at = self.step
        return found[0], found[1]

    def _may_keep(self) -> bool:
        return False  # nothing of a product is free of the vector

    def _product_of(self, batch: Batch) -> Product:
        return partial(self._differences, batch)

    def _differences(self, batch: Batch, vectors: Sequence[Tensor]) -> list[Tensor]:
        """Sums over a batch for a stack of vectors, one after the other."""
        rows: list[list[Tensor]] = []
        for one in zip(*(stack.unbind() for stack in vectors), strict=True):
            length = float(sum(part.double().square().sum() for part in one)) ** 0.5
            reach = self._at * self._length / max(length, 1e-300)
            ends = [self._gradient(batch, one, side * reach) for side in (1, -1)]
            rows.append([(high - low) / (2 * reach) for high, low in zip(*ends, strict=True)])
        return [torch.stack(parts) for parts in zip(*rows, strict=True)]

    def _gradient(self, batch: Batch, direction: Sequence[Tensor], reach: float) -> list[Tensor]:
        """Gradient of the batch's summed loss at some distance, in float64."""
        inputs, targets = batch
        leaves: Params = {
            name: (self.ctx.params[name].detach() + reach * part).requires_grad_()
            for name, part in zip(self.names, direction, strict=True)
        }
        with torch.enable_grad():
            loss = self.ctx.problem.loss(self.ctx.forward(inputs, {**self.ctx.params, **leaves}), targets).sum()
            found = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        return [gradient.double() for gradient in found]

    def _batch_product(self, outputs: Tensor, params: list[Tensor], loss: BatchLoss) -> Product:
        raise AssertionError("differences need no graph of a batch")


def _has_kinks(step: Step) -> bool:
    meaning = TABLE.get(step.name)
    return step.name in _OTHER_KINKS if meaning is None else meaning.kinks
