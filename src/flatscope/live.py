"""The recorders and callbacks of `flatscope_training.callbacks`, under the name by which scripts import them."""

import importlib
from typing import TYPE_CHECKING, Any

from flatscope.parts import missing_part, present_module

if TYPE_CHECKING:
    from flatscope_training.callbacks import Recorder as Recorder
    from flatscope_training.callbacks import scalars as scalars
    from flatscope_training.callbacks import write_mlflow as write_mlflow
    from flatscope_training.callbacks import write_tensorboard as write_tensorboard
    from flatscope_training.callbacks import write_wandb as write_wandb


def __getattr__(name: str) -> Any:
    home = present_module(__name__)
    if home == __name__:
        raise missing_part(f"{__name__}.{name}")
    return getattr(importlib.import_module(home), name)
