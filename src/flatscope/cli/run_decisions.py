"""`flatscope sensitivity`, `forecast` and `diagonal`: what to do with a network, and what that costs."""

from __future__ import annotations

from flatscope.cli.decision_options import DiagonalCommand, ForecastCommand, SensitivityCommand
from flatscope.cli.output import (
    check_output_file,
    check_outputs,
    note_missing_weights,
    show_grid,
    show_note,
    show_text,
    write_and_show_result,
)
from flatscope.cli.sources import load_problem, network_meta
from flatscope.decisions.diagonal import MATRICES, diagonal
from flatscope.decisions.forecast import Forecast, forecast
from flatscope.decisions.sensitivity import Sensitivity
from flatscope.decisions.sensitivity_function import sensitivity
from flatscope.errors import InputError, refuse_unknown
from flatscope.formatting import readable_number
from flatscope.inputs.weight_files import read_weights

BITS, SHARES = (8, 4, 3, 2), (0.5, 0.9)


def run_sensitivity(given: SensitivityCommand) -> None:
    """Measure, choose, show, save."""
    check_outputs(given, Sensitivity)
    for place, ending in ((given.allocation_out, ".json"), (given.rounded_out, ".safetensors")):
        if place is None:
            continue
        if given.mean_bits is None:
            raise InputError("--mean-bits beside a file of the choice", "none", where=str(place))
        check_output_file(place, (ending,))
    bits = BITS if given.bits is None else given.bits
    if given.mean_bits is not None and not given.mean_bits >= min(bits, default=0):  # before anything is measured
        got, fix = readable_number(given.mean_bits), "Ask for more bits, or try fewer with --bits"
        raise InputError(f"at least {min(bits)}, the fewest bits to round to", got, where="--mean-bits", fix=fix)
    problem, _ = load_problem(given)
    shares = SHARES if given.sparsity is None else tuple(share for share in given.sparsity if share)
    result = sensitivity(
        problem,
        bits,
        shares,
        given.rounding,
        given.layer,
        precision=given.precision,
        budget=given.budget,
        memory=given.memory,
        seed=given.seed,
    )
    result.meta |= network_meta(given)
    note_missing_weights(given.model, given.weights)

    def show() -> None:
        show_text(f"{result.headline}\n")
        show_grid(*result.cells())

    write_and_show_result(result, given, show)
    if given.mean_bits is not None:
        _show_chosen_bits(result, given)


def _show_chosen_bits(sensitivity: Sensitivity, given: SensitivityCommand) -> None:
    """Bits by layer for a size, with all layers rounded together."""
    assert sensitivity.problem is not None
    assert given.mean_bits is not None
    allocation = sensitivity.allocate(given.mean_bits)
    rounded = sensitivity.apply(sensitivity.problem.model, allocation)
    if not given.as_json:  # before it is written: a disk that is full costs the files alone
        rows = [[layer, "as it is" if layer in allocation.unchanged else str(b)] for layer, b in allocation.items()]
        show_grid(["layer", "bits"], rows, title=f"{allocation.mean_bits:.3g} bits a weight")
        show_text(rounded.headline)
    if given.allocation_out is not None:
        allocation.save(given.allocation_out)
        show_note(f"bits by layer written to {given.allocation_out}")
    if given.rounded_out is not None:
        rounded.save(given.rounded_out)
        show_note(f"rounded weights written to {given.rounded_out}")


def run_forecast(given: ForecastCommand) -> None:
    """Predict, measure, show, save."""
    check_outputs(given, Forecast)
    new = read_weights(given.to)
    problem, _ = load_problem(given)
    result = forecast(problem, new, budget=given.budget, memory=given.memory)
    result.meta |= network_meta(given) | {"to": str(given.to)}
    note_missing_weights(given.model, given.weights)

    def show() -> None:
        show_text(f"{result.headline}\n")
        show_grid(*result.cells())

    write_and_show_result(result, given, show)


def run_diagonal(given: DiagonalCommand) -> None:
    """Compute, save, say what it is."""
    refuse_unknown(given.matrix, MATRICES, "--matrix")
    check_output_file(given.out, (".safetensors",))
    problem, _ = load_problem(given)
    effort = {"precision": given.precision, "budget": given.budget, "memory": given.memory}
    result = diagonal(problem, given.matrix, seed=given.seed, **effort)  # type: ignore[arg-type]
    result.meta |= network_meta(given)
    note_missing_weights(given.model, given.weights)
    result.save(given.out)
    show_note(f"diagonal written to {given.out}")
    show_text(result.headline)
