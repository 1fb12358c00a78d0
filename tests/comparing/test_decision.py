"""What somebody who knows would do with these networks: prepared cases, each with its decision and not its wording."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import flatscope as fs
from flatscope.comparing.decision import Decision, decide_network_to_keep
from flatscope.comparing.held_out import difference_of_test_errors, unpaired_test_errors
from flatscope.network_summary import NetworkSummary

Pair = tuple[Tensor, Tensor]
NAMES = ["rho_sum", "l2_path_norm", "margin"]


def clouds(n: int, seed: int = 0, apart: float = 1.0) -> Pair:
    """Two clouds of points whose classes overlap a little."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 2
    return torch.randn(n, 4, generator=generator, dtype=torch.float64) + apart * (2.0 * y[:, None] - 1), y


def train(
    data: Pair, steps: int = 3000, seed: int = 0, width: int = 8, noise: float = 0.0, loss: str = "ce"
) -> nn.Module:
    """A small network after so many steps; with `noise`, a share of its labels was turned round."""
    x, y = data
    generator = torch.Generator().manual_seed(seed)
    targets = torch.where(torch.rand(len(y), generator=generator) < noise, 1 - y, y) if noise else y
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2 if loss == "ce" else 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2 if loss == "ce" else 0.02, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        out = model(x)
        value = nn.functional.cross_entropy(out, targets) if loss == "ce" else (out - targets).square().mean()
        value.backward()
        optimizer.step()
    return model.eval()


TRAIN, TEST = clouds(200), clouds(600, seed=1)
FEW = TEST[0][:150], TEST[1][:150]
NOT_LEARNABLE = clouds(200, seed=5, apart=0.3)


def compared(*networks: nn.Module, data: Pair = TRAIN, test: Pair | None = TEST) -> fs.Comparison:
    """The networks a, b, … on the same data."""
    return fs.compare(dict(zip("abcd", networks, strict=False)), data, NAMES, test=test)


def untrained(seed: int) -> nn.Module:
    """A network that is wrong more often than right, as if its classes had been exchanged."""
    model = train(TRAIN, 50, seed)
    last = model.get_parameter("2.weight"), model.get_parameter("2.bias")
    with torch.no_grad():
        for value in last:
            value.neg_()
    return model


def silent(seed: int) -> nn.Module:
    """A network whose outputs hardly depend on its inputs, as a strong weight decay or small first weights leave it."""
    model = train(TRAIN, 0, seed)
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(1e-3)
    return model


def constant(bias: float) -> nn.Module:
    """A regression that gives one number, where there is nothing to learn."""
    model = nn.Linear(4, 1).double()
    with torch.no_grad():
        model.weight.zero_()
        model.bias.fill_(bias)
    return model


def regression(noise: float = 0.0, seed: int = 0) -> nn.Module:
    return train((TRAIN[0], TRAIN[1][:, None].double()), 2000, seed, noise=noise, loss="mse")


def scaled(test: Pair) -> Pair:
    return test[0], test[1][:, None].double()


class Case(NamedTuple):
    """A comparison, what to do, and with which of the networks."""

    compare: Callable[[], fs.Comparison]
    code: str
    networks: tuple[str, ...] = ()


MORE = clouds(4000, seed=2)
NOTHING = torch.randn(800, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
NOTHING -= NOTHING[:200].mean()
CASES = {
    "equal errors": Case(lambda: compared(train(TRAIN), train(TRAIN, seed=1)), "either", ("a", "b")),
    "one clearly better": Case(lambda: compared(train(TRAIN), train(TRAIN, noise=0.45)), "keep", ("a",)),
    "the other clearly better": Case(lambda: compared(train(TRAIN, noise=0.45), train(TRAIN)), "keep", ("b",)),
    "a difference that so few samples cannot show": Case(
        lambda: compared(train(TRAIN), train(TRAIN, noise=0.2), test=(TEST[0][:12], TEST[1][:12])), "either", ("a", "b")
    ),
    "a rescaled copy": Case(lambda: compared(m := train(TRAIN), fs.rescale(m, TRAIN[0], seed=1)), "one function"),
    "a permuted copy": Case(
        lambda: compared(m := train(TRAIN), fs.rescale(m, TRAIN[0], by="permutation", seed=1)), "one function"
    ),
    "the same weights twice": Case(lambda: compared(m := train(TRAIN), m), "one function"),
    "a copy beside two functions": Case(
        lambda: compared(m := train(TRAIN), fs.rescale(m, TRAIN[0], seed=1), train(TRAIN, noise=0.45)), "keep", ("a",)
    ),
    "no test set": Case(lambda: compared(train(TRAIN), train(TRAIN, seed=1), test=None), "hold out"),
    "one much flatter, no test set": Case(lambda: compared(train(TRAIN), train(TRAIN, 200), test=None), "hold out"),
    "test = train": Case(lambda: compared(train(TRAIN), train(TRAIN, noise=0.45), test=TRAIN), "hold out"),
    "both untrained": Case(lambda: compared(untrained(0), untrained(1)), "train on"),
    "both silent": Case(lambda: compared(silent(0), silent(1)), "train on", ("a", "b")),
    "one trained, one silent": Case(lambda: compared(silent(0), train(TRAIN)), "keep", ("b",)),
    "regressions with nothing to learn": Case(
        lambda: fs.compare(
            {"a": constant(0.0), "b": constant(1e-3)},
            (0 * TRAIN[0], NOTHING[:200]),
            ["l2_norm", "rho_sum"],
            test=(0 * TEST[0], NOTHING[200:800]),
            loss="mse",
        ),
        "either",
    ),
    "both still learning": Case(
        lambda: compared(
            train(NOT_LEARNABLE, 2), train(NOT_LEARNABLE, 2, 1), data=NOT_LEARNABLE, test=clouds(40, 6, 0.3)
        ),
        "train on",
    ),
    "one trained, one not": Case(lambda: compared(train(TRAIN), untrained(0)), "keep", ("a",)),
    "different losses, equal errors": Case(
        lambda: compared(train(TRAIN, 8000), train(TRAIN, 300)), "either", ("a", "b")
    ),
    "two widths, equal errors": Case(
        lambda: compared(train(TRAIN), train(TRAIN, width=16), test=FEW), "either", ("a", "b")
    ),
    "two widths, one clearly better": Case(
        lambda: compared(train(TRAIN, noise=0.45), train(TRAIN, width=16)), "keep", ("b",)
    ),
    "three, one clearly worse": Case(
        lambda: compared(train(TRAIN), train(TRAIN, seed=1), train(TRAIN, noise=0.45)), "either", ("a", "b")
    ),
    "regression, one clearly better": Case(
        lambda: fs.compare(
            {"a": regression(), "b": regression(noise=0.45)}, scaled(TRAIN), NAMES[:2], test=scaled(MORE), loss="mse"
        ),
        "keep",
        ("a",),
    ),
    "regression, nothing to tell them apart": Case(
        lambda: fs.compare(
            {"a": regression(), "b": regression(seed=1)},
            scaled(TRAIN),
            NAMES[:2],
            test=scaled(clouds(9, 8)),
            loss="mse",
        ),
        "either",
        ("a", "b"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_decision_is_that_of_somebody_who_knows(name: str) -> None:
    case = CASES[name]
    found = case.compare()
    assert found.decision.code == case.code, found.headline
    if case.networks:
        assert found.decision.networks == case.networks, found.headline
    assert found.headline.splitlines()[0] == found.decision.sentence
    again = fs.Comparison.from_json(found.to_json())
    assert again.decision == found.decision


def test_a_network_that_is_not_trained_is_not_called_flat() -> None:
    """Its numbers are small because it does nothing: silent outputs are the flattest of all."""
    kept, other, flat = train(TRAIN), train(TRAIN, seed=1), silent(0)
    found = compared(kept, flat)
    assert (found.conclusion.code, found.conclusion.winner) == ("untold", "")
    assert "b is not trained" in found.headline
    assert "would be worth" in found.headline, "nothing was said to be flatter whose worth could be told"
    found = compared(kept, flat, other)
    assert found.conclusion.winner != "b"
    assert "b is not trained" in found.headline


def test_a_regression_that_does_no_better_on_test_data_than_a_constant_is_told_so() -> None:
    noisy = clouds(60, seed=3)[0], NOTHING[:60]
    model = train(noisy, 3000, width=64, loss="mse")
    useless = fs.measure(fs.Problem(model, noisy, scaled(TEST), loss="mse"), "rho_sum").headline
    assert "no better than" in useless
    useful = fs.measure(fs.Problem(regression(), scaled(TRAIN), scaled(TEST), loss="mse"), "rho_sum").headline
    assert "no better than" not in useful


def test_held_out_data_decide_and_a_slope_is_a_caution_about_flatness_alone() -> None:
    x, y = clouds(60, seed=3)
    noisy = x, y[:, None].double() + NOTHING[:60] / 2
    networks = {name: train(noisy, steps, width=64, loss="mse") for name, steps in (("few", 30), ("many", 3000))}
    found = fs.compare(networks, noisy, NAMES[:2], test=scaled(MORE), loss="mse")
    assert found.networks["few"].on_a_slope
    assert found.decision == Decision("keep", ("few",), found.decision.sentence), "training on raised the test loss"
    assert "train on" not in found.headline.lower()
    assert "not at a minimum: its flatness numbers describe where training stopped" in found.headline
    assert "not tried on regression" in found.headline
    assert "pairs" not in found.headline


def test_what_was_not_tried_is_called_by_its_name() -> None:
    """A language model is no regression, and a loss of one's own may be anything."""
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(7, (24, 6), generator=generator)
    models = {}
    for name in "ab":
        torch.manual_seed(ord(name))
        models[name] = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7)).eval()
    data = texts[:16, :-1], texts[:16, 1:]
    found = fs.compare(models, data, NAMES[:2], test=(texts[16:, :-1], texts[16:, 1:]), loss="next_token")
    assert "not tried on language models" in found.summary()
    assert "regression" not in found.summary()
    x, y = scaled(TRAIN)
    own = fs.compare(
        [regression(), regression(0.45)], (x, y), NAMES[:1], loss=lambda o, t: (o - t).abs().flatten(1).sum(1)
    )
    assert "not tried with this loss" in own.summary()


def decided(wrong: list[int]) -> Decision:
    """The decision between networks n0, n1, … that misclassify so many of 400 test samples."""
    nan = float("nan")
    networks = {
        f"n{place}": NetworkSummary("", 1, 0.1, 0.0, nan, count / 400, True, n_test=400)
        for place, count in enumerate(wrong)
    }
    return decide_network_to_keep([*networks], [*networks], networks, unpaired_test_errors(networks), True)


def test_many_networks_are_told_lowest_first_and_none_that_is_clearly_worse() -> None:
    found = decided([9, 30, 8, 30, 7, 9, 8, 10, 12, 30])
    assert found.networks == ("n0", "n2", "n4", "n5", "n6", "n7", "n8")
    assert found.sentence.startswith("Keep n4, whose test error is the lowest (1.8 ")
    places = [found.sentence.index(f"{name} 2.") for name in ("n2", "n6", "n0", "n5")]
    assert places == sorted(places)
    assert "and 2 more; 3 are clearly worse. Flatness should not decide." in found.sentence
    assert not any(name in found.sentence for name in ("n1", "n3", "n9"))
    assert decided([90] * 5 + [5]).sentence.startswith("Keep n5: its test error is clearly the lowest (n5 1.2 ")


def test_flatness_never_decides_between_two_trainings_of_one_architecture() -> None:
    for case in ("equal errors", "no test set", "different losses, equal errors"):
        found = CASES[case].compare()
        assert found.decision.code not in ("keep", "flatter")
        assert found.difference == "training"
        assert "of 3,677 pairs" in found.headline


def test_the_record_is_that_of_networks_that_differ_like_these() -> None:
    wide, same = CASES["two widths, equal errors"].compare(), CASES["equal errors"].compare()
    assert (wide.difference, same.difference) == ("width", "training")
    assert "two widths" in wide.headline
    assert "margin" in same.comparable
    assert "margin" not in same.counting, "margins ranked trainings wrongly more often than rightly"
    assert "rho_sum" not in same.counting, "no better than a coin there"


@pytest.mark.parametrize(("better", "both", "worse"), [(0, 0, 6), (2, 9, 14), (5, 0, 5)])
def test_paired_errors_are_judged_by_the_samples_on_which_one_errs(better: int, both: int, worse: int) -> None:
    """McNemar's exact test: a sample on which one network errs alone is as likely to be of the one as of the other."""
    n = 100
    best = np.repeat([1.0, 1.0, 0.0, 0.0], [better, both, worse, n - better - both - worse])
    other = np.repeat([0.0, 1.0, 1.0, 0.0], [better, both, worse, n - better - both - worse])
    found = difference_of_test_errors(best, other, paired=True)
    total = better + worse
    tail = sum(stats.binom.pmf(k, total, 0.5) for k in range(total + 1) if abs(k - total / 2) >= abs(worse - total / 2))
    assert found.p == pytest.approx(tail)
    assert found.apart == pytest.approx((worse - better) / n)
    assert difference_of_test_errors(best, other, paired=True, pairs=3).p == pytest.approx(min(1.0, 3 * tail))


def test_a_chance_difference_is_called_clear_no_more_often_than_promised() -> None:
    """Two networks that err equally often, independently: clear in at most one of twenty draws of the test samples."""
    generator = np.random.default_rng(0)
    draws = [
        difference_of_test_errors(*(generator.random((2, 300)) < 0.1).astype(float), paired=True).clear
        for _ in range(400)
    ]
    assert np.mean(draws) < 0.06
    shifted = [
        difference_of_test_errors(
            (generator.random(300) < 0.05).astype(float), (generator.random(300) < 0.2).astype(float), paired=True
        ).clear
        for _ in range(50)
    ]
    assert np.mean(shifted) > 0.9


def test_shuffled_test_samples_are_compared_as_if_networks_erred_independently() -> None:
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*TEST), batch_size=50, shuffle=True)
    found = fs.compare([train(TRAIN), train(TRAIN, noise=0.45)], TRAIN, NAMES, test=loader)
    assert found.tests is not None
    assert not found.tests.differences["network 2"].paired
    assert found.decision.code == "keep"
