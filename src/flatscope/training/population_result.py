"""What training many networks gives: each network, its history, its data, and one table of all."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
from torch import Tensor, nn

from flatscope.charts import Bars, finite_or_nan
from flatscope.errors import InputError
from flatscope.formatting import readable_number
from flatscope.problem import Problem
from flatscope.result import Result
from flatscope.training.checkpoint import TrainingState
from flatscope.training.evaluation import Pair
from flatscope.training.loop import COLUMNS, ERRORS
from flatscope.training.trials import CONFIG_KEYS, Trial, TrialGroup
from flatscope.version import __version__

SHOWN_ROWS = 20
FINAL = (*ERRORS, "gradient_norm", "distance")


class Population(Result, Sequence[nn.Module]):
    """Networks that were trained together; as a sequence, the networks themselves, in the order of the trials.

    Args:
        trials: the settings, in order.
        groups: the trials by architecture, with weights and records.
        test: the test pair, or None.

    Example:
        >>> import torch, flatscope as fs
        >>> data = (torch.eye(3), torch.tensor([0, 1, 0]))
        >>> build = lambda trial: torch.nn.Linear(3, 2)
        >>> found = fs.train_population(build, [{"lr": rate, "epochs": 1} for rate in (0.1, 0.2)], data)
        >>> len(found), found.to_frame()["lr"].tolist()
        (2, [0.1, 0.2])
    """

    WORD = "population"
    READABLE = ()  # the networks are not in the frame

    def __init__(self, trials: Sequence[Trial], groups: Sequence[TrialGroup], test: Pair | None) -> None:
        self._trials, self._groups, self._test = list(trials), list(groups), test
        self.meta = {"networks": len(self._trials), "groups": len(self._groups), "version": __version__}
        self.meta["trained_by"] = [group.trained_by for group in self._groups]
        self._places = {trial.index: (group, row) for group in groups for row, trial in enumerate(group.trials)}

    @property
    def trials(self) -> list[dict[str, Any]]:
        """The trials as they were given, with name, seed and model_seed filled in."""
        return [dict(trial.given) for trial in self._trials]

    @property
    def names(self) -> list[str]:
        """Names of the trials; their numbers where none were given."""
        return [trial.name for trial in self._trials]

    @property
    def groups(self) -> list[list[int]]:
        """Trials (by position) that were trained as one stack; a trial by itself if it could not be stacked."""
        return [[trial.index for trial in group.trials] for group in self._groups]

    @property
    def histories(self) -> list[pd.DataFrame]:
        """The history of each trial, with the columns of `train`; `seconds` counts for the whole group."""
        records = [self._training_state(i) for i in range(len(self))]
        return [pd.DataFrame(r.rows, columns=list(COLUMNS)).astype({"epoch": int}) for r in records]

    @property
    def history(self) -> pd.DataFrame:
        """All histories in one frame, with the columns `trial` (position) and `name` in front."""
        frames = []
        for i, frame in enumerate(self.histories):
            frame.insert(0, "trial", i)
            frame.insert(1, "name", self._trials[i].name)
            frames.append(frame)
        filled = [frame for frame in frames if len(frame)]
        return pd.concat(filled, ignore_index=True) if filled else frames[0]

    def to_frame(self) -> pd.DataFrame:
        """One row per trial: settings, then what came out.

        Settings are the fields of `TrainConfig` (`epochs` as `max_epochs`), `model_seed`, `init`, `train_size`,
        `noise_temperature`, the options of model and labels as `model.…` and `labels.…`, and the user's own keys.
        Results are those of the last evaluated epoch, `epochs` finished, `stopped_by`, `diverged`, `seconds` until
        the trial stopped (of its whole group, since its trials run together), and `group`. With test data also
        `loss_gap`, test less training loss, and for classes `error_gap`.
        """
        return pd.DataFrame([self._row_of_trial(trial) for trial in self._trials])

    def chart(self) -> Bars:
        """Losses of every network, on the training set and where there is one on the test set."""
        frame = self.to_frame()
        series = {name: finite_or_nan(frame[name]) for name in ("train_loss", "test_loss") if name in frame}
        return Bars(self.names, series, axis="loss")

    def frame(self) -> pd.DataFrame:
        """The same as `to_frame`."""
        return self.to_frame()

    def headline_lines(self) -> list[str]:
        """Sentences on how many networks ended as they should, how far apart their gaps are, what to do with them."""
        frame, size = self.to_frame(), f"{len(self)} networks"
        lost = int(frame["diverged"].sum())
        gap = next((name for name in ("error_gap", "loss_gap") if name in frame and frame[name].notna().any()), "")
        lines = [f"{lost} of {size} diverged: leave them out, or lower their rates." if lost else f"{size} trained."]
        if gap:
            low, high = frame[gap].min(), frame[gap].max()
            lines.append(
                f"Their {gap.replace('_', ' ')}s go from {readable_number(low, 3)} to {readable_number(high, 3)}."
            )
        return [*lines, "Next: measure each, then fs.PopulationFrame or fs.stats to see what predicts the gap."]

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Settings that differ between the trials, and how each ended."""
        frame = self.to_frame()
        varied = [name for name in frame if frame[name].astype(str).nunique() > 1 or name == "name"]
        kept = frame[[name for name in frame if name in varied or name in (*ERRORS, "epochs", "stopped_by")]]
        rows = [
            ["" if pd.isna(v) else readable_number(v) if isinstance(v, float) else str(v) for v in row]
            for row in kept.to_numpy(dtype=object)
        ]
        return [str(name) for name in kept], rows

    def model(self, i: int) -> nn.Module:
        """The trained network of trial `i` as an ordinary module in eval mode, on the CPU."""
        group, row = self._group_and_row(i)
        return group.model(row)

    def state(self, i: int) -> dict[str, Tensor]:
        """Trained weights and buffers of trial `i`, on the CPU."""
        group, row = self._group_and_row(i)
        return group.state(row)

    def initial(self, i: int) -> dict[str, Tensor]:
        """Weights and buffers of trial `i` before training, on the CPU."""
        group, row = self._group_and_row(i)
        return group.state(row, initial=True)

    def data(self, i: int) -> Pair:
        """The training pair of trial `i`: its own subset, with its own labels."""
        group, row = self._group_and_row(i)
        return group.data[row].pair()

    def problem(self, i: int, data: Any = None, *, test: Pair | None = None, **settings: Any) -> Problem:
        """Trial `i` as a `Problem`: its network, training samples and labels, loss, test data and starting weights.

        Args:
            i: position of the trial.
            data: training samples in place of the trial's own.
            test: test samples in place of those given for training.
            settings: of `Problem`: device, dtype, batch_size.
        """
        group, row = self._group_and_row(i)
        return Problem(
            self.model(i),
            train=self.data(i) if data is None else data,
            test=self._test if test is None else test,
            loss=group.trials[row].config.loss,
            initial=self.initial(i),
            **{"device": group.data[row].images.device, **settings},
        )

    def __len__(self) -> int:
        return len(self._trials)

    def __iter__(self) -> Iterator[nn.Module]:
        return (self.model(i) for i in range(len(self)))

    def __getitem__(self, i: Any) -> Any:
        return [self.model(j) for j in range(len(self))[i]] if isinstance(i, slice) else self.model(i)

    def __repr__(self) -> str:
        ends = [self._training_state(i).stopped_by or "interrupted" for i in range(len(self))]
        counted = ", ".join(f"{ends.count(end)} by {end}" for end in dict.fromkeys(ends))
        groups = "1 group" if len(self._groups) == 1 else f"{len(self._groups)} groups"
        return f"Population({len(self)} networks in {groups}; stopped: {counted})"

    def to_html(self) -> str:
        """Summary and the first rows, as HTML."""
        more = f"<p>{len(self) - SHOWN_ROWS} more</p>" if len(self) > SHOWN_ROWS else ""
        header, rows = self.cells()
        table = pd.DataFrame(rows[:SHOWN_ROWS], columns=header).to_html(index=False, border=0, classes="flatscope")
        return f"<p>{html.escape(repr(self))}</p>{table}{more}"

    __eq__ = object.__eq__  # networks with equal settings and errors may have other weights
    __hash__ = object.__hash__  # type: ignore[assignment]

    def _group_and_row(self, i: int) -> tuple[TrialGroup, int]:
        try:
            return self._places[range(len(self))[i]]
        except IndexError:
            raise IndexError(f"trial {i} of a population of {len(self)}") from None  # ends iteration by index
        except TypeError:
            raise InputError("the position of a trial", repr(i), where="Population") from None

    def _training_state(self, i: int) -> TrainingState:
        group, row = self._group_and_row(i)
        return group.records[row]

    def _row_of_trial(self, trial: Trial) -> dict[str, Any]:
        group, _ = self._places[trial.index]
        record = self._training_state(trial.index)
        config = trial.config.to_dict()
        line: dict[str, Any] = {"trial": trial.index, "name": trial.name}
        line |= {("max_epochs" if key == "epochs" else key): config[key] for key in CONFIG_KEYS}
        line |= {"model_seed": trial.model_seed, "init": trial.init, "train_size": len(group.data[0].targets)}
        line["noise_temperature"] = trial.noise_temperature
        for prefix, part in (("model", trial.model_options), ("init", trial.init_options), ("labels", trial.labels)):
            line |= {f"{prefix}.{key}": value for key, value in (part or {}).items()}
        line |= {key: value for key, value in trial.given.items() if key not in line and _is_plain_value(value)}
        last: Mapping[str, float] = record.rows[-1] if record.rows else {}
        line |= {name: last.get(name, math.nan) for name in FINAL}
        if self._test is not None:  # left out otherwise: an empty column would pass for the gap of a population
            kinds = ("loss",) if group.data[0].targets.is_floating_point() else ("loss", "error")
            line |= {f"{kind}_gap": line[f"test_{kind}"] - line[f"train_{kind}"] for kind in kinds}
        stopped_by = record.stopped_by or "interrupted"
        line |= {"epochs": record.epochs, "stopped_by": stopped_by, "diverged": stopped_by == "diverged"}
        return line | {"seconds": record.seconds, "group": group.number}


def _is_plain_value(value: object) -> bool:
    return isinstance(value, str | int | float | bool)
