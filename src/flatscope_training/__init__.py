"""Networks in training, one or many: data sets, models, loops, populations, sweeps, the benchmark, stability.

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
    former={
        "flatscope.live": "flatscope_training.callbacks",
        "flatscope.benchmarking.recipe": "flatscope_training.benchmarking.recipe",
        "flatscope.sweeps.work": "flatscope_training.sweeps.work",
        "flatscope.training.models": "flatscope_training.models",
        "flatscope.training.vision_models": "flatscope_training.vision_models",
    },
)


def __getattr__(name: str) -> Any:
    return OFFER.attribute(name)
