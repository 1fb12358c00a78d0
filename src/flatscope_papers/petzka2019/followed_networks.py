"""Networks of Petzka et al. (2019) followed along training: what is seen of each after a list of epochs.

Every stop rule is read off these looks afterwards (see `stop_rules`), so none of them has to be chosen before training.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional

from flatscope import Population, train_population
from flatscope.extend import own_settings, read_file, write_whole
from flatscope.files import from_npz_bytes, json_bytes, npz_bytes
from flatscope.inputs import Data, load
from flatscope.training import CHECKPOINT_SECONDS, PopulationView, Store, evaluate, from_json, to_json, trial_of

Report = Callable[[float, str], None]
Pair = tuple[Tensor, Tensor]
SEEN_FILE = "followed.json"  # beside the checkpoint: what was seen until then
ERRORS = ("train_loss", "train_error", "test_loss", "test_error")
EVALUATED_AT_ONCE = 100_000  # images of all networks together
REWRITTEN_IMAGES = 1_000  # that a rewritten network has the same κ shows on any samples


def train_and_follow(configs: list[dict[str, Any]], store: Store, report: Report) -> None:
    """Train the configurations of a unit together; write what was seen of each network along the way.

    A configuration is that of `train_and_measure`, with `follow`: the `epochs` after which to look, and the `measures`
    and `layers` to look at; `losses`: to look as well at the end of the epoch in which the mean of the mini-batch
    losses first falls below each of them (`below` in what was seen; of several the smallest); `factor`, by which the
    last of two layers is multiplied, and the one before it divided, to see what stays.
    """
    first = configs[0]
    data = load(**first["data"])
    device = torch.device(first.get("device", "cpu"))
    followed = _Followed(configs, data, device)
    last = max(config["train"]["epochs"] for config in configs)
    with store.unfinished(configs) as folder:
        followed.resume_in_folder(folder)

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
            _write_followed_trial(number, config, population, followed.rows[number], store)


class _Followed:
    """Records of the networks of a unit so far, and the function that adds more."""

    def __init__(self, configs: list[dict[str, Any]], data: Data, device: torch.device) -> None:
        assert data.test is not None
        self._configs = configs
        self._folder: Path | None = None
        self._samples = {
            part: (x.to(device), y.to(device)) for part, (x, y) in (("train", data.train), ("test", data.test))
        }
        self.rows: list[list[dict[str, Any]]] = [[] for _ in configs]
        self._before: dict[int, Tensor] = {}  # weights one epoch before a look

    def resume_in_folder(self, folder: Path | None) -> None:
        """Keep what is seen in that folder; work that was broken off there goes on."""
        self._folder = folder
        if folder is not None and (folder / SEEN_FILE).exists():
            try:
                self.rows = from_json(read_file(folder / SEEN_FILE), sealed_only=True)["rows"]
            except ValueError:  # damaged: the work begins anew
                shutil.rmtree(folder)

    def look(self, epoch: int, view: PopulationView) -> None:
        """Look at the networks that took part in the epoch, if it is time for it."""
        for trial in view.active:
            # What a run that was broken off had seen of this and later epochs comes again.
            self.rows[trial] = [row for row in self.rows[trial] if row["epoch"] < epoch]
        planned, next_time = (
            [trial for trial in view.active if when in self._configs[trial]["follow"]["epochs"]]
            for when in (epoch, epoch + 1)
        )
        below = {trial: passed for trial in view.active if (passed := self._smallest_loss_limit_reached(trial, view))}
        due = [trial for trial in view.active if trial in planned or trial in below]
        if due:
            for trial, row in self._measures_by_trial(due, epoch, view).items():
                self.rows[trial].append(row | {"below": below.get(trial, math.nan)})
        for trial in next_time:
            self._before[trial] = self._last_weight(trial, view)
        if self._folder is None:
            return
        if next_time:  # a run that is broken off between the two epochs needs them
            kept = {str(trial): self._before[trial].cpu().numpy() for trial in next_time}
            write_whole(self._folder / f"before-{epoch + 1}-{next_time[0]}", npz_bytes(kept))
        if due:
            write_whole(self._folder / SEEN_FILE, json_bytes(to_json({"rows": self.rows})))

    def _smallest_loss_limit_reached(self, trial: int, view: PopulationView) -> float | None:
        """The smallest limit below which the mean of the mini-batch losses is in this epoch for the first time."""
        limits = self._configs[trial]["follow"].get("losses")
        if not limits:
            return None
        last = min((row["below"] for row in self.rows[trial] if not math.isnan(row["below"])), default=math.inf)
        loss = view.batch_loss(trial)
        return min((limit for limit in limits if loss < limit < last), default=None)

    def _measures_by_trial(self, trials: Sequence[int], epoch: int, view: PopulationView) -> dict[int, dict[str, Any]]:
        follow = self._configs[trials[0]]["follow"]
        rows = {
            trial: {"epoch": epoch, **errors} for trial, errors in self._errors_by_trial(trials, epoch, view).items()
        }
        for trial, row in rows.items():
            row["gradient"] = self._mean_gradient(trial, epoch, view)
        for entry in view.measure(follow["measures"], follow["layers"], trials=trials).to_dict("records"):
            rows[entry["trial"]] |= {f"{name}/{entry['layer']}": float(entry[name]) for name in follow["measures"]}
        if "factor" in follow:
            factors = [self._configs[trial]["follow"]["factor"] for trial in trials]
            for trial, moved in change_by_layer_rescaling(
                view, trials, follow["measures"], follow["layers"], factors
            ).items():
                rows[trial]["moved"] = moved
        return rows

    def _errors_by_trial(self, trials: Sequence[int], epoch: int, view: PopulationView) -> dict[int, dict[str, float]]:
        """Losses and errors: of the history, where the networks have just been evaluated for it."""
        known = {trial: view.row(trial) for trial in trials}
        if all(row.get("epoch") == epoch for row in known.values()):
            return {trial: {name: row[name] for name in ERRORS} for trial, row in known.items()}
        parts = [loss_and_error_of_trials(view, trials, self._samples[part]) for part in ("train", "test")]
        return {
            trial: dict(zip(ERRORS, (*train, *test), strict=True))
            for trial, train, test in zip(trials, *parts, strict=True)
        }

    def _mean_gradient(self, trial: int, epoch: int, view: PopulationView) -> float:
        """Largest entry of the last layer's gradient, averaged over the epoch's steps: plain SGD went along it."""
        train = self._configs[trial]["train"]
        if trial not in self._before and self._folder is not None:
            for path in self._folder.glob(f"before-{epoch}-*"):
                stored = from_npz_bytes(read_file(path), sealed_only=True)
                self._before |= {int(number): torch.from_numpy(weight) for number, weight in stored.items()}
        if trial not in self._before or train.get("momentum"):
            return math.nan
        steps = math.ceil(len(self._samples["train"][1]) / train["batch_size"])
        largest = float((self._before[trial] - self._last_weight(trial, view)).abs().max())
        return largest / float(train["lr"] * steps)

    def _last_weight(self, trial: int, view: PopulationView) -> Tensor:
        *_, last = (value for name, value in view.state(trial).items() if name.endswith(".weight"))
        return last.double()


def loss_and_error_of_trials(view: PopulationView, trials: Sequence[int], samples: Pair) -> list[tuple[float, float]]:
    """Mean loss and share of wrong answers of these networks, all at once."""
    template = view.model(trials[0]).to(samples[0].device)
    places = [view.active.index(trial) for trial in trials]
    weights = {name: value[places] for name, value in view.weights().items()}
    losses, wrong = torch.zeros(2, len(trials), dtype=torch.float64, device=samples[0].device)
    size = max(1, EVALUATED_AT_ONCE // len(trials))
    with torch.no_grad(), own_settings():
        for x, y in zip(*(torch.split(part, size) for part in samples), strict=True):
            outputs = torch.vmap(lambda own, x=x: functional_call(template, own, (x,)))(weights)
            values = functional.cross_entropy(outputs.flatten(0, 1), y.repeat(len(trials)), reduction="none")
            losses += values.reshape(len(trials), -1).double().sum(1)
            wrong += (outputs.argmax(2) != y).sum(1)
    loss_and_error: list[tuple[float, float]] = (torch.stack([losses, wrong], dim=1) / len(samples[1])).tolist()
    for place, trial in enumerate(trials):
        if not math.isfinite(loss_and_error[place][0]):  # by itself: it may have that from a neighbour
            loss_and_error[place] = evaluate(view.model(trial).to(samples[0].device), *samples)
    return loss_and_error


def change_by_layer_rescaling(
    view: PopulationView, trials: Sequence[int], measures: Sequence[str], layers: Sequence[str], factors: Sequence[int]
) -> dict[int, float]:
    """Largest relative change of a measure when the last layer is multiplied and the one before it divided.

    Trace and largest eigenvalue must change by the square of the factor: for them it is how far they are from that.

    Args:
        view: the networks.
        trials: which of them.
        measures: names.
        layers: the last one, and the one before it.
        factors: of each network.
    """
    last, before = layers
    places = [view.active.index(trial) for trial in trials]
    weights = {name: value[places] for name, value in view.weights().items()}
    times = torch.tensor(factors, dtype=torch.float32, device=weights[f"{last}.weight"].device)[:, None]
    rewritten = weights | {
        f"{last}.weight": weights[f"{last}.weight"] * times[..., None],
        f"{before}.weight": weights[f"{before}.weight"] / times[..., None],
        f"{before}.bias": weights[f"{before}.bias"] / times,
    }
    then, now = (
        view.measure(measures, layers, trials=trials, samples=REWRITTEN_IMAGES, weights=own)
        for own in (weights, rewritten)
    )
    factor = dict(zip(trials, factors, strict=True))
    moved: dict[int, float] = {}
    for old, new in zip(then.to_dict("records"), now.to_dict("records"), strict=True):
        trial, layer = old["trial"], old["layer"]
        due = {
            name: old[name] * predicted_factor_of_layer_measure(f"{name}/{layer}", factor[trial], last, before)
            for name in measures
        }
        change = max(abs(new[name] / due[name] - 1) if due[name] else 0.0 for name in measures)
        moved[trial] = max(moved.get(trial, 0.0), change)
    return moved


def predicted_factor_of_layer_measure(column: str, factor: float, last: str = "fc3", before: str = "fc2") -> float:
    """By what `measure/layer` is multiplied when the last layer is and the one before it is divided."""
    measure, _, layer = column.partition("/")
    if measure not in ("layer_trace", "layer_max_eigenvalue"):
        return 1.0
    return {last: factor**-2, before: factor**2}[layer]


def _write_followed_trial(
    number: int, config: dict[str, Any], population: Population, rows: list[dict[str, Any]], store: Store
) -> None:
    diverged = bool(population.frame()["diverged"].iloc[number])
    metrics = {"epochs": int(population.histories[number]["epoch"].iloc[-1]), "diverged": diverged}
    frames = {"history": population.histories[number], "followed": pd.DataFrame(rows)}
    store.write(config, metrics, frames=frames, weights=population.state(number))
