"""Names for those who train networks or add studies, each with the module that has it.

What most people need (`train_population`, `benchmark`, `atlas`) are names of `flatscope` itself.
"""

from flatscope.training.benchmarking.release import released_leaderboard as released_leaderboard
from flatscope.training.benchmarking.release import released_population as released_population
from flatscope.training.callbacks import FlatscopeCallback as FlatscopeCallback
from flatscope.training.callbacks import FlatscopeTrainerCallback as FlatscopeTrainerCallback
from flatscope.training.callbacks import Recorder as Recorder
from flatscope.training.callbacks import scalars as scalars
from flatscope.training.callbacks import write_mlflow as write_mlflow
from flatscope.training.callbacks import write_tensorboard as write_tensorboard
from flatscope.training.callbacks import write_wandb as write_wandb
from flatscope.training.checkpoint import TrainConfig as TrainConfig
from flatscope.training.evaluation import evaluate as evaluate
from flatscope.training.group_training import PopulationView as PopulationView
from flatscope.training.label_noise import corrupt_labels as corrupt_labels
from flatscope.training.label_noise import random_labels as random_labels
from flatscope.training.loop import train as train
from flatscope.training.models import all_conv as all_conv
from flatscope.training.models import build as build
from flatscope.training.models import mlp as mlp
from flatscope.training.sweeps.configuration import from_json as from_json
from flatscope.training.sweeps.configuration import key_of as key_of
from flatscope.training.sweeps.configuration import to_json as to_json
from flatscope.training.sweeps.engines import run_units as run_units
from flatscope.training.sweeps.store import Store as Store
from flatscope.training.sweeps.store import Stored as Stored
from flatscope.training.sweeps.work import CHECKPOINT_SECONDS as CHECKPOINT_SECONDS
from flatscope.training.sweeps.work import builder_of as builder_of
from flatscope.training.sweeps.work import measure_stored as measure_stored
from flatscope.training.sweeps.work import stored_problem as stored_problem
from flatscope.training.sweeps.work import tables_of as tables_of
from flatscope.training.sweeps.work import train_and_measure as train_and_measure
from flatscope.training.sweeps.work import trial_of as trial_of
from flatscope.training.trials import build_model as build_model
from flatscope.training.trials import read_trials as read_trials
