"""What a study is made of, for its cost: stacks of networks that train together, and single measurements.

Pieces of one kind take the same time but for the number of training images and epochs: a kind is what the network and
the work look like, without seeds, labels, starting weights and learning rates.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flatscope.studies.cost import MEASURING, TRAINING
from flatscope.studies.study import Config, Stage
from flatscope.sweeps.configuration import key_of, to_json
from flatscope.training.data import load

MEASURE_STORED = "flatscope.sweeps.stored_networks:measure_stored"
TRAINED_WITH = ("data", "model", "train")  # a configuration with all of these trains a network
SOMETIMES = ("momentum", "noise_temperature", "stop_gradient_norm")  # costs time for the whole stack if one has it
ASKED = ("measures", "bounds", "measure_options", "measure_seed", "device")
# What a measurement is called and started with, none of which decides how long it takes.
NAMES = ("seed", "measure_seed", "kind", "cell", "set", "study", "rescaling", "device", "network", "networks")


@dataclass(frozen=True)
class Piece:
    """A stack of networks that train together, or one measurement.

    Attributes:
        part: "training" or "measuring".
        kind: the same digits for what takes the same time.
        what: the kind in words; several may have the same.
        work: "module:function" that does it.
        configs: of the networks of a stack; a measurement has one.
        keys: what it leaves in the store.
        images: training images; 0 for a measurement without a network.
        tested: test images.
    """

    part: str
    kind: str
    what: str
    work: str
    configs: tuple[Config, ...]
    keys: frozenset[str]
    images: int = 0
    tested: int = 0

    @property
    def networks(self) -> list[Config]:
        """Configurations of the stored networks that a measurement looks at."""
        config = self.configs[0]
        return [config["network"]] if "network" in config else list(config.get("networks", ()))


def pieces_of(stages: Sequence[Stage], device: str) -> list[Piece]:
    """All pieces of a study; what several of its units have in common is there once."""
    seen: set[str] = set()
    found: list[Piece] = []
    for stage in stages:
        for unit in stage.units:
            fresh = [
                {**config, "device": config.get("device", device)} for config in unit if key_of(config) not in seen
            ]
            seen.update(key_of(config) for config in fresh)
            found += _of_unit(fresh, stage.work)
    return found


def _of_unit(configs: Sequence[Config], work: str) -> Iterator[Piece]:
    stacks: dict[str, list[Config]] = {}
    for config in configs:
        if not all(isinstance(config.get(name), Mapping) for name in TRAINED_WITH):
            yield _measurement(config, work, key_of(config))
            continue
        together = {"like": _like(config), "data": config["data"], "images": sizes(config)[0]}
        stacks.setdefault(to_json(together), []).append(config)
    for stack in stacks.values():
        yield _training(stack, work)
        for config in stack:
            if config.get("measures") or config.get("bounds"):
                asked = {name: config[name] for name in ASKED if name in config}
                yield _measurement({"network": config, **asked}, MEASURE_STORED, f"{key_of(config)} measured")


def _training(stack: Sequence[Config], work: str) -> Piece:
    first, (images, tested) = stack[0], sizes(stack[0])
    data, batch = first["data"]["name"].rpartition(":")[2], first["train"].get("batch_size", 64)
    augmented = ", augmented" if first["train"].get("augmentation", "none") != "none" else ""
    return Piece(
        TRAINING,
        key_of({"work": work, "stack": len(stack), **_like(first), "used": [_used(stack, name) for name in SOMETIMES]}),
        f"{len(stack)} {_model_words(first['model'])} on {data} in batches of {batch:,}{augmented}",
        work,
        tuple(stack),
        frozenset(key_of(config) for config in stack),
        images,
        tested,
    )


def _used(stack: Sequence[Config], setting: str) -> bool:
    return any(config["train"].get(setting) for config in stack)


def _like(config: Config) -> dict[str, Any]:
    """What decides how long one training image takes."""
    data, model, train = (config[name] for name in TRAINED_WITH)
    return {
        "data": {name: value for name, value in data.items() if name not in ("train_size", "test_size", "seed")},
        "model": [model["name"], model.get("options") or {}],
        "train": {name: train.get(name) for name in ("batch_size", "loss", "augmentation")},
        "followed": "follow" in config,
    }


def _measurement(config: Config, work: str, key: str) -> Piece:
    own = {name: value for name, value in config.items() if name not in NAMES}
    piece = Piece(MEASURING, "", "", work, (config,), frozenset([key]))
    of = [
        [network["data"]["name"], network["model"]["name"], network["model"].get("options")]
        for network in piece.networks
    ]
    images, tested = sizes(piece.networks[0]) if of else (0, 0)
    asked = config.get("measures") or work.rpartition(":")[2].replace("_", " ").removesuffix(" of")
    words = asked if isinstance(asked, str) else f"{asked[0]} and {len(asked) - 1} more" if asked[1:] else asked[0]
    if of:
        words += f" of {_model_words(piece.networks[0]['model'])} on {of[0][0].rpartition(':')[2]}"
    return Piece(
        MEASURING,
        key_of({"work": work, "own": own, "of": of}),
        words,
        work,
        piece.configs,
        piece.keys,
        min(images, config.get("first") or images),
        tested,
    )


def _model_words(model: Config) -> str:
    options = model.get("options") or {}
    words = ", ".join(f"{name} {_short(value)}" for name, value in options.items())
    return str(model["name"]).rpartition(":")[2] + (f" ({words})" if words else "")


def _short(value: Any) -> str:
    """Lists of widths as 784-50-50-10; long ones by their ends."""
    if not isinstance(value, list | tuple):
        return str(value)
    ends = [*value[:2], "…", *value[-2:]] if len(value) > 6 else value
    return "-".join(str(item) for item in ends)


def sizes(config: Config) -> tuple[int, int]:
    """Training and test images of a network."""
    data, labels = config["data"], config.get("labels") or {}
    images, tested = data.get("train_size"), data.get("test_size")
    if "confusion" in labels and "true_size" in labels:
        images = labels["true_size"] + labels["confusion"]
    if images is None or tested is None:
        whole = whole_sizes(data["name"])
        images, tested = (size if asked is None else asked for asked, size in zip((images, tested), whole, strict=True))
    return images, tested


@functools.lru_cache
def whole_sizes(name: str) -> tuple[int, int]:
    """Training and test images of a data set."""
    data = load(name, standardize=False)
    return len(data.train[1]), len(data.test[1]) if data.test else 0
