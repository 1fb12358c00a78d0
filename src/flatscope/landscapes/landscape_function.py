"""`landscape`: loss and error on a line or a plane through a network, in weight space or in path space."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flatscope.context import Context
from flatscope.disk import MOST_TEXT, read_file, write_whole
from flatscope.errors import InputError, NumericalWarning, refuse_unknown, refuse_unless_whole
from flatscope.files import from_json_bytes, from_npz_bytes, json_bytes, npz_bytes
from flatscope.forms import folded_context
from flatscope.isolation import own_settings, untouched_randomness
from flatscope.landscapes.directions import (
    NAMES,
    PathPlane,
    Plane,
    WeightPlane,
    cosine_of_directions,
    directions_to_networks,
    filter_normalised_directions,
    gaussian_directions,
    hessian_eigenvector_directions,
    orthogonal_component,
    orthogonal_normals,
    principal_plane_of_path,
    rayleigh_quotient,
)
from flatscope.landscapes.grid_losses import GridLosses
from flatscope.landscapes.surface import Surface
from flatscope.limits import STANDARD
from flatscope.measures.psi_flatness import path_coordinates
from flatscope.params import Params, count_scalars, flatten, norm, unflatten
from flatscope.problem import Problem
from flatscope.progress import progress_bar
from flatscope.symmetries.folding import has_batchnorm

SPACES = ("weights", "psi")
NOISE = 0.05  # length of a direction over the root of the number of entries
LENGTH_TO_CHOOSE = ("gaussian", "hessian")  # directions that noise and relative are about
Row = tuple[Tensor, Tensor | None, Tensor]


@own_settings()
def landscape(
    problem: Problem,
    space: str = "weights",
    directions: str | nn.Module | Mapping[str, Tensor] | tuple[Any, ...] | list[Any] | None = None,
    grid: int = 41,
    span: float = 1.0,
    seed: int = 0,
    *,
    dimensions: int = 2,
    part: str = "train",
    noise: float | None = None,
    relative: bool = False,
    rule: str = "max_product",
    checkpoint: str | os.PathLike[str] | None = None,
) -> Surface:
    r"""Loss and 0/1 error around a network; BatchNorm is folded first.

    In weight space a picture depends on how the function is written: scaling units changes it, the function not. In
    path space (Yi et al. 2019, equation 18) directions are drawn for the values of the basis paths, in an order that no
    rescaling changes: every way of writing the function has the same picture, to rounding.

    Path space has poles, where the value P(u) S(u) of some unit's own path is zero. Grid points on a pole, or reached
    only across one, are NaN and marked in `poles`. A noise of 0.05 is only meant for networks whose skeleton weights
    are about 1; for others take `relative=True`, or the smaller noise that the warning names.

    Args:
        problem: model, data, loss.
        space: "weights", or "psi" for the values of the basis paths.
        directions: "filter", the default in weight space: every filter's part as long as the filter with its bias (Li
            et al. 2018); "gaussian", that of path space: isotropic, orthogonal, of exactly the length noise·√m (m
            parameters or path values); "hessian": eigenvectors of the largest eigenvalues of the training loss, of the
            Gaussian's length;
            another network (a module or a state dict, or a pair of them): the way to it, of its own length. A plane to
            one network has a Gaussian direction, orthogonal to the way and as long, for its second axis. A list of
            networks, as of the checkpoints of a training: the plane through this network in which they move most (Li
            et al. 2018); the picture shows their path, and `meta` its coordinates and the share of it that is seen.
        grid: points per axis; odd, so that the network itself is one of them (any number on the way to a network).
        span: coordinates run from −span to span in units of the direction; on the way to another network from
            1 − span to span, so that 1 goes from one network to the other.
        seed: of the directions.
        dimensions: 1 for a line, 2 for a plane.
        part: "train" or "test" samples.
        noise: length of a Gaussian or Hessian direction over √m; 0.05 by default. Other directions have a length of
            their own, which `span` scales.
        relative: Gaussian or Hessian directions in weight space have the length noise·‖w‖; in path space the noise is
            v ⊙ ξ, each value moved in proportion to itself.
        rule: how the skeleton of the paths is chosen: "max_product", "cyclic" or "diagonal".
        checkpoint: folder that keeps finished rows; the same call with the same folder goes on where it was stopped.

    Example:
        >>> import torch, flatscope as fs
        >>> problem = fs.Problem(torch.nn.Linear(3, 2), train=(torch.eye(3), torch.tensor([0, 1, 0])))
        >>> surface = fs.landscape(problem, grid=5)
        >>> surface.loss.shape, float(surface.loss[2, 2]) == surface.centre
        (torch.Size([5, 5]), True)
    """
    if not isinstance(problem, Problem):
        raise InputError("a Problem", type(problem).__name__, where="landscape", fix="Problem(model, train=(x, y))")
    refuse_unknown(space, SPACES, "space of a landscape")
    if directions is None:
        directions = "filter" if space == "weights" else "gaussian"
    others = _networks_as_directions(directions, space, dimensions)
    _refuse_unused_length(directions, noise, relative)
    noise = NOISE if noise is None else noise
    _check_landscape_arguments(dimensions, grid, span, noise, bool(others))
    problem.part(part)
    begun = time.perf_counter()
    with untouched_randomness(problem.generators):
        ctx = Context(problem, seed=seed)
        if has_batchnorm(problem.model):
            ctx = folded_context(ctx)
        plane: Plane
        if space == "psi":
            plane, about = _path_plane(ctx, dimensions, noise, relative, rule)
            about["largest_noise"] = noise * plane.reach(span)
        else:
            length = noise * (norm(ctx.trainable) if relative else count_scalars(ctx.trainable.values()) ** 0.5)
            plane, about = _weight_plane(ctx, problem.model, directions, others, dimensions, length, checkpoint)
        axes = tuple(_grid_axis(grid, span, towards=i < len(others)) for i in range(dimensions))
        losses = GridLosses(ctx, plane, part)
        centre, centre_error, _ = losses(torch.zeros(1, dimensions, dtype=torch.float64))
        key = {
            "space": space,
            "grid": grid,
            "span": span,
            "part": part,
            "samples": problem.part(part).n,
            "loss": problem.loss.name,
            "dtype": str(problem.dtype),
            "weights": fingerprint(ctx.params),
            **about,
        }
        for known_to_rounding in ("eigenvalues", "path", "explained"):
            key.pop(known_to_rounding, None)
        loss, error, poles = _losses_of_grid_rows(losses, axes, KeptRows(checkpoint, key, float(centre)))
    origin = tuple((axis == 0).nonzero().flatten() for axis in axes)
    if all(len(place) for place in origin):  # evaluated with its row: the same to the last digit
        centre = loss[origin]
        centre_error = None if error is None else error[origin]
    name = directions if isinstance(directions, str) else "path" if isinstance(directions, list) else "checkpoint"
    meta = {
        "seed": seed,
        "part": part,
        "span": span,
        "noise": noise,
        "relative": relative,
        **about,
        "centre_error": None if centre_error is None else float(centre_error),
        "folded": has_batchnorm(problem.model),
        "samples": problem.part(part).n,
        **problem.provenance(begun),
        "passes": {kind: round(value, 6) for kind, value in ctx.passes.items()},
    }
    surface = Surface(loss, error, axes, float(centre), space, name, poles, meta)
    if bool(poles.any()):
        warnings.warn(_poles_in_words(surface), NumericalWarning, stacklevel=2)
    return surface


def _losses_of_grid_rows(
    losses: GridLosses, axes: tuple[Tensor, ...], kept: KeptRows
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Loss, error and poles over the grid, row by row (a line piece by piece)."""
    if len(axes) == 1:
        pieces = [piece[:, None] for piece in torch.split(axes[0], STANDARD.line_points)]
    else:
        pieces = [torch.stack([torch.full_like(axes[1], float(t)), axes[1]], dim=1) for t in axes[0]]
    rows = []
    with progress_bar("Landscape", total=sum(len(piece) for piece in pieces)) as advance:
        for number, piece in enumerate(pieces):
            row = kept.read(number, len(piece))
            if row is None:
                row = losses(piece)
                kept.write(number, row)
            rows.append(row)
            advance(len(piece))
    shape = tuple(len(axis) for axis in axes)
    loss, poles = (torch.cat([row[i] for row in rows]).reshape(shape) for i in (0, 2))  # type: ignore[misc]
    errors = [row[1] for row in rows if row[1] is not None]
    return loss, torch.cat(errors).reshape(shape) if errors else None, poles


def _path_plane(
    ctx: Context, dimensions: int, noise: float, relative: bool, rule: str
) -> tuple[PathPlane, dict[str, Any]]:
    """The plane in path space, and what is worth knowing about it."""
    paths = path_coordinates(ctx, rule)
    drawn = [noise * xi for xi in orthogonal_normals(ctx.generator("landscape"), paths.count, dimensions)]
    sizes = paths.log_values()[0].exp()
    about = {
        "rule": rule,
        "parameters": paths.count,
        "lengths": [float(xi.norm()) for xi in drawn],
        "path_values": {"min": float(sizes.min()), "median": float(sizes.median()), "max": float(sizes.max())},
        "seed": ctx.seed,
        "noise": noise,
        "relative": relative,
    }
    return PathPlane(ctx, paths, drawn, relative), about


def _weight_plane(
    ctx: Context, template: nn.Module, directions: Any, others: tuple[Any, ...], dimensions: int, length: float,
    checkpoint: str | os.PathLike[str] | None,
) -> tuple[WeightPlane, dict[str, Any]]:  # fmt: skip
    """The plane in weight space, and what is worth knowing about it."""
    about: dict[str, Any] = {"parameters": count_scalars(ctx.trainable.values())}
    if others:
        chosen = directions_to_networks(ctx, template, others)
        if len(chosen) < dimensions:
            way, drawn = (flatten(each) for each in (chosen[0], gaussian_directions(ctx, 1, norm(chosen[0]))[0]))
            beside = orthogonal_component(drawn, [way])
            chosen.append(unflatten(beside * (way.norm() / beside.norm()), chosen[0]))
    elif isinstance(directions, list):
        chosen, about["path"], about["explained"] = principal_plane_of_path(
            directions_to_networks(ctx, template, tuple(directions)), dimensions
        )
    elif directions == "hessian":
        chosen = kept_directions(
            checkpoint, ctx.trainable, lambda: hessian_eigenvector_directions(ctx, dimensions, length)
        )
        if len(chosen) != dimensions or not all(math.isclose(norm(direction), length) for direction in chosen):
            raise InputError("directions of this landscape", "others", where=f"checkpoint {checkpoint}")
        about["eigenvalues"] = [rayleigh_quotient(ctx, direction) for direction in chosen]
    elif directions == "filter":
        chosen = filter_normalised_directions(ctx, dimensions)
    else:
        chosen = gaussian_directions(ctx, dimensions, length)
    about["lengths"] = [norm(direction) for direction in chosen]
    if dimensions == 2:
        about["cosine"] = cosine_of_directions(chosen[0], chosen[1])
    about["plane"] = [fingerprint(direction) for direction in chosen]
    return WeightPlane(ctx, chosen), about


def _grid_axis(grid: int, span: float, towards: bool) -> Tensor:
    """Coordinates, float64: exactly symmetric, or exactly from 0 to 1 on the way to a network."""
    if towards:
        steps = torch.arange(grid, dtype=torch.float64) / (grid - 1)
        return (1 - span) + (2 * span - 1) * steps
    half = (grid - 1) // 2
    return torch.arange(-half, half + 1, dtype=torch.float64) / half * span


def _networks_as_directions(directions: Any, space: str, dimensions: int) -> tuple[Any, ...]:
    """The networks that the directions lead to; none for directions by name."""
    if isinstance(directions, str):
        refuse_unknown(directions, NAMES, "kind of directions")
        if space == "psi" and directions != "gaussian":
            fix = 'Filters and the Hessian belong to weights: take space="weights"'
            raise InputError('"gaussian" directions in path space', repr(directions), "directions", fix)
        return ()
    if space == "psi":
        fix = 'Ways to other networks belong to weights: take space="weights", or leave the directions out'
        raise InputError('"gaussian" directions in path space', "another network", "directions", fix)
    if isinstance(directions, list):
        if len(directions) < dimensions:
            raise InputError(f"at least {dimensions} networks of a path", str(len(directions)), where="directions")
        return ()
    others = directions if isinstance(directions, tuple) else (directions,)
    if not 1 <= len(others) <= dimensions:
        raise InputError(f"at most {dimensions} other networks", str(len(others)), where="directions")
    return others


def _refuse_unused_length(directions: Any, noise: float | None, relative: bool) -> None:
    """Raise where a length is given for directions that have one of their own."""
    if (noise is None and not relative) or (isinstance(directions, str) and directions in LENGTH_TO_CHOOSE):
        return
    name = f'directions="{directions}"' if isinstance(directions, str) else "directions to networks"
    given = "relative=True" if noise is None else f"noise={noise}"
    fix = 'Take directions="gaussian", or scale the picture with span'
    raise InputError('directions "gaussian" or "hessian" for noise and relative', f"{name}, {given}", "landscape", fix)


def _check_landscape_arguments(dimensions: int, grid: int, span: float, noise: float, to_network: bool) -> None:
    if dimensions not in (1, 2):
        raise InputError("1 or 2", repr(dimensions), where="dimensions")
    symmetric = not to_network or dimensions == 2
    refuse_unless_whole(grid, "grid", 3 if symmetric else 2)
    if symmetric and grid % 2 == 0:
        raise InputError("an odd number", str(grid), where="grid", fix="The network itself is the middle one")
    for name, value in (("span", span), ("noise", noise)):
        if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
            raise InputError("a number above 0", repr(value), where=name)
    if to_network and span <= 0.5:
        raise InputError("a span above 0.5 on the way to a network", str(span), where="span", fix="1 goes all the way")


def _poles_in_words(surface: Surface) -> str:
    blocked, total = int(surface.poles.sum()), surface.poles.numel()
    return (
        f"landscape: {blocked} of {total} grid points lie on a pole of path space or beyond one, and are NaN; "
        f"no pole is met with noise below {surface.meta['largest_noise']:.3g}"
        + ("" if surface.meta["relative"] else ", or take relative=True")
    )


class KeptRows:
    """Rows of one landscape; nothing is kept without a folder.

    Args:
        folder: where; made if missing. It may hold the rows of this landscape only.
        key: everything that the values depend on.
        centre: loss of the network: other data would show here.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, key: dict[str, Any], centre: float) -> None:
        self._folder = None if folder is None else Path(folder)
        if self._folder is None:
            return
        written = self._folder / "landscape.json"
        if not written.exists():
            write_whole(written, json_bytes(json.dumps({"key": key, "centre": centre}, indent=1)))
            return
        try:
            known = from_json_bytes(read_file(written, MOST_TEXT))
            same = known["key"] == json.loads(json.dumps(key))
            same = same and math.isclose(known["centre"], centre, rel_tol=1e-5, abs_tol=1e-9)
            differing = [name for name in key if known["key"].get(name) != json.loads(json.dumps(key[name]))]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
            raise InputError("the folder of a landscape", str(problem), where=str(written)) from problem
        if not same:
            got = f"rows of another one (other {', '.join(differing) or 'data'})"
            fix = "Choose another folder, or remove this one"
            raise InputError("the folder of this very landscape", got, f"checkpoint {self._folder}", fix)

    def read(self, number: int, size: int) -> Row | None:
        """A finished row; None if there is none, or none that can be read."""
        if self._folder is None:
            return None
        try:
            stored = from_npz_bytes(read_file(self._folder / f"row-{number:05d}.npz"), sealed_only=True)
            arrays = {name: torch.from_numpy(array) for name, array in stored.items()}
            row = arrays["loss"], arrays.get("error"), arrays["poles"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return row if all(part is None or part.shape == (size,) for part in row) else None

    def write(self, number: int, row: Row) -> None:
        """Keep a finished row."""
        if self._folder is None:
            return
        loss, error, poles = row
        arrays: dict[str, Any] = {"loss": loss.numpy(), "poles": poles.numpy()}
        if error is not None:
            arrays["error"] = error.numpy()
        write_whole(self._folder / f"row-{number:05d}.npz", npz_bytes(arrays))


def kept_directions(
    folder: str | os.PathLike[str] | None, like: Params, make: Callable[[], list[Params]]
) -> list[Params]:
    """Directions that cannot be made twice to the last digit: from the folder, or made and put there."""
    if folder is None:
        return make()
    path = Path(folder) / "directions.npz"
    if path.exists():
        try:
            stored = from_npz_bytes(read_file(path), sealed_only=True)
            vectors = [torch.from_numpy(stored[name]) for name in sorted(stored)]
        except (OSError, ValueError) as problem:
            raise InputError("directions of a landscape", str(problem), where=str(path)) from problem
        if any(vector.shape != (count_scalars(like.values()),) for vector in vectors):
            raise InputError("directions of this network", "others", where=str(path), fix="Choose another folder")
        device = next(iter(like.values())).device
        return [unflatten(vector.to(device), like) for vector in vectors]
    directions = make()
    arrays = {f"direction{i}": flatten(direction).cpu().numpy() for i, direction in enumerate(directions)}
    write_whole(path, npz_bytes(arrays))
    return directions


def fingerprint(params: Params) -> str:
    """A short hash of weights, or of a direction."""
    digest = hashlib.blake2b(digest_size=12)
    for name in sorted(params):
        digest.update(name.encode())
        digest.update(params[name].detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
