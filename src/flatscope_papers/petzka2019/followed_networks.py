"""The 144 LeNet-5 of Petzka et al. (2019), section 3, followed along training.

Every network is looked at after a list of epochs, and when its training loss first falls below a list of levels: once
as it is and once after the paper's random layer-wise reparameterization. So the correlations of Figures 1 and 2 can be
read at any stop rule, while the rule that is judged was fixed before (see `lenet`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from flatscope import FlatscopeError, Population, train_population
from flatscope.guards import write_whole
from flatscope.sweeps.configuration import from_json, to_json
from flatscope.sweeps.store import Store
from flatscope.sweeps.work import CHECKPOINT_SECONDS
from flatscope.symmetries.scaling import random_layer_pair
from flatscope.training.data import Data, load
from flatscope.training.loop import evaluate
from flatscope.training.population import PopulationView
from flatscope_papers.petzka2019.last_layers import last_layers

Report = Callable[[float, str], None]
SEEN_FILE = "followed.json"  # beside the checkpoint: what was seen until then


def train_and_follow(configs: list[dict[str, Any]], store: Store, report: Report) -> None:
    """Train the configurations of a unit together; write what was seen of each network along the way.

    A configuration has `data` (for `load`), `model`, `init`, `train` (settings of a trial), `follow` with `epochs`,
    `losses` and perhaps `patience` (see `has_settled`), and `reparameterize` with `low`, `high` and `seed`.
    """
    first = configs[0]
    data = load(**first["data"])
    device = torch.device(first.get("device", "cpu"))
    x, y = (value.to(device) for value in data.train)
    test_x, test_y = _test(data)
    held_out = (test_x.to(device), test_y.to(device))
    followers = [_Follower(config, x, y, held_out) for config in configs]
    epochs = max(config["train"]["epochs"] for config in configs)
    trials = [{**config["train"], "init": config["init"], "model_seed": config["train"]["seed"]} for config in configs]
    with store.unfinished(configs) as folder:
        seen = None if folder is None else folder / SEEN_FILE
        if seen is not None and seen.exists():  # work that was broken off goes on
            for follower, rows in zip(followers, from_json(seen.read_bytes()), strict=True):
                follower.rows = rows

        def after_epoch(epoch: int, view: PopulationView) -> None:
            looked = [followers[trial].look(epoch, view, trial) for trial in view.active]
            if seen is not None and any(looked):
                write_whole(seen, to_json([follower.rows for follower in followers]).encode())
            report(epoch / epochs, f"epoch {epoch}")

        population = train_population(
            first["model"]["name"],
            trials,
            data,
            device=device,
            checkpoint=folder,
            checkpoint_seconds=CHECKPOINT_SECONDS,
            after_epoch=after_epoch,
            show_progress=False,
        )
        _write(configs, population, followers, store)


def _write(configs: list[dict[str, Any]], population: Population, followers: list[_Follower], store: Store) -> None:
    for number, config in enumerate(configs):
        history = population.histories[number]
        last = history.iloc[-1]
        metrics = {name: float(last[name]) for name in ("train_loss", "train_error", "test_loss", "test_error")}
        metrics |= {"epochs": int(last["epoch"]), "diverged": math.isnan(metrics["train_loss"])}
        frames = {"history": history, "followed": pd.DataFrame(followers[number].rows)}
        store.write(config, metrics, frames=frames, weights=population.state(number))


class _Follower:
    """Looks at one network when its turn comes."""

    def __init__(self, config: Mapping[str, Any], x: Tensor, y: Tensor, held_out: tuple[Tensor, Tensor]) -> None:
        self._epochs = set(config["follow"]["epochs"])
        self._losses = sorted(config["follow"]["losses"], reverse=True)
        self._patience = config["follow"].get("patience", math.inf)
        self._last = config["train"]["epochs"]
        self._factor = config["reparameterize"]
        self._x, self._y, self._held_out = x, y, held_out
        self.rows: list[dict[str, Any]] = []

    def look(self, epoch: int, view: PopulationView, trial: int) -> bool:
        """Measure the network now if a rule says so; rules that hold at the same epoch share one measurement.

        Returns:
            Whether something was added.
        """
        # What a run that was broken off had seen of this and later epochs comes again.
        self.rows = [row for row in self.rows if row["epoch"] < epoch]
        row = view.row(trial)
        loss = row.get("train_loss", math.nan)
        if math.isnan(loss):
            return False
        rules = [f"epoch {epoch}"] if epoch in self._epochs else []
        passed = {row["rule"] for row in self.rows}
        rules += [f"loss {level:g}" for level in self._losses if loss < level and f"loss {level:g}" not in passed]
        if "settled" not in passed and has_settled([one["train_loss"] for one in view.rows(trial)], self._patience):
            rules.append("settled")
        if epoch == self._last or view.stopped_by(trial):
            rules.append("end")
        if not rules:
            return False
        model = view.model(trial).to(self._x.device)
        assert isinstance(model, nn.Sequential)
        before = last_layers(model, self._x, self._y)
        after = dict.fromkeys(before, math.nan)
        if all(math.isfinite(value) for value in before.values()):  # else it is about to diverge
            with contextlib.suppress(FlatscopeError):  # outputs so large that rounding changes them
                twin = random_layer_pair(model, self._x[:2], **self._factor)
                assert isinstance(twin, nn.Sequential)
                after = last_layers(twin, self._x, self._y)
        test_loss, test_error = evaluate(model, *self._held_out)
        seen = {
            "epoch": epoch,
            "train_loss": loss,
            "train_error": row["train_error"],
            "test_loss": test_loss,
            "test_error": test_error,
            **{f"before/{name}": value for name, value in before.items()},
            **{f"after/{name}": value for name, value in after.items()},
        }
        self.rows += [{"rule": rule, **seen} for rule in rules]
        return True


def has_settled(losses: Sequence[float], patience: float) -> bool:
    """Whether the last `patience` epochs brought no new lowest training loss."""
    return len(losses) > patience and min(losses[: -int(patience)]) <= min(losses[-int(patience) :])


def _test(data: Data) -> tuple[Tensor, Tensor]:
    assert data.test is not None
    return data.test
