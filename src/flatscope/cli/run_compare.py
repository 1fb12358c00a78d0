"""`flatscope compare`: several checkpoints, ranked, with what the ranking rests on."""

from __future__ import annotations

import re
from itertools import takewhile
from pathlib import Path
from typing import Any

from rich.text import Text

from flatscope.cli.options import CompareCommand
from flatscope.cli.output import (
    check_outputs,
    command_line,
    show_grid,
    show_headline,
    show_note,
    stdout_screen,
    write_and_show_result,
)
from flatscope.cli.sources import (
    asked_measures,
    check_measures,
    load_model,
    load_source,
    make_problem,
    parse_model_options,
    parse_options,
)
from flatscope.comparing import compare_function
from flatscope.comparing.comparison import Comparison
from flatscope.context import make_effort
from flatscope.errors import InputError, Interrupted
from flatscope.inputs.weight_files import WEIGHTS_FILE
from flatscope.problem import Problem
from flatscope.ranks import process_group

WEIGHT_ENDINGS = (".safetensors", ".pt", ".pth")
MOST_SHOWN = 40  # networks whose values a terminal can show
MOST_CAUTIONS = 12  # sentences on single networks
MOST_REMARKS, FEW_PLACES = 5, 5  # lines below the table, networks named in one of them
FIT_ROWS = ("training loss", "training error", "test loss", "test error")  # of the lines of a comparison


def run_compare(given: CompareCommand) -> None:
    """Compare, show, save."""
    check_measures(given.measures)
    options, factory_options = parse_options(given.option or ()), parse_model_options(given.model_option)
    make_effort(**given.effort_arguments())  # here to refuse what is wrong
    check_outputs(given, Comparison)
    names_of_measures = asked_measures(given, given.report)
    model, checkpoints = given.model, _weight_files(given.checkpoints)
    if len(model) not in (1, len(checkpoints)):
        raise InputError(f"--model once, or {len(checkpoints)} times", f"{len(model)} times", where="--model")
    names = _names_of_checkpoints(checkpoints, given.name)
    loaded = load_source(given)
    problems: dict[str, Problem] = {}
    stopped: Interrupted | None = None
    try:
        with process_group(given.device) as own_device:
            for called, path, factory in zip(names, checkpoints, model * (len(checkpoints) // len(model)), strict=True):
                network = load_model(factory, path, loaded, given.seed, factory_options)
                problems[called] = make_problem(network, loaded, given, device=own_device)
            settings: dict[str, Any] = {"seed": given.seed, "options": options, "tolerance": given.tolerance}
            comparison = compare_function.compare(
                problems, names=names_of_measures, **settings, **given.effort_arguments()
            )
    except Interrupted as stop:
        comparison, stopped = stop.result, stop
    if not problems[names[0]].ranks.rank:  # every rank has the same comparison; the first one shows it
        comparison.meta |= {"model": ", ".join(model), "data": given.data, "command": command_line()}
        write_and_show_result(comparison, given, lambda: show_comparison(comparison), unfinished=stopped is not None)
    if stopped:
        raise stopped


def show_comparison_answer(comparison: Comparison) -> None:
    """The headline; loss, error and the measures that it rests on; what else to keep in mind."""
    show_headline(comparison.headline)
    measures = [voice.measure for voice in comparison.conclusion.voices]
    rows = [line[:-2] for line in comparison.lines() if line[0] in measures or line[0] in FIT_ROWS]
    if len(comparison.names) <= MOST_SHOWN:
        show_grid(["", *comparison.names], rows)
    _show_cautions(comparison)


def _show_cautions(comparison: Comparison, most: int = MOST_CAUTIONS) -> None:
    """Print the remarks that the headline does not have."""
    further = [str(warning) for warning in comparison.warnings() if warning not in comparison.headline.splitlines()]
    for warning in further[:most]:
        stdout_screen().print(Text.assemble(("To keep in mind: ", "bold yellow"), warning))
    if len(further) > most:
        show_note(f"{len(further) - most} more to keep in mind: --out FILE or --report PAGE")


def show_comparison(comparison: Comparison) -> None:
    """The answer, one table of losses and measures, and at most five remarks."""
    show_headline(comparison.headline)
    if len(comparison.names) > MOST_SHOWN:
        show_note(
            f"the values of {len(comparison.names)} networks are too many for a terminal: --out FILE or --report PAGE"
        )
        show_grid(["measure", "verdict"], [[line[0], line[-1]] for line in comparison.lines() if line[-1]])
    else:
        rows = [[*line[:-2], line[-2] if line[-1] in ("", "comparable") else line[-1]] for line in comparison.lines()]
        show_grid(comparison.header[:-1], rows, title="\nbest first: > better, ≳ better within the error, = equal")
    _show_cautions(comparison, MOST_REMARKS - 2)
    if comparison.counting:
        places = list(comparison.ranking()["name"])
        more = f" and {len(places) - FEW_PLACES} more" if len(places) > FEW_PLACES else ""
        stdout_screen().print(
            Text(f"By what counts ({', '.join(comparison.counting)}): {', '.join(places[:FEW_PLACES])}{more}.")
        )
    show_note("why a measure is not comparable, how sure the order is: --out FILE or --report PAGE")


def _weight_files(given: list[Path]) -> list[Path]:
    """The checkpoints; those inside, where one folder of weight files is named in place of them."""
    if len(given) != 1 or not given[0].is_dir() or (given[0] / WEIGHTS_FILE).is_file():
        return given
    inside = sorted(given[0].iterdir(), key=lambda path: [part.zfill(9) for part in re.split(r"(\d+)", path.name)])
    return [path for path in inside if path.suffix in WEIGHT_ENDINGS or (path / WEIGHTS_FILE).is_file()] or given


def _names_of_checkpoints(checkpoints: list[Path], given: list[str] | None) -> list[str]:
    """Names of the checkpoints: as given, else the file's, else the part of the path that tells them apart."""
    if len(checkpoints) < 2:
        fix = "Measure one with flatscope measure"
        raise InputError("at least two checkpoints", str(len(checkpoints)), where="flatscope compare", fix=fix)
    if given is not None and (len(given) != len(checkpoints) or len(set(given)) != len(given)):
        raise InputError(f"{len(checkpoints)} different names", ", ".join(given), where="--name")
    if given is not None:
        return given
    # In `run.1` the last part is a number, not an ending.
    bare = [path.with_suffix("") if path.suffix[1:].isalpha() else path for path in checkpoints]
    for short in (
        [path.name for path in bare],
        _differing_paths([path.parts for path in bare]),
        [*map(str, checkpoints)],
    ):
        if all(short) and len(set(short)) == len(short):
            return short
    raise InputError("different checkpoints", "one of them twice", "flatscope compare", "Name each of them once")


def _differing_paths(paths: list[tuple[str, ...]]) -> list[str]:
    """Paths without the folders and the file name that all of them share."""
    first = _shared_leading_folders(paths)
    last = _shared_leading_folders([parts[first:][::-1] for parts in paths])
    return ["/".join(parts[first : len(parts) - last]) for parts in paths]


def _shared_leading_folders(paths: list[tuple[str, ...]]) -> int:
    return len(list(takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))))
