"""`load`: draws by seed, standardisation, digits, the user's own npz files and functions."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from flatscope.errors import DataFileError, InputError, UnknownNameError
from flatscope.inputs.data_set import Data
from flatscope.inputs.loading import channel_moments, load, random_stream, sample_order


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


def test_digits_split() -> None:
    data = load("digits")
    assert data.train[0].shape == (1437, 1, 8, 8)
    assert data.test[0].shape == (360, 1, 8, 8)
    assert data.input_shape == (1, 8, 8)
    assert data.n_classes == 10
    whole = (data.train[1].bincount() + data.test[1].bincount()).double()
    assert (data.test[1].bincount() - whole * 360 / 1797).abs().max() <= 1
    assert repr(data) == "Data('digits', 1437 train, 360 test, 1x8x8, 10 classes)"
    rows = {row.numpy().tobytes() for row in load("digits", standardize=False).train[0]}
    assert not rows & {row.numpy().tobytes() for row in load("digits", standardize=False).test[0]}


def test_digits_are_the_same_everywhere() -> None:
    first, again, other = load("digits", seed=3), load("digits", seed=3), load("digits", seed=4)
    assert torch.equal(first.train[0], again.train[0])
    assert not torch.equal(first.test[1], other.test[1])
    raw = load("digits", seed=3, train_size=100, standardize=False)
    # Stored from one machine: another one must agree, or published results cannot be repeated there.
    assert digest(raw.train[0].numpy()) == "cba9a2938e686834"
    assert sample_order(np.arange(8) % 2, 7).tolist() == [5, 0, 3, 6, 7, 2, 1, 4]


@pytest.mark.parametrize("balanced", [True, False])
def test_larger_draws_begin_with_the_smaller(balanced: bool) -> None:
    y = random_stream(0, "test").randint(7, size=500)
    order = sample_order(y, 5, balanced=balanced)
    assert sorted(order) == list(range(500))
    small = load("digits", train_size=50, seed=1, balanced=balanced, standardize=False)
    large = load("digits", train_size=333, seed=1, balanced=balanced, standardize=False)
    assert torch.equal(small.train[0], large.train[0][:50])
    assert torch.equal(small.train[1], large.train[1][:50])


def test_a_draw_may_be_standardised_as_the_whole_set_is(tmp_path: Path) -> None:
    whole, drawn = load("digits", seed=1), load("digits", train_size=50, seed=1)
    as_whole = load("digits", train_size=50, test_size=20, seed=1, standardize_by="all")
    assert (as_whole.mean, as_whole.std) == (whole.mean, whole.std) != (drawn.mean, drawn.std)
    rows = {row.numpy().tobytes() for part in (whole.train, whole.test) if part for row in part[0]}
    assert as_whole.test is not None
    for x in (as_whole.train[0], as_whole.test[0]):
        assert all(row.numpy().tobytes() in rows for row in x)
    assert not any(row.numpy().tobytes() in rows for row in drawn.train[0])
    for by in ("drawn", "all"):
        assert torch.equal(load("digits", seed=1, standardize_by=by).train[0], whole.train[0])
    # Images are cropped first; the user's own arrays are treated in the same way.
    x = np.random.RandomState(0).randint(256, size=(30, 1, 6, 6)).astype(np.uint8)
    np.savez(tmp_path / "mine.npz", x_train=x, y_train=np.arange(30) % 3)
    cropped = load(tmp_path / "mine.npz", train_size=6, crop=4, standardize=True, standardize_by="all")
    assert cropped.mean == pytest.approx((x[:, :, 1:5, 1:5].mean() / 255,))
    with pytest.raises(InputError, match="known standardize_by"):
        load("digits", standardize_by="some")


@pytest.mark.parametrize("size", [1, 9, 10, 25, 300, 397, 400, 450])
def test_balanced_draws_are_as_equal_as_the_classes_allow(size: int) -> None:
    sizes = np.array([10, 90, 150, 200])
    y = random_stream(0, "test").permutation(np.repeat(np.arange(4), sizes))
    counts = np.bincount(y[sample_order(y, 2)[:size]], minlength=4)
    level = max(counts)
    assert counts.sum() == size
    assert all(count >= min(level - 1, available) for count, available in zip(counts, sizes, strict=True))


def test_plain_draws_follow_the_data() -> None:
    y = np.repeat([0, 1], [900, 100])
    counts = np.bincount(y[sample_order(y, 0, balanced=False)[:500]])
    assert 30 <= counts[1] <= 70  # 50 expected, standard deviation 4.7


@pytest.mark.parametrize(("option", "limit"), [("train_size", 1437), ("test_size", 360)])
@pytest.mark.parametrize("size", [100_000, -1])
def test_more_than_there_is(option: str, limit: int, size: int) -> None:
    with pytest.raises(InputError, match=f"{option} of digits: .*{limit}, got {size}"):
        load("digits", **{option: size})


def test_train_size_zero_and_bad_seeds() -> None:
    with pytest.raises(InputError, match="train_size"):
        load("digits", train_size=0)
    for seed in (-1, 2**32, True):
        with pytest.raises(InputError, match="seed"):
            load("digits", seed=seed)


def test_standardisation_is_of_the_samples_drawn() -> None:
    raw = load("digits", train_size=200, standardize=False)
    data = load("digits", train_size=200)
    assert raw.mean is raw.std is None
    assert raw.train[0].min() == 0
    assert raw.train[0].max() == 1
    assert data.mean[0] == pytest.approx(raw.train[0].double().mean().item(), abs=1e-9)
    assert data.std[0] == pytest.approx(raw.train[0].double().std(correction=0).item(), abs=1e-9)
    assert torch.allclose(data.test[0], (raw.test[0] - data.mean[0]) / data.std[0], atol=1e-6)
    flat = load("digits", train_size=200, flatten=True)
    assert torch.equal(flat.train[0], data.train[0].reshape(200, 64))
    cropped = load("digits", train_size=200, crop=5, standardize=False)
    assert torch.equal(cropped.train[0], raw.train[0][:, :, 1:6, 1:6])
    with pytest.raises(InputError, match="crop of digits"):
        load("digits", crop=9)


def test_moments_against_numpy_and_constant_channels() -> None:
    x = random_stream(0, "test").normal(3, 2, size=(2500, 3, 4, 4)) * [[[[1]], [[1e3]], [[0]]]] + [
        [[[0]], [[1e6]], [[0.1]]]
    ]
    mean, std = channel_moments(x)
    assert mean == pytest.approx(x.mean(axis=(0, 2, 3)), rel=1e-12)
    assert std[:2] == pytest.approx(x.std(axis=(0, 2, 3))[:2], rel=1e-9)
    assert std[2] == 1
    assert channel_moments(np.zeros((4, 2)))[1].tolist() == [1, 1]


def test_test_part_can_be_left_out() -> None:
    assert load("digits", test_size=0).test is None


@pytest.fixture
def npz(tmp_path: Path):
    def write(**arrays: np.ndarray) -> str:
        path = tmp_path / "mine.npz"
        np.savez(path, **arrays)
        return str(path)

    return write


def test_npz_of_grey_images(npz) -> None:
    x = random_stream(0, "test").randint(256, size=(30, 6, 6)).astype(np.uint8)
    y = (np.arange(30) % 3).astype(np.uint8)[:, None]
    path = npz(x_train=x, y_train=y, x_test=x[:9], y_test=y[:9], classes=np.array(["a", "b", "c"]))
    data = load(path, train_size=12, standardize=False)
    assert data.name == "mine"
    assert data.classes == ("a", "b", "c")
    assert data.train[0].shape == (12, 1, 6, 6)
    assert data.train[1].bincount().tolist() == [4, 4, 4]
    assert torch.equal(data.test[0][:, 0], torch.from_numpy(x[:9] / np.float32(255)))
    assert data.notes == path


def test_npz_of_numbers_without_test_part(npz) -> None:
    x = np.arange(40, dtype=np.float64).reshape(10, 4)
    plain = load(npz(x_train=x, y_train=np.arange(10) % 2))
    assert (plain.mean, plain.how) == (None, "as they are")
    assert torch.equal(plain.train[0], torch.from_numpy(x).float())
    data = load(npz(x_train=x, y_train=np.arange(10) % 2), standardize=True)
    assert data.how == "standardised"
    assert data.test is None
    assert data.train[0].dtype == torch.float32
    assert data.train[0].mean(0).abs().max() < 1e-6  # each column is a channel
    assert len(data.mean) == 4
    with pytest.raises(InputError, match="test_size of mine"):
        load(npz(x_train=x, y_train=np.arange(10) % 2), test_size=5)


def test_samples_with_several_labels_each_are_drawn_at_random(npz) -> None:
    path = npz(x_train=np.ones((12, 4), np.float32), y_train=np.arange(36).reshape(12, 3) % 5)
    x, y = load(path, train_size=6).train
    assert (x.shape, y.shape) == ((6, 4), (6, 3))


def test_npz_of_tokens_and_of_regression(npz) -> None:
    data = load(npz(x_train=np.arange(20, dtype=np.int32).reshape(5, 4), y_train=np.linspace(0, 1, 5)), train_size=3)
    assert data.train[0].dtype == torch.int64
    assert data.train[1].dtype == torch.float32
    assert data.classes == ()
    assert data.mean is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"y_train": np.zeros(4, int)}, ["5 targets", "(4,)"]),
        ({"y_train": np.array([0, 1, 2, 1, -1])}, ["from 0 up", "-1"]),
        ({"y_train": np.array(list("abcde"))}, ["5 targets as numbers", "U1"]),
        ({"y_train": np.zeros((4, 2), int)}, ["5 targets", "(4, 2)"]),
        ({"x_train": np.full((5, 3), np.nan)}, ["finite samples", "15"]),
        ({"x_train": np.zeros(5)}, ["(n, ...)", "(5,)"]),
        ({"x_train": np.zeros((0, 3)), "y_train": np.zeros(0)}, ["n at least 1", "(0, 3)"]),
        ({"x_train": np.zeros((5, 8, 8, 3), np.uint8)}, ["channels", "(5, 8, 8, 3)", "moveaxis"]),
        ({"x_test": np.zeros((2, 4)), "y_test": np.zeros(2, int)}, ["like the training", "(3,)", "(4,)"]),
        ({"x_test": np.zeros((2, 3)), "y_test": np.zeros(2)}, ["like the training", "float64 targets"]),
        ({"classes": np.array(["a"])}, ["labels below 1", "4"]),
    ],
)
def test_npz_with_wrong_arrays(npz, change: dict[str, np.ndarray], words: list[str]) -> None:
    path = npz(**({"x_train": np.zeros((5, 3)), "y_train": np.arange(5)} | change))
    with pytest.raises(DataFileError) as error:
        load(path)
    for word in (path, *words):
        assert word in str(error.value)


FACTORIES = """
import dataclasses
import numpy as np, torch
from flatscope.inputs.data_set import Data

x, y = torch.arange(24.0).reshape(6, 1, 2, 2).double(), torch.arange(6) % 2
def pair(): return x, y
def both(): return (x.numpy(), y.tolist()), (x[:2], y[:2])
def ready(): return Data("own", (x, y), None, ("even", "odd"), mean=(5.0,), std=(1.0,))
def wrong(): return 3
def parts(): return (x, y, 1), (x, y)
number = 5
@dataclasses.dataclass
class Thing:
    field: "int" = 0
"""


def test_functions_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "my_data.py"
    file.write_text(FACTORIES)
    pair = load(f"{file}:pair")
    assert (pair.name, pair.test) == ("pair", None)
    assert pair.train[0].dtype == torch.float32
    assert torch.equal(pair.train[0], torch.arange(24.0).reshape(6, 1, 2, 2))  # as it was given
    assert load(f"{file}:pair", standardize=True).train[0].mean().abs() < 1e-6
    assert load(f"{file}:both").test[0].shape == (2, 1, 2, 2)
    ready = load(f"{file}:ready", train_size=2, crop=1)
    assert ready.train[0].dtype == torch.float64  # as it was given
    assert ready.train[0].shape == (2, 1, 1, 1)
    assert ready.train[0].sum() % 4 == 0
    assert (ready.name, ready.mean, ready.classes) == ("own", (5.0,), ("even", "odd"))
    monkeypatch.syspath_prepend(tmp_path)
    assert torch.equal(load("my_data:pair").train[0], pair.train[0])
    assert isinstance(load("my_data:ready"), Data)


def test_functions_that_are_wrong(tmp_path: Path) -> None:
    file = tmp_path / "my_data.py"
    file.write_text(FACTORIES)
    for name in ("wrong", "parts"):
        with pytest.raises(InputError, match=f"my_data.py:{name}: expected a Data"):
            load(f"{file}:{name}")
    with pytest.raises(UnknownNameError, match=r"Did you mean .*pair"):
        load(f"{file}:pairs")
    with pytest.raises(UnknownNameError, match="number"):
        load(f"{file}:number")
    with pytest.raises(InputError, match="no such file"):
        load(f"{tmp_path}/absent.py:pair")
    with pytest.raises(InputError, match=r"no_such_module.*file\.py:factory"):
        load("no_such_module:pair")


def test_unknown_names(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match=r"Did you mean .*fashion-mnist"):
        load("fashion_mnist")
    with pytest.raises(InputError, match="an npz file"):
        load(tmp_path)
    with pytest.raises(DataFileError, match=r"absent\.npz.*no such file"):
        load(tmp_path / "absent.npz")
