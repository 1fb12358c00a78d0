"""Landscapes that are repeated, stopped, saved, drawn and asked for on the command line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import networks
import numpy as np
import pytest
import torch
from test_landscape import loss_and_error
from torch import Tensor

import flatscope as fs
from flatscope.cli.sources import load_model
from flatscope.errors import InputError, NumericalWarning, UnknownNameError
from flatscope.inputs.weight_files import save_weights
from flatscope.landscapes.grid_losses import GridLosses
from flatscope.landscapes.surface import Surface


def test_seed_decides_and_nothing_else_is_touched() -> None:
    tiny = networks.batchnorm_conv()
    problem = tiny.problem()
    before = {name: value.clone() for name, value in tiny.model.state_dict().items()}
    state = torch.get_rng_state()
    first, second, other = (fs.landscape(problem, grid=3, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.loss, second.loss)
    assert not torch.allclose(first.loss, other.loss)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in tiny.model.state_dict().items())
    assert all(value.grad is None for value in tiny.model.parameters())
    assert first.meta["passes"]["forward"] == pytest.approx(10)  # the centre once, then nine points
    assert first.meta["folded"]


def test_grid_is_symmetric_and_a_line_is_the_middle_of_its_plane() -> None:
    problem = networks.mlp().problem()
    plane = fs.landscape(problem, directions="gaussian", grid=7, span=0.7)
    for axis in plane.axes:
        assert torch.equal(axis, -axis.flip(0))
        assert float(axis[-1]) == 0.7
    line = fs.landscape(problem, directions="gaussian", grid=7, span=0.7, dimensions=1)
    torch.testing.assert_close(line.loss, plane.loss[:, 3], rtol=1e-13, atol=1e-14)
    assert [tuple(c.shape) for c in plane.coordinates] == [(7, 7), (7, 7)]
    frame = plane.to_frame()
    assert list(frame.columns) == ["t1", "t2", "loss", "error", "pole"]
    row = frame[(frame["t1"] == float(plane.axes[0][1])) & (frame["t2"] == float(plane.axes[1][5]))]
    assert row["loss"].tolist() == [float(plane.loss[1, 5])]


def test_test_part_and_regression() -> None:
    tiny = networks.mlp()
    assert tiny.xt is not None
    assert tiny.yt is not None
    surface = fs.landscape(tiny.problem(), grid=3, part="test")
    loss, error = loss_and_error(tiny.model, tiny.xt, tiny.yt)
    assert surface.centre == pytest.approx(loss, rel=1e-12)
    assert surface.meta["centre_error"] == pytest.approx(error)
    targets = torch.randn(11, 3, dtype=torch.float64)
    squared_error = float((tiny.model(tiny.x) - targets).detach().square().sum(1).mean())
    regression = fs.landscape(fs.Problem(tiny.model, train=(tiny.x, targets), loss="mse"), grid=3)
    assert regression.error is None
    assert regression.centre == pytest.approx(squared_error, rel=1e-12)
    with pytest.raises(InputError, match="error"):
        regression.figure(quantity="error")


@pytest.mark.parametrize("kind", ["gaussian", "hessian"])
def test_finished_rows_are_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    problem = networks.mlp().problem()
    whole = fs.landscape(problem, directions=kind, grid=5)
    kept = fs.landscape(problem, directions=kind, grid=5, checkpoint=tmp_path)
    (tmp_path / "row-00003.npz").unlink()
    (tmp_path / "row-00001.npz").write_bytes(b"half a fi")
    asked: list[int] = []
    run = GridLosses.__call__

    def counted(self: GridLosses, points: Tensor) -> Any:
        asked.append(len(points))
        return run(self, points)

    monkeypatch.setattr(GridLosses, "__call__", counted)
    again = fs.landscape(problem, directions=kind, grid=5, checkpoint=tmp_path)
    assert asked == [1, 5, 5]  # the centre and the two rows that were not there
    assert torch.equal(again.loss, kept.loss)
    torch.testing.assert_close(kept.loss, whole.loss, rtol=1e-9, atol=1e-12)
    with pytest.raises(InputError, match="another one"):
        fs.landscape(problem, directions=kind, grid=5, span=0.5, checkpoint=tmp_path)
    shifted = fs.Problem(networks.mlp().model, train=(networks.mlp().x + 1, networks.mlp().y))
    with pytest.raises(InputError, match="data"):
        fs.landscape(shifted, directions="gaussian", grid=5, checkpoint=_copied(tmp_path, problem))


def test_rows_of_the_same_function_with_other_weights_are_refused(tmp_path: Path) -> None:
    """Data and loss are the same, and so is the loss at the centre; the rows around it are not."""
    problem = networks.mlp().problem()
    fs.landscape(problem, grid=3, checkpoint=tmp_path)
    twin = problem.with_model(fs.rescale(problem.model, problem.example(), seed=1))
    with pytest.raises(InputError, match="weights"):
        fs.landscape(twin, grid=3, checkpoint=tmp_path)


def _copied(folder: Path, problem: fs.Problem) -> Path:
    target = folder / "again"
    fs.landscape(problem, directions="gaussian", grid=5, checkpoint=target)
    return target


KILLED = """
import os, signal, torch, flatscope as fs
import networks
from flatscope.landscapes.landscape_function import KeptRows

write = KeptRows.write
def killing(self, number, row):
    write(self, number, row)
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)

KeptRows.write = killing
fs.landscape(networks.mlp().problem(), grid=5, checkpoint={folder!r})
"""


@pytest.mark.long
def test_landscape_goes_on_after_a_kill(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    script = textwrap.dedent(KILLED).format(folder=str(folder))
    done = subprocess.run([sys.executable, "-c", script], env={**os.environ}, check=False, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert sorted(path.name for path in folder.glob("row-*")) == [f"row-0000{i}.npz" for i in range(3)]
    resumed = fs.landscape(networks.mlp().problem(), grid=5, checkpoint=folder)
    torch.testing.assert_close(resumed.loss, fs.landscape(networks.mlp().problem(), grid=5).loss, rtol=1e-12, atol=0)
    assert resumed.meta["passes"]["forward"] == pytest.approx(11)


# Files and pictures


@pytest.mark.parametrize("ending", [".npz", ".parquet"])
@pytest.mark.parametrize("dimensions", [1, 2])
def test_saved_surface_comes_back(tmp_path: Path, ending: str, dimensions: int) -> None:
    with pytest.warns(NumericalWarning, match="pole"):
        surface = fs.landscape(networks.lenet_like().problem(), "psi", grid=7, dimensions=dimensions, noise=0.2)
    surface.save(tmp_path / f"s{ending}")
    again = Surface.load(tmp_path / f"s{ending}")
    for name in ("loss", "error", "poles"):
        torch.testing.assert_close(getattr(again, name), getattr(surface, name), rtol=0, atol=0, equal_nan=True)
    assert all(torch.equal(a, b) for a, b in zip(again.axes, surface.axes, strict=True))
    assert (again.centre, again.space, again.directions, again.meta) == (
        surface.centre,
        surface.space,
        surface.directions,
        surface.meta,
    )


def test_files_that_are_no_surface(tmp_path: Path) -> None:
    surface = fs.landscape(networks.mlp().problem(), grid=3)
    with pytest.raises(InputError, match="ending"):
        surface.save(tmp_path / "s.pickle")
    np.savez(tmp_path / "other.npz", a=np.ones(3))
    (tmp_path / "bad.parquet").write_bytes(b"nothing")
    for name in ("other.npz", "bad.parquet", "missing.npz", "s.json"):
        with pytest.raises(InputError):
            Surface.load(tmp_path / name)
    np.savez(tmp_path / "evil.npz", head=np.array([{"a": 1}], dtype=object))
    with pytest.raises(InputError, match="surface"):
        Surface.load(tmp_path / "evil.npz")


@pytest.mark.parametrize("ending", [".png", ".svg", ".pdf", ".csv"])
@pytest.mark.parametrize("dimensions", [1, 2])
def test_pictures(tmp_path: Path, ending: str, dimensions: int) -> None:
    surface = fs.landscape(networks.mlp().problem(), grid=5, dimensions=dimensions)
    surface.save(tmp_path / f"s{ending}")
    assert (tmp_path / f"s{ending}").stat().st_size > 100
    assert "<svg" in surface._repr_html_()
    assert "loss" in repr(surface)


def test_two_surfaces_share_one_height_scale_and_poles_stay_blank() -> None:
    problem = networks.lenet_like().problem()
    low = fs.landscape(problem, grid=5, span=0.1)
    high = fs.landscape(problem, grid=5, span=3.0)
    figure = low.figure(high, titles=("near", "far"))
    limits = [ax.collections[0].get_clim() for ax in figure.axes[:2]]
    assert limits[0] == limits[1]
    assert limits[0][1] == pytest.approx(high.heights[1])
    with pytest.warns(NumericalWarning, match="pole"):
        holed = fs.landscape(problem, "psi", grid=7, noise=0.2)
    values = holed.figure().axes[0].collections
    assert any(collection.get_hatch() for collection in values)
    with pytest.raises(InputError, match="2 titles"):
        low.figure(high, titles=("one",))


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"space": "wieghts"}, UnknownNameError, "weights"),
        ({"directions": "filters"}, UnknownNameError, "filter"),
        ({"grid": 4}, InputError, "odd"),
        ({"grid": 1}, InputError, "at least 3"),
        ({"grid": 5.0}, InputError, "whole number"),
        ({"span": 0.0}, InputError, "above 0"),
        ({"noise": float("nan"), "directions": "gaussian"}, InputError, "above 0"),
        ({"dimensions": 3}, InputError, "1 or 2"),
        ({"part": "validation"}, InputError, "train or test"),
        ({"space": "psi", "directions": "filter"}, InputError, "gaussian"),
        ({"space": "psi", "rule": "best"}, InputError, "best"),
        ({"directions": 3}, InputError, "state dict"),
    ],
)
def test_bad_arguments(change: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        fs.landscape(networks.mlp().problem(), **change)


# The command line


def test_command_writes_surface_picture_and_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from flatscope.cli.app import main

    model = Path(__file__).parents[2] / "examples" / "my_model.py"
    files = [tmp_path / f"plane.{ending}" for ending in ("npz", "png", "html")]
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # put back what main replaces
    common = ["flatscope", "landscape", "--model", f"{model}:build", "--data", "digits", "--train-size", "60"]

    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [*common, *words])
        with pytest.raises(SystemExit) as leaving:
            main()
        shown = capsys.readouterr()
        return int(leaving.value.code or 0), shown.out + shown.err

    outs = [word for path in files for word in ("--out", str(path))]
    code, text = run("--space", "psi", "--relative", "--grid", "3", *outs)
    assert code == 0, text
    assert "psi, rule max_product" in text
    surface = Surface.load(files[0])
    assert (surface.space, tuple(surface.loss.shape)) == ("psi", (3, 3))
    assert surface.meta["data"] == "digits"
    assert files[1].read_bytes().startswith(b"\x89PNG")
    assert "<html" in files[2].read_text()
    code, text = run("--grid", "3", "--json", "--directions", "filter", "--dimensions", "1")
    assert code == 0, text
    printed = Surface.from_json(text[: text.rindex("}") + 1])  # what --out line.json writes
    assert (printed.directions, tuple(printed.loss.shape)) == ("filter", (3,))
    assert "no picture was asked for" not in text
    assert "no picture was asked for: --out plane.png" in run("--grid", "3")[1]
    code, text = run("--grid", "4")
    assert code == 2
    assert "odd" in text
    for epoch in (1, 2, 3):
        save_weights(load_model(f"{model}:build", seed=epoch), tmp_path / f"{epoch}.safetensors")
    several = [word for epoch in (1, 2, 3) for word in ("--to", str(tmp_path / f"{epoch}.safetensors"))]
    code, text = run("--grid", "3", *several, "--out", str(tmp_path / "path.npz"))
    assert code == 0, text
    assert len(Surface.load(tmp_path / "path.npz").meta["path"]) == 3
    code, text = run("--to", "x.safetensors", "--directions", "filter")
    assert code == 2
    assert "either" in text
