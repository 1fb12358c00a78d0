"""Measures recorded while a network is being trained: plain loops, Lightning, Hugging Face; writers for trackers.

`FlatscopeCallback` (for lightning.pytorch or pytorch_lightning) and `FlatscopeTrainerCallback` (for transformers) are
made when they are first asked for, so that neither package is needed by those who do not train with it.
"""

from typing import Any

from flatscope.live.callbacks import lightning_callback_class, trainer_callback_class
from flatscope.live.recorder import Recorder, scalars, write_mlflow, write_tensorboard, write_wandb

_MADE_WHEN_ASKED = {
    "FlatscopeCallback": lightning_callback_class,
    "FlatscopeTrainerCallback": trainer_callback_class,
}

__all__ = ["Recorder", "scalars", "write_mlflow", "write_tensorboard", "write_wandb"]


def __getattr__(name: str) -> Any:
    if name in _MADE_WHEN_ASKED:
        return _MADE_WHEN_ASKED[name]()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
