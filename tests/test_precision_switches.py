"""Torch's switches for float32 products, older and newer, and signals between a switch and a note to put it back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from test_callers_settings import NAMES, X, Y, everything, numbers, plain, things
from torch import Tensor, nn
from torch.utils import checkpoint

import flatscope as fs
from flatscope.isolation import own_settings
from flatscope.switches import signals_wait

NEWER = hasattr(torch.backends, "fp32_precision")
OLDER_NAMES = [
    "pass",
    'torch.set_float32_matmul_precision("medium")',
    'torch.set_float32_matmul_precision("high")',
    "backends.cuda.matmul.allow_tf32 = True",
    "backends.cudnn.allow_tf32 = False",
    "backends.cudnn.allow_tf32 = True",
]
NEWER_NAMES = [
    f'{place}.fp32_precision = "{value}"'
    for place, values in {
        "backends": ("tf32", "ieee", "bf16", "none"),
        "backends.cuda.matmul": ("tf32", "ieee"),
        "backends.cudnn": ("tf32", "ieee"),
        "backends.cudnn.conv": ("tf32", "ieee"),
        "backends.cudnn.rnn": ("ieee",),
        "backends.mkldnn": ("bf16",),
        "backends.mkldnn.matmul": ("bf16", "ieee"),
        "backends.mkldnn.conv": ("bf16",),
    }.items()
    for value in values
]
SETTINGS = OLDER_NAMES + (NEWER_NAMES if NEWER else [])


def asked(name: Any) -> str:
    """What a switch says, or that it refuses to be read."""
    try:
        return str(name())
    except RuntimeError as problem:
        return str(problem).splitlines()[0]


def switches() -> dict[str, str]:
    """Every switch by its name, and what each says where a more general one is set after this."""
    backends = torch.backends
    found = {
        "products": asked(torch.get_float32_matmul_precision),
        "cublas": asked(lambda: backends.cuda.matmul.allow_tf32),
        "cudnn": asked(lambda: backends.cudnn.allow_tf32),
    }
    if not NEWER:
        return found
    read, write = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
    entries = [("generic", "all"), ("cuda", "all"), ("mkldnn", "all")]
    entries += [(library, name) for library in ("cuda", "mkldnn") for name in ("matmul", "conv", "rnn")]
    found |= {"/".join(entry): read(*entry) for entry in entries}
    for general in entries[:1] + entries[1:3]:
        before = read(*general)
        for value in ("ieee", "tf32"):
            write(*general, value)
            found |= {f"{'/'.join(entry)} under {general[0]} {value}": read(*entry) for entry in entries}
        write(*general, before if general == entries[0] else "none")
    return found


def small(folder: Path) -> list[float]:
    """One number of every kind of call that runs a model."""
    model = plain().float()
    problem = fs.Problem(model, (X.float(), Y))
    twin = fs.rescale(model, X.float(), seed=1)
    return [
        *fs.measure(problem, NAMES).to_frame()["value"].tolist(),
        *fs.compare({"one": model, "two": twin}, (X.float(), Y), ["margin"])
        .to_frame()
        .select_dtypes("number")
        .to_numpy()
        .ravel()
        .tolist(),
        *fs.landscape(problem, grid=3).loss.flatten().tolist(),
        *(fs.hessian(problem) @ torch.ones(73)).tolist(),
        *(float(value.detach().double().sum()) for value in twin.parameters()),
    ]


def on_a_gpu() -> list[float]:
    """Numbers of layers whose products a GPU rounds coarsely where it may: full, convolutional, recurrent."""
    names = ["gradient_norm", "hessian_trace", "hessian_max_eigenvalue", "margin", "fisher_rao_norm"]
    torch.manual_seed(5)
    images, series = torch.randn(64, 8, 16, 16).cuda(), torch.randn(64, 24, 32).cuda()
    labels = (torch.arange(64) % 10).cuda()
    networks = (
        (nn.Sequential(nn.Conv2d(8, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 14 * 14, 10)), images),
        (LastStep(), series),
        (nn.Sequential(nn.Flatten(), nn.Linear(24 * 32, 256), nn.ReLU(), nn.Linear(256, 10)), series),
    )
    found = []
    for network, x in networks:
        problem = fs.Problem(network.cuda(), (x, labels))
        found += fs.measure(problem, names).to_frame()["value"].tolist()
        found += fs.landscape(problem, grid=3).loss.flatten().tolist()
    return found


class LastStep(nn.Module):
    """A recurrent layer, whose last state is read."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.last = nn.GRU(32, 64, batch_first=True), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.recurrent(x)[0][:, -1])
        return found


def in_new_process(setting: str, folder: Path, function: str, measured: bool = True) -> Any:
    """Numbers, and the switches afterwards, of a process that begins with the setting."""
    program = f"""
        import json, sys
        from pathlib import Path
        import torch
        from torch import backends
        from test_callers_settings import everything, things
        from test_precision_switches import on_a_gpu, small, switches
        {setting}
        numbers = {f"{function}" if measured else "[]"}
        print(json.dumps([numbers, switches()]))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program).replace("FOLDER", repr(str(folder)))],
        capture_output=True, text=True, cwd=Path(__file__).parent, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The numbers without any setting."""
    return small(tmp_path_factory.mktemp("usual"))


QUICK = ["pass", OLDER_NAMES[1], *(NEWER_NAMES[:1] + NEWER_NAMES[-3:-2] if NEWER else [])]  # and one that a CPU heeds


@pytest.mark.parametrize("setting", QUICK)
def test_switches_of_float32_products_change_no_number_and_stay(
    setting: str, usual: list[float], tmp_path: Path
) -> None:
    found, after = in_new_process(setting, tmp_path, "small(Path(FOLDER))")
    _, untouched = in_new_process(setting, tmp_path, "", measured=False)
    assert found == pytest.approx(usual, rel=1e-9, nan_ok=True)
    assert after == untouched


@pytest.fixture(scope="module")
def everything_usual(usual: list[float], tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The numbers of every public function without any setting."""
    return usual + everything(things(), tmp_path_factory.mktemp("usual"))


@pytest.mark.long
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_public_function_takes_every_switch(setting: str, everything_usual: list[float], tmp_path: Path) -> None:
    found, after = in_new_process(setting, tmp_path, "small(Path(FOLDER)) + everything(things(), Path(FOLDER))")
    _, untouched = in_new_process(setting, tmp_path, "", measured=False)
    assert found == pytest.approx(everything_usual, rel=1e-9, nan_ok=True)
    assert after == untouched


@pytest.fixture(scope="module")
def usual_on_a_gpu() -> list[float]:
    """The numbers on a GPU without any setting."""
    return on_a_gpu()


@pytest.mark.long
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("setting", SETTINGS)
def test_switches_change_no_number_on_a_gpu(setting: str, usual_on_a_gpu: list[float], tmp_path: Path) -> None:
    assert sum(value == value for value in usual_on_a_gpu) > 30
    found, after = in_new_process(setting, tmp_path, "on_a_gpu()")
    _, untouched = in_new_process(setting, tmp_path, "", measured=False)
    # TF32 would move them by 1e-3
    assert found == pytest.approx(usual_on_a_gpu, rel=1e-5, abs=1e-6, nan_ok=True)
    assert after == untouched


HOOKS: dict[str, Any] = {
    "kept on the CPU": torch.autograd.graph.save_on_cpu,
    "forbidden": lambda: torch.autograd.graph.disable_saved_tensors_hooks("none here"),
    "of the caller": lambda: torch.autograd.graph.saved_tensors_hooks(lambda kept: kept * 2, lambda kept: kept / 2),
}


@pytest.mark.skipif(not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"), reason="torch cannot say them")
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_for_saved_tensors_change_no_number_and_stay(kind: str) -> None:
    engine = torch._C._autograd

    def state() -> tuple[Any, Any]:
        top = engine._top_saved_tensors_default_hooks(False)
        return top, engine._saved_tensors_hooks_get_disabled_error_message()

    expected = numbers(plain())
    context: AbstractContextManager[Any] = HOOKS[kind]()
    with context:
        before = state()
        found = numbers(plain())
        assert state() == before
    assert found == pytest.approx(expected, rel=1e-12)


def test_a_signal_waits_until_the_switches_are_noted() -> None:
    reached = []

    def block() -> None:
        with signals_wait():
            os.kill(os.getpid(), signal.SIGINT)
            reached.append("the end of the block")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("place", ["enter", "leave"])
def test_an_interrupt_while_settings_are_switched_leaves_torch_as_it_was(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def state() -> tuple[Any, ...]:
        attention = [torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()]
        return (*attention, checkpoint.CheckpointFunction, torch.get_default_dtype(), torch.is_grad_enabled())

    before = state()
    set_dtype = torch.set_default_dtype
    came = []

    def interrupted(dtype: torch.dtype) -> None:
        set_dtype(dtype)
        came.append(dtype)
        if len(came) == (1 if place == "enter" else 2):
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(torch, "set_default_dtype", interrupted)
    with pytest.raises(KeyboardInterrupt), own_settings():
        pass
    monkeypatch.undo()
    assert len(came) == 2
    assert state() == before
    with own_settings():
        assert checkpoint.CheckpointFunction is not before[2]
    assert state() == before


def test_an_interrupt_between_a_switch_and_its_note_leaves_torch_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a context has switched and nobody knows yet that it has to be left."""
    switched = []

    class Switch:
        def __init__(self, _: object) -> None:
            pass

        def __enter__(self) -> None:
            switched.append("on")
            os.kill(os.getpid(), signal.SIGINT)
            switched.append("known")

        def __exit__(self, *raised: object) -> None:
            switched.append("off")

    monkeypatch.setattr("flatscope.isolation.sdpa_kernel", Switch)
    with pytest.raises(KeyboardInterrupt), own_settings():
        pass
    assert switched == ["on", "known", "off"]
