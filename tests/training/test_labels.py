"""Labels made wrong on purpose: the right number of them, uniform, nested by seed, the originals untouched."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare

from flatscope.errors import InputError
from flatscope.inputs.loading import load
from flatscope.training.label_noise import confusion_set, corrupt_labels, random_labels

pytestmark = pytest.mark.fast

Y = torch.arange(20_000) % 10


def test_random_labels_are_uniform_and_independent_of_the_true_ones() -> None:
    before = Y.clone()
    drawn = random_labels(Y, 10, seed=0)
    assert drawn.dtype == torch.int64
    assert torch.equal(drawn, random_labels(Y.flip(0), 10, seed=0))
    assert not torch.equal(drawn, random_labels(Y, 10, seed=1))
    joint = (10 * Y + drawn).bincount(minlength=100).double()
    assert chisquare(joint.numpy()).pvalue > 1e-3
    assert torch.equal(Y, before)


def test_random_labels_are_the_same_everywhere() -> None:
    assert random_labels(Y[:12], 10, seed=3).tolist() == [5, 6, 9, 9, 7, 4, 9, 2, 0, 7, 1, 5]
    assert corrupt_labels(Y[:12], 0.5, 10, seed=3)[0].tolist() == [0, 4, 2, 3, 4, 0, 1, 2, 8, 8, 0, 7]


@pytest.mark.parametrize("fraction", [0.0, 0.123456, 0.5, 1.0])
def test_corrupted_labels(fraction: float) -> None:
    before = Y.clone()
    labels, mask = corrupt_labels(Y, fraction, 10, seed=1)
    assert mask.sum() == round(fraction * len(Y))
    assert torch.equal(labels[~mask], Y[~mask])
    assert torch.equal(Y, before)
    if fraction:
        drawn = labels[mask].bincount(minlength=10).double()
        assert chisquare(drawn.numpy()).pvalue > 1e-3
        assert (labels[mask] == Y[mask]).double().mean() == pytest.approx(0.1, abs=0.03)
        wrong, same_mask = corrupt_labels(Y, fraction, 10, seed=1, exclude_true=True)
        assert torch.equal(mask, same_mask)
        assert torch.equal(wrong != Y, mask)
        shift = ((wrong - Y) % 10)[mask].bincount(minlength=10)
        assert shift[0] == 0
        assert chisquare(shift[1:].double().numpy()).pvalue > 1e-3


def test_more_corruption_contains_the_lesser() -> None:
    some, some_mask = corrupt_labels(Y, 0.2, 10, seed=2)
    more, more_mask = corrupt_labels(Y, 0.6, 10, seed=2)
    assert more_mask[some_mask].all()
    assert torch.equal(more[some_mask], some[some_mask])


def test_confusion_set_has_two_parts() -> None:
    data = load("digits", standardize=False)
    made = confusion_set(data, 300, seed=0, true_size=1000)
    assert made.x.shape == (1300, 1, 8, 8)
    assert made.is_confused.tolist() == [False] * 1000 + [True] * 300
    assert torch.equal(made.true[1], made.y_true[:1000])
    assert made.confused[0].shape[0] == 300
    assert 10 <= (made.confused[1] == made.y_true[1000:]).sum() <= 55  # 30 expected by chance, deviation 5.2
    assert made.train[1] is made.y
    lookup = {x.numpy().tobytes(): int(label) for x, label in zip(*data.train, strict=True)}
    assert [lookup[x.numpy().tobytes()] for x in made.x] == made.y_true.tolist()
    assert len({x.numpy().tobytes() for x in made.x}) == 1300  # no sample twice
    assert made.true[1].bincount().tolist() == [100] * 10


def test_confusion_sets_of_one_seed_share_everything() -> None:
    x = torch.arange(2000.0)[:, None]
    y = torch.arange(2000) % 4
    small, large = (confusion_set((x, y), size, 5, true_size=500) for size in (100, 900))
    assert torch.equal(small.true[0], large.true[0])
    assert torch.equal(small.confused[0], large.confused[0][:100])
    assert torch.equal(small.confused[1], large.confused[1][:100])
    none = confusion_set((x, y), 0, 5, true_size=500)
    assert torch.equal(none.x, small.true[0])
    assert not none.is_confused.any()
    assert not torch.equal(confusion_set((x, y), 100, 6, true_size=500).x, small.x)
    assert large.confused[1].unique().tolist() == [0, 1, 2, 3]
    assert confusion_set((x, y), 900, 5, true_size=500, n_classes=8).y.max() == 7


def test_what_cannot_be() -> None:
    x = torch.zeros(30, 1)
    with pytest.raises(InputError, match="together at most 30 samples, got 10000 \\+ 5"):
        confusion_set((x, Y[:30]), 5, 0)
    with pytest.raises(InputError, match="size at least 0"):
        confusion_set((x, Y[:30]), -1, 0, true_size=3)
    with pytest.raises(InputError, match="from 0 to n_classes - 1 = 4, got 0 to 9"):
        random_labels(Y, 5, 0)
    with pytest.raises(InputError, match="integer labels"):
        corrupt_labels(torch.zeros(3), 0.5, 2, 0)
    for fraction in (-0.1, 1.5, float("nan")):
        with pytest.raises(InputError, match="fraction"):
            corrupt_labels(Y, fraction, 10, 0)
    with pytest.raises(InputError, match="at least 2 classes"):
        corrupt_labels(torch.zeros(3, dtype=torch.int64), 0.5, 1, 0, exclude_true=True)
    with pytest.raises(InputError, match="seed"):
        random_labels(Y, 10, -1)
