"""StabilityRecorder: sharpness, batch sharpness, noise and spectra during a training, or of its checkpoints."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
from torch import nn

from flatscope.context import Context
from flatscope.curvature.spectrum import Wanted
from flatscope.errors import InputError, refuse_unless_whole
from flatscope.forms import context_in_declared_form
from flatscope.loss import PerSample
from flatscope.measures.weight_flatness import whole_matrix_and_search
from flatscope.measuring import measure
from flatscope.problem import Problem
from flatscope.registry import declarations
from flatscope.spectra.density import SpectralDensity
from flatscope.spectra.spectrum_functions import spectral_density
from flatscope.table import Table
from flatscope.training.callbacks import Recorder, Send, optimizer_settings
from flatscope.training.stability.sharpness_record import EDGE, Stability
from flatscope.training.stability.update_rule import UpdateRule

LAMBDA, BATCH, NOISE = "hessian_max_eigenvalue", "batch_sharpness", "gradient_noise_scale"
LOOSE = 0.1  # a λ_max whose interval is wider than this share of it places no training
DRAWS, STEPS = 2, 24  # of a spectral density along the way
KEPT = ("version", "torch", "device", "dtype", "loss", "seed", "n_train", "remarks")  # of the tables' provenance


class StabilityRecorder(Recorder):
    """Records how sharp a training is against what its step size allows, without touching it.

    Args:
        data: the samples that the network is trained on, as in `Recorder`; of others the threshold says nothing.
        every: epochs (or steps, where those are counted) between two records.
        batch: samples of a mini-batch, for the batch sharpness of SGD; None for full-batch gradient descent.
        loss: as in `Problem`: the one of the training.
        noise_every: records between two gradient-noise scales, which take the gradient of every sample; 0 for none.
        density_every: records between two spectral densities, 48 products each; 0 for none.
        tolerance: relative accuracy of λ_max.
        seed: of all random streams.
        send: as in `Recorder`.

    Example:
        >>> import torch
        >>> x, y = torch.eye(3), torch.tensor([0, 1, 0])
        >>> model = torch.nn.Linear(3, 2)
        >>> recorder = StabilityRecorder((x, y))
        >>> for step in range(3):
        ...     _ = recorder.record(model, step, lr=0.1)
        >>> recorder.stability.to_frame()["threshold"].tolist()
        [20.0, 20.0, 20.0]
    """

    def __init__(
        self,
        data: Any,
        every: int = 1,
        *,
        batch: int | None = None,
        loss: str | PerSample = "cross_entropy",
        noise_every: int = 1,
        density_every: int = 0,
        tolerance: float = 1e-3,
        seed: int = 0,
        send: Send | None = None,
    ) -> None:
        names = [LAMBDA, *([BATCH] if batch is not None else [])]
        super().__init__(data, names, every, loss=loss, seed=seed, send=send)
        for name, value in (("noise_every", noise_every), ("density_every", density_every)):
            refuse_unless_whole(value, name, least=0)
        if batch is not None:
            refuse_unless_whole(batch, "batch")
        self.batch, self.tolerance, self.rules = batch, tolerance, dict[int, UpdateRule]()
        self.noise_every, self.density_every = noise_every, density_every
        self.densities: dict[int, SpectralDensity] = {}
        self._count = 0
        self._density: SpectralDensity | None = None
        Wanted(tolerance=tolerance)  # refuses what is none

    def record(
        self,
        model: nn.Module,
        epoch: int,
        step: int | None = None,
        *,
        optimizer: Any = None,
        lr: float | None = None,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> Table | None:
        """Measure the model as it is now, and keep by which rule it is trained.

        Args:
            model: the network in training, in any mode.
            epoch: number of epochs done, or of steps.
            step: number of steps done; the epoch by default.
            optimizer: its learning rate, momentum and weight decay are read; or give them:
            lr: learning rate.
            momentum: of plain SGD.
            weight_decay: of plain SGD.
        """
        if (optimizer is None) == (lr is None):
            got = "neither" if optimizer is None else "both"
            fix = "Of several optimizers no threshold is known" if optimizer is None else "Leave out one of them"
            raise InputError("an optimizer, or its learning rate", got, where="record", fix=fix)
        if lr == 0:  # written by hand; a schedule may well come to it
            raise InputError("a number above 0", repr(lr), where="lr")
        settings = {"name": "SGD", "lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        rule = UpdateRule.of(settings if optimizer is None else optimizer_settings(optimizer))
        # Wherever the batch is known: what the rule adds to the loss is part of what a mini-batch steps along.
        self.options = {LAMBDA: {"tolerance": self.tolerance}}
        if self.batch is not None:
            self.options[BATCH] = {"batch": self.batch, "weight_decay": rule.weight_decay}
        self._rule = rule
        return super().record(model, epoch, step, optimizer=optimizer)

    def _keep(self, epoch: int, table: Table) -> None:
        self.rules[epoch] = self._rule
        if self._density is not None:
            self.densities[self.steps[epoch]] = self._density
        super()._keep(epoch, table)

    def _table_of_problem(self, problem: Problem) -> Table:
        ctx, count = Context(problem, seed=self.seed), self._count
        names = [*self.names, *([NOISE] if self.noise_every and count % self.noise_every == 0 else [])]
        _, search = context_in_declared_form(ctx, declarations()[LAMBDA]).cached(whole_matrix_and_search)
        table = measure(problem, names, options=self.options, context=ctx)
        table.meta |= {"train_loss": ctx.scores().loss, "products": search.products}
        dense = self.density_every and count % self.density_every == 0
        density = spectral_density(problem, DRAWS, steps=STEPS, seed=self.seed) if dense else None
        # Both at once: a record that was interrupted leaves the recorder as it was.
        self._count, self._density = count + 1, density
        ctx.forget()
        return table

    @property
    def stability(self) -> Stability:
        """All records, and the place of the training against the edge."""
        rows = [_stability_row(self.steps[epoch], table, self.rules[epoch]) for epoch, table in self.tables.items()]
        last = self.rules[max(self.tables)] if self.tables else UpdateRule("SGD", 1.0)
        n = next((int(table.meta["n_train"]) for table in self.tables.values()), 0)
        meta = {key: value for table in self.tables.values() for key, value in table.meta.items() if key in KEPT}
        meta |= {"records": len(rows), "seconds": sum(float(t.meta["seconds"]) for t in self.tables.values())}
        return Stability(pd.DataFrame(rows), last, self.batch if self.batch != n else None, dict(self.densities), meta)


def _stability_row(step: int, table: Table, rule: UpdateRule) -> dict[str, Any]:
    """One record; what is not known is NaN, with the reason."""
    rows = {str(row["measure"]): row for row in table.to_frame().to_dict("records")}
    top, remarks = rows[LAMBDA], [rule.unknown]
    reach = float(top["high"]) - float(top["value"])  # not a number where there is no value
    known = reach <= LOOSE * abs(float(top["value"]))
    if not known:
        remarks.append(f"λ_max: {top['reason']}")
    row = {"step": step, "lr": rule.lr, "threshold": rule.threshold, "loss": table.meta["train_loss"]}
    row |= {"lambda_max": top["value"], "reach": reach, "products": table.meta["products"]}
    sharpness = float(top["value"]) if known else math.nan
    row["normalized_sharpness"] = EDGE * (sharpness + rule.weight_decay) / rule.threshold
    if BATCH in rows:
        batch = rows[BATCH]
        row |= {"batch_sharpness": batch["value"], "batch_stderr": batch["stderr"]}
        if not rule.unknown and not rule.momentum:
            row["normalized_batch"] = rule.lr * float(batch["value"])
        remarks.append("no threshold of the batch sharpness is known with momentum" if rule.momentum else "")
        remarks.append(f"batch sharpness: {batch['reason']}" if math.isnan(float(batch["value"])) else "")
    if NOISE in rows:
        row["noise_scale"] = rows[NOISE]["value"]
    return row | {"remark": "; ".join(remark for remark in remarks if remark)}
