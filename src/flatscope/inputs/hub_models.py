"""Networks by name from the packages that people have them from: `timm:resnet18`, `hf:folder` or `hf:owner/name`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_modules

from flatscope.errors import InputError, first_line
from flatscope.formatting import first_of_names
from flatscope.isolation import private_randomness

HUBS = ("timm", "hf")
OFFLINE = "Without a connection name a folder that save_pretrained wrote"
MOST_MODULES = (
    200_000  # of a network that a file describes: those with the most layers and experts have some ten thousand
)


def is_hub_model(model: str) -> bool:
    """True if this names a network of a hub, not a function of a module."""
    source, _, name = model.partition(":")
    return source in HUBS and bool(name)


def hub_model(model: str, options: Mapping[str, Any], *, has_weights: bool, seed: int) -> nn.Module:
    """The network of that name in eval mode.

    Args:
        model: `timm:NAME`, `hf:FOLDER` or `hf:OWNER/NAME`.
        options: for timm's `create_model`, or for `from_pretrained`.
        has_weights: whether weights are loaded into it afterwards, so that none need be fetched.
        seed: of weights that are drawn.
    """
    source, _, name = model.partition(":")
    with private_randomness(seed):
        return (_timm_model if source == "timm" else _hugging_face_model)(name, dict(options), has_weights).eval()


def tokenizer_loader(model: str) -> Callable[[], Any] | None:
    """Function that loads the tokenizer saved with the model `hf:PLACE`; None for other models."""
    source, _, name = model.partition(":")
    if source != "hf" or not name:
        return None

    def load_tokenizer() -> Any:
        where = f"--model {model}"
        try:
            import transformers

            folder = Path(name).expanduser()
            place = {"local_files_only": True} if folder.is_dir() else {}
            return transformers.AutoTokenizer.from_pretrained(
                str(folder) if place else name, trust_remote_code=False, **place
            )
        except Exception as problem:
            fix = "Save it beside the model (tokenizer.save_pretrained), or save the data with a column input_ids"
            raise InputError("a tokenizer beside the model, for texts", first_line(problem), where, fix) from problem

    return load_tokenizer


def _timm_model(name: str, options: dict[str, Any], has_weights: bool) -> nn.Module:
    try:
        import timm
    except ImportError as problem:
        fix = "pip install timm torchvision"
        raise InputError("timm and torchvision", first_line(problem), f"--model timm:{name}", fix) from problem
    if not timm.is_model(name):
        near = ", ".join(timm.list_models(f"*{name}*")[:5])
        raise InputError("a model of timm", repr(name), "--model", f"Names like it: {near}" if near else "")
    try:
        network: nn.Module = timm.create_model(name, **{"pretrained": not has_weights, **options})
    except Exception as problem:
        fix = "Options go to --model-option; pretrained=False takes drawn weights, --weights a file of your own"
        raise InputError("a model that timm can make", first_line(problem), f"--model timm:{name}", fix) from problem
    return network


def _hugging_face_model(name: str, options: dict[str, Any], has_weights: bool) -> nn.Module:
    where = f"--model hf:{name}"
    try:
        import transformers
    except ImportError as problem:
        raise InputError("transformers", first_line(problem), where, "pip install transformers") from problem
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    folder = Path(name).expanduser()
    place = {"local_files_only": True} if folder.is_dir() else {}
    if not folder.is_dir() and name.startswith((".", "/", "~")):
        raise InputError("a folder that save_pretrained wrote", "no such folder", where)
    source = str(folder) if place else name
    try:
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False, **place)
    except Exception as problem:
        raise InputError("a model's config.json", first_line(problem), where, OFFLINE) from problem
    kind = str(next(iter(config.architectures or ()), ""))
    made = getattr(transformers, kind, None) if kind.isidentifier() else None
    if not (isinstance(made, type) and issubclass(made, nn.Module)):
        fix = "Name a function of your own that builds it: file.py:function"
        raise InputError("a model whose class transformers has", kind or "no architecture", where, fix)
    if has_weights:
        try:
            with refuse_oversized_network(where):
                built: nn.Module = made(config, **options)
        except InputError:
            raise
        except Exception as problem:
            raise InputError("a config.json of which a model can be built", first_line(problem), where) from problem
        return built
    options = {"use_safetensors": True, "trust_remote_code": False, **place, **options}  # nothing of a file is run
    loaded: nn.Module
    try:
        with refuse_oversized_network(where):
            loaded, facts = made.from_pretrained(source, output_loading_info=True, **options)  # type: ignore[attr-defined]
    except InputError:
        raise
    except Exception as problem:
        raise InputError("weights in safetensors", first_line(problem), where, OFFLINE) from problem
    if drawn := sorted(facts["missing_keys"]):  # transformers draws them, and only warns
        fix = "Name a checkpoint whose head was trained too, or give all weights with --weights"
        raise InputError(f"weights of every parameter of {kind}", f"none of {first_of_names(drawn, 4)}", where, fix)
    return loaded


@contextmanager
def refuse_oversized_network(where: str) -> Iterator[None]:
    """Refuse a network as soon as it has more modules than any, or more weights than the machine has memory for.

    Its parts are counted while they are put together: a configuration has many names for how many it asks for.
    """
    memory, modules, total = _memory_bytes(), 0, 0
    sizes: dict[tuple[int, str], int] = {}  # bytes, by the module that holds them and their name in it

    def count_module(*_: object) -> None:
        nonlocal modules
        modules += 1
        if modules > MOST_MODULES:
            fix = "See the number of layers in its config.json"
            raise InputError(f"a model of at most {MOST_MODULES:,} modules", "more", where, fix)

    def count_parameter(owner: nn.Module, name: str, value: nn.Parameter | None) -> None:
        nonlocal total
        size = 0 if value is None else value.numel() * value.element_size()
        total += size - sizes.get((id(owner), name), 0)  # weights that are read take the place of those before
        sizes[id(owner), name] = size
        if total > memory:
            got = f"at least {total / 2**30:,.0f} GiB"
            fix = "See the sizes in its config.json, or take a machine with more"
            raise InputError(f"weights that fit in the memory of {memory / 2**30:,.0f} GiB", got, where, fix)

    hooks = [
        torch_modules.register_module_module_registration_hook(count_module),
        torch_modules.register_module_parameter_registration_hook(count_parameter),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _memory_bytes() -> float:
    """Memory of the machine; infinite where the system does not say."""
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):
        return float("inf")
