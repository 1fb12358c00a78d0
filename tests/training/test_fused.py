"""The fused kernel: the steps of a stack, bit for bit the same again, and a reason wherever the stack is used.

Without a GPU the kernel runs as C++ with threads of the CPU (tests/helpers/fused_on_cpu.py); with one, also as meant.
"""

import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from fused_on_cpu import COMPILER, CppMachine
from torch import nn
from torch.nn import functional

from flatscope.errors import InputError
from flatscope.training import fused_device, fused_stack, population
from flatscope.training.checkpoint import epoch_order
from flatscope.training.fused_chain import NotFused, read_chain
from flatscope.training.fused_source import plan_kernel
from flatscope.training.population import train_population

torch.set_num_threads(1)

CHAINS = {
    "pooled": (
        (2, 9, 9),
        lambda: nn.Sequential(
            *(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 2, padding=1), nn.MaxPool2d(2)),
            *(nn.ReLU(), nn.Flatten(), nn.Linear(16, 7), nn.ReLU(), nn.Linear(7, 3)),
        ),
    ),
    "strided": (
        (3, 9, 8),
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(4, 5, 3, stride=2, padding=1), nn.ReLU()),
            *(nn.Conv2d(5, 6, (3, 2)), nn.ReLU(), nn.Conv2d(6, 3, 1), nn.Flatten()),
        ),
    ),
    "averaged": (
        (1, 11, 11),
        lambda: nn.Sequential(
            *(nn.Conv2d(1, 4, 3, bias=False), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(4, 5, 2), nn.AvgPool2d((1, 2))),
            *(nn.ReLU(), nn.Conv2d(5, 3, (2, 1)), nn.Flatten(), nn.Linear(6, 3, bias=False)),
        ),
    ),
    "uneven": (
        (2, 8, 11),
        lambda: nn.Sequential(
            *(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.MaxPool2d(3)),
            *(nn.Conv2d(4, 3, 2, stride=2, padding=1), nn.Flatten(), nn.Linear(12, 3)),
        ),
    ),
    "dense": ((10,), lambda: nn.Sequential(nn.Linear(10, 9), nn.ReLU(), nn.Linear(9, 3))),
}
TRIALS = [
    {"lr": 0.01, "batch_size": 4, "momentum": 0.9, "weight_decay": 0.01},
    {"lr": 0.1, "batch_size": 7, "lr_steps": ((1, 0.5),)},
    {"lr": 0.1, "batch_size": 50, "momentum": 0.5, "labels": {"random": 0.3, "seed": 3}},
    {"lr": 0.1, "batch_size": 9, "shuffle": False},
]


def samples(shape, n=60, seed=5):
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 3
    return torch.randn(3, *shape, generator=generator)[y] + torch.randn(n, *shape, generator=generator), y


def built(chain):
    def build(trial):
        with torch.random.fork_rng():
            torch.manual_seed(trial["model_seed"])
            return CHAINS[chain][1]()

    return build


def run(chain, trials, device="cpu", epochs=2, data=None, **settings):
    trials = [{"seed": i, "epochs": epochs, **trial} for i, trial in enumerate(trials)]
    return train_population(built(chain), trials, data or samples(CHAINS[chain][0]), device=device, **settings)


def same_bits(first, second):
    return all(
        torch.equal(value, second.state(i)[name]) for i in range(len(first)) for name, value in first.state(i).items()
    )


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fused")


@pytest.fixture(
    params=[
        pytest.param("cpp", marks=pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")),
        pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
    ]
)
def device(request, monkeypatch, folder):
    if request.param == "cuda":
        return "cuda"
    monkeypatch.setattr(fused_stack, "machine_of", lambda device: CppMachine(folder))
    return "cpu"


@pytest.mark.parametrize("chain", CHAINS)
def test_every_trial_takes_the_steps_of_a_stack(device, chain):
    """Epochs of 15, 9, 2 and 7 steps, with all that may differ between trials; one rate changes after the first."""
    held_out = samples(CHAINS[chain][0], n=31, seed=6)
    fused = run(chain, TRIALS, device, test=held_out, stacked="fused")
    stacked = run(chain, TRIALS, device, test=held_out, stacked="stack")
    assert fused.meta["trained_by"] == ["fused kernel"]
    assert len(stacked.groups) == 4
    for i in range(len(TRIALS)):
        for name, expected in stacked.state(i).items():
            scale = float(expected.abs().max())
            assert float((fused.state(i)[name] - expected).abs().max()) < 2e-5 * scale, (i, name)
            assert not torch.equal(expected, fused.initial(i)[name])
    columns = ["train_loss", "train_error", "test_loss", "test_error", "distance", "lr"]
    for mine, theirs in zip(fused.histories, stacked.histories, strict=True):
        assert mine[columns].to_numpy() == pytest.approx(theirs[columns].to_numpy(), rel=1e-4, abs=1e-7)


def test_adam_is_left_to_the_stack(device):
    trials = [TRIALS[0], {"optimizer": "adam", "batch_size": 4}]
    assert run("pooled", trials, device).meta["trained_by"] == ["fused kernel", "stack: the optimizer is not SGD"]
    with pytest.raises(InputError, match="not SGD"):
        run("pooled", trials, device, stacked="fused")


def test_subsets_of_the_samples_and_single_threads(monkeypatch, folder):
    """Images of the trials' own choice; and the kernel with one thread, so that nothing depends on how many."""
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    trials = [{**trial, "train_size": 30} for trial in TRIALS]
    expected = run("pooled", trials, stacked="stack")
    for threads, lanes in ((4, 2), (1, 1)):
        monkeypatch.setattr(fused_stack, "machine_of", lambda device, t=threads, n=lanes: CppMachine(folder, t, n))
        found = run("pooled", trials, stacked="fused")
        for i in range(len(trials)):
            for name, value in expected.state(i).items():
                assert torch.allclose(found.state(i)[name], value, rtol=1e-4, atol=1e-5), (threads, i, name)


def test_a_trial_that_diverges_or_stops_changes_nothing_for_the_others(device):
    wild = {"lr": 1e30, "batch_size": 5}
    early = {"lr": 0.2, "batch_size": 7, "stop_loss": 100.0}
    alone = run("pooled", TRIALS, device, stacked="fused")
    mixed = run("pooled", [*TRIALS, wild, early], device, stacked="fused")
    assert same_bits(alone, mixed)
    frame = mixed.frame()
    assert frame["stopped_by"].tolist() == ["epochs"] * len(TRIALS) + ["diverged", "loss"]
    assert frame["epochs"].tolist()[-2:] == [1, 1]


KILLED = """
import os, signal, sys
import test_fused
from flatscope.training import fused_stack

class Killed(fused_stack.FusedStack):
    def _launch_kernel(self, blocks, **given):
        super()._launch_kernel(blocks, **given)
        if not given.get("evaluates"):
            Killed.launches += 1
            if Killed.launches == 3:
                os.kill(os.getpid(), signal.SIGKILL)

Killed.launches = 0
from pathlib import Path
from flatscope.training import group_training
group_training.FusedStack = Killed
if sys.argv[2] == "cpu":
    fused_stack.machine_of = lambda device: test_fused.CppMachine(Path(sys.argv[3]))
test_fused.run("pooled", test_fused.TRIALS, sys.argv[2], 4, stacked="fused", checkpoint=sys.argv[1])
"""


@pytest.mark.long
def test_a_process_killed_in_the_middle_of_an_epoch_goes_on_to_the_same_weights(device, tmp_path, folder):
    whole = run("pooled", TRIALS, device, 4, stacked="fused")
    command = [sys.executable, "-c", KILLED, str(tmp_path), device, str(folder)]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    seen = []
    resumed = run(
        *("pooled", TRIALS, device, 4),
        stacked="fused",
        checkpoint=tmp_path,
        after_epoch=lambda epoch, view: seen.append(epoch),
    )
    assert seen == [3, 4]
    assert same_bits(whole, resumed)


class Skipped(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(10, 10), nn.Linear(10, 3)

    def forward(self, x):
        return self.two(x + functional.relu(self.one(x)))


def frozen():
    model = CHAINS["dense"][1]()
    model[0].bias.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("build", "trial"),
    [
        (Skipped, {}),
        (frozen, {}),
        (lambda: nn.Sequential(nn.Linear(10, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)), {}),
        (lambda: nn.Sequential(nn.Linear(10, 4), nn.Tanh(), nn.Linear(4, 3)), {}),
        (CHAINS["dense"][1], {"loss": "mse"}),
        (CHAINS["dense"][1], {"noise_temperature": 0.1}),
        (lambda: CHAINS["dense"][1]().double(), {}),
    ],
)
def test_what_the_kernel_does_not_know_is_left_to_the_stack(monkeypatch, folder, build, trial):
    monkeypatch.setattr(fused_stack, "machine_of", lambda device: CppMachine(folder))
    trials, data = [{"epochs": 1, **trial}], samples((10,))
    [way] = train_population(lambda _: build(), trials, data).meta["trained_by"]
    assert way.startswith("stack: ")
    with pytest.raises(InputError):
        train_population(lambda _: build(), trials, data, stacked="fused")


def test_pools_that_overlap_and_grouped_or_large_kernels_are_refused():
    x = torch.randn(2, 4, 16, 16)
    for layers in (
        [nn.Conv2d(4, 4, 3), nn.MaxPool2d(3, 2)],
        [nn.Conv2d(4, 4, 3), nn.MaxPool2d(2, padding=1)],
        [nn.Conv2d(4, 4, 3), nn.AvgPool2d(4)],
        [nn.Conv2d(4, 4, 3, groups=2)],
        [nn.Conv2d(4, 4, 3, dilation=2)],
        [nn.Conv2d(4, 4, 9)],
        [nn.MaxPool2d(2), nn.Conv2d(4, 4, 3)],
    ):
        flat = nn.Sequential(*layers, nn.Flatten())
        with pytest.raises(NotFused):
            read_chain(nn.Sequential(flat, nn.Linear(flat(x).shape[1], 3)), x)
    shared = nn.Linear(6, 6)
    with pytest.raises(NotFused):
        read_chain(nn.Sequential(shared, nn.ReLU(), shared), torch.randn(2, 6))


def test_activations_that_do_not_fit_are_refused():
    shape, build = CHAINS["pooled"]
    chain = read_chain(build(), torch.randn(2, *shape))
    assert plan_kernel(chain, 64).group > plan_kernel(chain, 64, shared=2_600).group
    with pytest.raises(NotFused):
        plan_kernel(chain, 64, shared=500)


@pytest.mark.filterwarnings("error")
def test_without_a_gpu_the_stack_is_used_and_says_why():
    assert run("pooled", TRIALS[:1]).meta["trained_by"] == ["stack: there is no CUDA device"]
    assert run("pooled", TRIALS[:1], stacked="stack").meta["trained_by"] == ["stack: the stack was asked for"]
    assert run("pooled", TRIALS[:1], stacked=False).meta["trained_by"] == ["one by one"]


def test_large_dense_layers_alone_stay_a_stack_unless_the_kernel_is_asked_for(monkeypatch, folder):
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(fused_stack, "machine_of", lambda device: CppMachine(folder))
    assert run("dense", TRIALS).meta["trained_by"] == ["fused kernel"]
    monkeypatch.setattr(population, "LARGE_PRODUCTS", 0)
    assert run("pooled", TRIALS).meta["trained_by"] == ["fused kernel"]
    assert all(way.startswith("stack: it has large") for way in run("dense", TRIALS).meta["trained_by"])
    assert run("dense", TRIALS, stacked="fused").meta["trained_by"] == ["fused kernel"]


def test_a_kernel_that_takes_other_steps_is_not_used(monkeypatch, folder):
    class Wrong(CppMachine):
        def kernel(self, plan):
            source = plan.source.replace("add_product(by.decay, weight, gradient)", "gradient * 1.1f")
            assert source != plan.source
            return super().kernel(replace(plan, source=source))

    if COMPILER is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(fused_stack, "machine_of", lambda device: Wrong(folder))
    with pytest.warns(UserWarning, match="not those of the stack"):
        population = run("pooled", TRIALS)
    assert {way.partition(":")[0] for way in population.meta["trained_by"]} == {"stack"}


def test_without_a_compiler_the_stack_is_used_with_a_warning(monkeypatch, folder):
    class NoCompiler(CppMachine):
        def kernel(self, plan):
            raise fused_device.NotCompiled("NVRTC, which compiles it, is not installed")

    monkeypatch.setattr(fused_stack, "machine_of", lambda device: NoCompiler(folder))
    with pytest.warns(UserWarning, match="NVRTC"):
        population = run("pooled", TRIALS)
    assert {way.partition(":")[0] for way in population.meta["trained_by"]} == {"stack"}


@pytest.mark.parametrize("stacked", ["stack", "fused"])
def test_losses_of_mini_batches_are_those_that_the_steps_found(stacked, monkeypatch, folder):
    """Each batch by hand at the weights before its step, by plain SGD; the last batch is smaller than the others."""
    if stacked == "fused":
        if COMPILER is None:
            pytest.skip("no C++ compiler")
        monkeypatch.setattr(fused_stack, "machine_of", lambda device: CppMachine(folder))
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(23, 6, generator=generator), torch.randint(0, 3, (23,), generator=generator)
    trials = [{"lr": lr, "batch_size": 5, "epochs": 3, "seed": seed} for seed, lr in enumerate((0.1, 0.3))]
    seen = {}

    def after_epoch(epoch, view):
        seen.update({(trial, epoch): view.batch_loss(trial) for trial in view.active})

    def of_trial(trial):
        torch.manual_seed(trial["seed"])
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))

    train_population(
        of_trial, trials, (x, y), stacked=stacked, device="cpu", after_epoch=after_epoch, show_progress=False
    )
    for number, trial in enumerate(trials):
        model = of_trial(trial)
        for epoch in range(3):
            losses = []
            for rows in epoch_order(23, trial["seed"], epoch).split(5):
                loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
                losses.append(float(loss.detach()))
                for p, slope in zip(
                    model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
                ):
                    p.data -= trial["lr"] * slope
            assert seen[number, epoch + 1] == pytest.approx(sum(losses) / len(losses), rel=1e-4), (number, epoch)
