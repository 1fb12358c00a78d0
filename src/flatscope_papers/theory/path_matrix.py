"""Paths written out one by one, for networks small enough: the structure matrix, Lemma 5.1 and the path sum.

A path is a tuple of edges; an edge is (parameter name, flat index). Paths begin at the ground (an input, a constant,
a bias) and end there (an output, or a unit that cannot be rescaled); identity connections cost no edge.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flatscope.errors import NotApplicable
from flatscope.extend import Graph, Params
from flatscope.generalization_bounds.psi import PathSpread
from flatscope.symmetries.basis_paths import PathCoordinates

Edge = tuple[str, int]
Path = tuple[Edge, ...]
MOST_PATHS = 200_000


def all_paths(graph: Graph, params: Params, most: int = MOST_PATHS) -> list[Path]:
    """Every path of the network; refused where there are more than `most`."""
    classes = {layer.name: layer.edge_classes(params[layer.weight].shape) for layer in graph.layers}
    readers = {layer.name: [other for other in graph.layers if layer.name in other.sources] for layer in graph.layers}
    finished: list[Path] = []
    stack: list[tuple[Path, str, int]] = []
    for layer in graph.layers:
        heads, tails = classes[layer.name]
        for entry in (tails == 0).nonzero().flatten().tolist():
            stack.append((((layer.weight, entry),), layer.name, int(heads[entry])))
        for bias in layer.biases:
            stack.extend((((bias, unit),), layer.name, number) for unit, number in enumerate(layer.outputs.tolist()))
    while stack:
        path, name, number = stack.pop()
        if number == 0:
            finished.append(path)
            continue
        for layer in readers[name]:
            heads, tails = classes[layer.name]
            for entry in (tails == number).nonzero().flatten().tolist():
                stack.append(((*path, (layer.weight, entry)), layer.name, int(heads[entry])))
        if len(finished) + len(stack) > most:
            raise NotApplicable(f"a network of at most {most} paths", "more", where="all_paths")
    return sorted(set(finished))


def basis_paths(coordinates: PathCoordinates) -> list[Path]:
    """The basis paths, in the order of the values: for every edge that is not frozen its prefix, itself, its suffix."""
    basis: list[Path] = []
    for block in coordinates.blocks:
        frozen = set(block.frozen.tolist())
        free = [entry for entry in range(coordinates.params[block.name].numel()) if entry not in frozen]
        if block.layer is None:
            basis.extend(((block.name, entry),) for entry in free)
        elif block.is_bias:
            basis.extend(
                ((block.name, unit), *_path_beyond_class(coordinates, int(block.layer.outputs[unit]))) for unit in free
            )
        else:
            heads, tails = block.layer.edge_classes(coordinates.params[block.name].shape)
            for entry in free:
                before = _path_beyond_class(coordinates, int(tails[entry]), backwards=True)
                basis.append((*before, (block.name, entry), *_path_beyond_class(coordinates, int(heads[entry]))))
    return basis


def path_matrix(paths: list[Path], params: Params) -> Tensor:
    """Structure matrix (paths, m): how often each path uses each weight; columns in the order of `params`."""
    start, offsets = 0, {}
    for name, value in params.items():
        offsets[name] = start
        start += value.numel()
    matrix = torch.zeros(len(paths), start, dtype=torch.float64)
    for row, path in enumerate(paths):
        for name, entry in path:
            matrix[row, offsets[name] + entry] += 1
    return matrix


def path_values(paths: list[Path], params: Params) -> Tensor:
    """The product of the weights on each path, float64."""
    flat = {name: value.detach().double().flatten().tolist() for name, value in params.items()}
    return torch.tensor([math.prod(flat[name][entry] for name, entry in path) for path in paths], dtype=torch.float64)


def lemma_exponents(coordinates: PathCoordinates, paths: list[Path]) -> Tensor:
    """Exponents (paths, count) by which any path's value is a product of basis-path values.

    Lemma 5.1 of Yi et al. (2019), exactly: a path e_1 … e_L through hidden units u_1 … u_(L-1) has the value
    Π v(e_k) / Π v(π(u_k)), L factors over L − 1; a frozen edge counts with the value of the path through its unit.
    """
    column = {
        path[-1 - _edges_behind_last_free_edge(coordinates, path)]: i for i, path in enumerate(basis_paths(coordinates))
    }
    through = [(-1, -1), *zip(coordinates.first[0][1:].tolist(), coordinates.first[1][1:].tolist(), strict=True)]
    layers = coordinates.graph.layers
    exponents = torch.zeros(len(paths), coordinates.count, dtype=torch.int64)
    classes = {layer.weight: layer.edge_classes(coordinates.params[layer.weight].shape) for layer in layers}
    for row, path in enumerate(paths):
        for place, edge in enumerate(path):
            if edge[0] in classes:
                tail = int(classes[edge[0]][1][edge[1]])
                unit = column[layers[through[tail][0]].weight, through[tail][1]] if tail else -1
                exponents[row, column.get(edge, unit)] += 1
                if place > 0:
                    exponents[row, unit] -= 1
            else:
                exponents[row, column[edge]] += 1
    return exponents


def path_sum(coordinates: PathCoordinates, inputs: Tensor, paths: list[Path] | None = None) -> Tensor:
    """Outputs (n, K) as the sum over paths of value · activation · input: equation (2) of Yi et al. (2019).

    For chains of dense layers with ReLU between them; a path that begins at a bias has the input 1.
    """
    graph, params = coordinates.graph, coordinates.params
    if not graph.chain or any(layer.kind != "dense" for layer in graph.layers):
        raise NotApplicable("a chain of dense layers", "another network", where="path_sum")
    paths = all_paths(graph, params) if paths is None else paths
    active: dict[str, Tensor] = {}
    signal = inputs.double()
    for layer in graph.layers:
        signal = signal @ params[layer.weight].double().T
        signal = signal + sum(params[bias].double() for bias in layer.biases)
        active[layer.weight] = (signal > 0).double()
        active |= dict.fromkeys(layer.biases, active[layer.weight])
        signal = signal.clamp_min(0)
    outputs = torch.zeros(len(inputs), len(graph.layers[-1].outputs), dtype=torch.float64)
    values = path_values(paths, params)
    for path, value in zip(paths, values, strict=True):
        first, columns = path[0], {layer.weight: params[layer.weight].shape[1] for layer in graph.layers}
        start = inputs[:, first[1] % columns[first[0]]].double() if first[0] in columns else torch.ones(len(inputs))
        units = [entry // columns[name] if name in columns else entry for name, entry in path]
        status = math.prod((active[name][:, unit] for (name, _), unit in zip(path[:-1], units, strict=False)), start=1)
        outputs[:, units[-1]] += value * status * start
    return outputs


def _path_beyond_class(coordinates: PathCoordinates, number: int, backwards: bool = False) -> Path:
    """Edges of the suffix of a class, or of its prefix, in forward order."""
    way = coordinates.prefix if backwards else coordinates.suffix
    edges: list[Edge] = []
    while number > 0:
        weight = coordinates.graph.layers[int(way.layer[number])].weight
        edges.append((weight, int(way.entry[number])))
        number = int(way.other[number])
    return tuple(reversed(edges)) if backwards else tuple(edges)


def _edges_behind_last_free_edge(coordinates: PathCoordinates, path: Path) -> int:
    """Edges behind the last one of a basis path that is not frozen."""
    frozen = {block.name: set(block.frozen.tolist()) for block in coordinates.blocks}
    behind = 0
    while path[-1 - behind][1] in frozen[path[-1 - behind][0]]:
        behind += 1
    return behind


def non_basis_change(spread: PathSpread, epsilon: float, depth: int) -> float:
    """The bound (38) on the change of the value of a path outside the basis; holds for ε ≤ 0.2679 inf|v|.

    Its L counts hidden layers: a path is a product of L + 1 values divided by L.
    """
    if spread.log_inf == -math.inf:
        return math.inf
    log = max(
        a * math.log(epsilon) + (2 * depth + 1 - a) * spread.log_sup - 2 * depth * spread.log_inf
        for a in range(1, depth + 2)
    )
    return math.pow(2, depth / 2) * (3 * math.pow(2, depth) - 1) * (math.exp(log) if log < 709 else math.inf)
