"""Networks of Petzka et al. (2019) followed along training: what is seen of each after a list of epochs.

Every stop rule is read off these looks afterwards (see `stop_rules`), so none of them has to be chosen before training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import safetensors.torch
import torch
from torch import Tensor, nn

from flatscope import Population, rescale, train_population
from flatscope.guards import write_whole
from flatscope.sweeps.configuration import from_json, to_json
from flatscope.sweeps.store import Store
from flatscope.sweeps.work import CHECKPOINT_SECONDS, trial_of
from flatscope.training.data import Data, load
from flatscope.training.loop import evaluate
from flatscope.training.population import PopulationView
from flatscope_papers.petzka2019.last_layers import measured

Report = Callable[[float, str], None]
SEEN_FILE = "followed.json"  # beside the checkpoint: what was seen until then
TWIN_IMAGES = 1_000  # that a rewritten network has the same κ shows on any samples


def train_and_follow(configs: list[dict[str, Any]], store: Store, report: Report) -> None:
    """Train the configurations of a unit together; write what was seen of each network along the way.

    A configuration is that of `train_and_measure`, with `follow`: the `epochs` after which to look, `measures`, and
    perhaps `tail`, how many of the last modules are measured, and `factor`, by which the last matrix is multiplied, and
    the layer before it divided, to see what stays.
    """
    first = configs[0]
    data = load(**first["data"])
    device = torch.device(first.get("device", "cpu"))
    followed = _Followed(configs, data, device)
    last = max(config["train"]["epochs"] for config in configs)
    with store.unfinished(configs) as folder:
        followed.go_on_in(folder)

        def after_epoch(epoch: int, view: PopulationView) -> None:
            followed.look(epoch, view)
            report(epoch / last, f"epoch {epoch}")

        population = train_population(
            first["model"]["name"],
            [trial_of(config, str(number)) for number, config in enumerate(configs)],
            data,
            device=device,
            checkpoint=folder,
            checkpoint_seconds=CHECKPOINT_SECONDS,
            after_epoch=after_epoch,
            show_progress=False,
        )
        for number, config in enumerate(configs):
            _write(number, config, population, followed, store)


class _Followed:
    """What was seen of the networks of a unit so far, and how to see more."""

    def __init__(self, configs: list[dict[str, Any]], data: Data, device: torch.device) -> None:
        assert data.test is not None
        self._configs = configs
        self._folder: Path | None = None
        self.train, self.test = ((x.to(device), y.to(device)) for x, y in (data.train, data.test))
        self.rows: list[list[dict[str, Any]]] = [[] for _ in configs]
        self._before: dict[int, Tensor] = {}  # weights one epoch before a look

    def go_on_in(self, folder: Path | None) -> None:
        """Keep what is seen in that folder; work that was broken off there goes on."""
        self._folder = folder
        if folder is not None and (folder / SEEN_FILE).exists():
            self.rows = from_json((folder / SEEN_FILE).read_bytes())

    def look(self, epoch: int, view: PopulationView) -> None:
        """Look at the networks that took part in the epoch, if it is time for it."""
        for trial in view.active:
            # What a run that was broken off had seen of this and later epochs comes again.
            self.rows[trial] = [row for row in self.rows[trial] if row["epoch"] < epoch]
        due, next_time = (
            [trial for trial in view.active if when in self._configs[trial]["follow"]["epochs"]]
            for when in (epoch, epoch + 1)
        )
        for trial in due:
            self.rows[trial].append({"epoch": epoch, **self._seen(trial, epoch, view)})
        for trial in next_time:
            self._before[trial] = self._weight(trial, view)
        if self._folder is None:
            return
        if next_time:  # a run that is broken off between the two epochs needs them
            kept = {str(trial): self._before[trial] for trial in next_time}
            write_whole(self._folder / f"before-{epoch + 1}-{next_time[0]}", safetensors.torch.save(kept))
        if due:
            write_whole(self._folder / SEEN_FILE, to_json(self.rows).encode())

    def _seen(self, trial: int, epoch: int, view: PopulationView) -> dict[str, float]:
        follow = self._configs[trial]["follow"]
        model = view.model(trial).to(self.train[0].device)
        seen = {}
        for part, samples in (("train", self.train), ("test", self.test)):
            seen[f"{part}_loss"], seen[f"{part}_error"] = evaluate(model, *samples)
        seen["gradient"] = self._mean_gradient(trial, epoch, view)
        return seen | measured(model, *self.train, follow["measures"], follow.get("tail", 0))

    def _mean_gradient(self, trial: int, epoch: int, view: PopulationView) -> float:
        """Largest entry of the last layer's gradient, averaged over the epoch's steps: plain SGD went along it."""
        train = self._configs[trial]["train"]
        if trial not in self._before and self._folder is not None:
            for path in self._folder.glob(f"before-{epoch}-*"):
                self._before |= {int(number): weight for number, weight in safetensors.torch.load_file(path).items()}
        if trial not in self._before or train.get("momentum"):
            return math.nan
        steps = math.ceil(len(self.train[0]) / train["batch_size"])
        largest = float((self._before[trial] - self._weight(trial, view)).abs().max())
        return largest / float(train["lr"] * steps)

    def _weight(self, trial: int, view: PopulationView) -> Tensor:
        *_, last = (value for name, value in view.state(trial).items() if name.endswith(".weight"))
        return last.double()


def _write(number: int, config: dict[str, Any], population: Population, followed: _Followed, store: Store) -> None:
    history, rows = population.histories[number], followed.rows[number]
    metrics = {"epochs": int(history["epoch"].iloc[-1]), "diverged": population.frame()["diverged"].iloc[number]}
    if "factor" in config["follow"] and rows and not metrics["diverged"]:
        x, y = (part[:TWIN_IMAGES] for part in followed.train)
        model = population.model(number).to(x.device, torch.float64)
        metrics["moved"] = moved_by_rewriting(model, x.double(), y, config["follow"])
    frames = {"history": history, "followed": pd.DataFrame(rows)}
    store.write(config, metrics, frames=frames, weights=population.state(number))


def moved_by_rewriting(model: nn.Module, x: Tensor, y: Tensor, follow: Mapping[str, Any]) -> float:
    """Largest relative change of κ, κ_τ and ρ when the last matrix is multiplied and the layer before it divided.

    Trace and largest eigenvalue of the last matrix are divided by the square of the factor meanwhile, and those of the
    layer before multiplied: how far they are from that counts as well.

    Args:
        model: ends with two dense layers.
        x: some inputs.
        y: their classes.
        follow: `measures`, `tail` and `factor`.
    """
    *_, (before, _), (last, _) = ((name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear))
    twin = rescale(model, x[:2], by="layer", factors={before: 1 / follow["factor"]})
    now, then = (measured(one, x, y, follow["measures"], follow["tail"]) for one in (twin, model))
    due = {name: value * law(name, follow["factor"], before, last) for name, value in then.items()}
    return max(abs(now[name] / value - 1) for name, value in due.items() if value)


def law(column: str, factor: float, before: str = "fc2", last: str = "fc3") -> float:
    """By what `measure/layer` is multiplied when the last matrix is and the layer before it is divided."""
    measure, _, layer = column.partition("/")
    if measure not in ("layer_trace", "layer_max_eigenvalue"):
        return 1.0
    return {last: factor**-2, before: factor**2}[layer]
