"""Networks in training, one or many: loops, models, populations, sweeps, the benchmark, the edge of stability.

The library finds this package by its entry point in the group `flatscope.parts`, and asks it for `OFFER`.
"""

from typing import TYPE_CHECKING, Any

from flatscope.parts import Offer

if TYPE_CHECKING:
    from flatscope_training.benchmarking.leaderboard import Leaderboard, benchmark
    from flatscope_training.population import train_population
    from flatscope_training.population_result import Population
    from flatscope_training.populations.atlas_curves import Atlas
    from flatscope_training.populations.atlas_making import atlas
    from flatscope_training.populations.population_frame import PopulationFrame
    from flatscope_training.stability.recording import StabilityRecorder
    from flatscope_training.stability.sharpness_record import Stability

__all__ = [
    "OFFER",
    "Atlas",
    "Leaderboard",
    "Population",
    "PopulationFrame",
    "Stability",
    "StabilityRecorder",
    "atlas",
    "benchmark",
    "train_population",
]

OFFER = Offer(
    "flatscope_training",
    names={
        "Atlas": "populations.atlas_curves:Atlas",
        "Leaderboard": "benchmarking.leaderboard:Leaderboard",
        "Population": "population_result:Population",
        "PopulationFrame": "populations.population_frame:PopulationFrame",
        "Stability": "stability.sharpness_record:Stability",
        "StabilityRecorder": "stability.recording:StabilityRecorder",
        "atlas": "populations.atlas_making:atlas",
        "benchmark": "benchmarking.leaderboard:benchmark",
        "train_population": "population:train_population",
    },
    # The lines are those of the functions, which a test compares: the help should not load even these.
    commands={
        "demo": (
            "Train two networks on the embedded digits, measure both, write a report. Needs no download.",
            "terminal.training_commands:demo",
        ),
        "stability": (
            "See whether a training stood at the edge of stability: the sharpness of its checkpoints against its step "
            "size.",
            "terminal.training_commands:stability",
        ),
        "train": (
            "Train a model with SGD, or many at once; run the same command again to resume.",
            "terminal.training_commands:train",
        ),
        "watch": (
            "Follow a training or a sweep while it goes on: progress, losses, measures so far.",
            "terminal.training_commands:watch",
        ),
        "atlas": (
            "Correlate measures with the gap along training: after every epoch, at every training loss and accuracy.",
            "terminal.training_commands:atlas",
        ),
        "benchmark": (
            "Score measures, also your own, on the released population: do they rank networks as generalization does?",
            "terminal.training_commands:benchmark",
        ),
        "sweep": (
            "Many trials, each trained and measured once; kills lose nothing.",
            "terminal.training_commands:sweep",
        ),
    },
    kinds="training_kinds:KINDS",
    models="models",
    former={
        "flatscope.benchmarking.recipe": "flatscope_training.benchmarking.recipe",
        "flatscope.sweeps.work": "flatscope_training.sweeps.work",
        "flatscope.training.models": "flatscope_training.models",
        "flatscope.training.vision_models": "flatscope_training.vision_models",
    },
)


def __getattr__(name: str) -> Any:
    return OFFER.attribute(name)
