"""The source text of the fused kernel for one chain of layers: where everything lies in memory, who computes what.

`fused.cu` holds the passes; here their sizes are chosen and written down as constants, and the order of the passes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flatscope.training.fused_chain import Chain, Convolution, Dense, Layer, NotFused

BANKS = 32
LARGEST_GROUP = 8
REGISTERS = 32  # sums that a thread of a convolution keeps
SCRATCH_WANTED = 10_240  # floats; more shares of a sum than fit there do not pay
ROOM = 1.25  # how much larger a buffer may become so that lanes read from different banks
LARGEST_MARK = 255  # of a maximum: a byte says where it was
POOLS = {"": 0, "max": 1, "average": 2}
MARK = "// GENERATED: struct Net, the passes over one group of samples"


@dataclass(frozen=True)
class KernelPlan:
    """A kernel for one chain."""

    source: str  # CUDA or, for a CPU, C++
    threads: int  # of a block
    lanes: int  # threads that run in step
    group: int  # samples that go through the network together
    shared: int  # floats of shared memory
    # For each entry of a packed network, its place among the parameters (in the order of `names`, each flattened, one
    # after the other); the number of all parameters where it is only filled up.
    places: Tensor
    names: tuple[str, ...]  # parameters in the order of the chain

    @property
    def warps(self) -> int:
        """Parts of a block that run in step."""
        return self.threads // self.lanes


def plan_kernel(chain: Chain, batch: int, *, threads: int = 512, lanes: int = 32, shared: int = 58_000) -> KernelPlan:
    """The kernel for a chain, batches of at most so many samples, and a `Machine` with these numbers.

    Raises:
        NotFused: not even one sample fits.
    """
    fitting = []
    for group in range(1, min(batch, LARGEST_GROUP) + 1):
        layout = _Layout(chain, group, threads, lanes)
        if layout.size <= shared:
            fitting.append(layout)
    if not fitting:
        raise NotFused("the activations of one sample and the convolutions' weights do not fit into shared memory")
    best = min(fitting, key=lambda layout: layout.cost)
    names = [name for layer in chain.layers for name in (layer.weight, layer.bias) if name is not None]
    text = Path(__file__).with_name("fused.cu").read_text(encoding="utf-8")
    assert MARK in text
    source = best.constants() + text.replace(MARK, best.passes())
    return KernelPlan(source, threads, lanes, best.group, best.size, best.places(), tuple(names))


class _Layout:
    """Sizes and places for a chain when groups have so many samples; all counted in floats of shared memory."""

    def __init__(self, chain: Chain, group: int, threads: int, lanes: int) -> None:
        self.chain, self.group, self.threads, self.lanes = chain, group, threads, lanes
        self.size, self.scratch, self.packed, self.cost = 4, 0, 0, 0.0
        self.layers = [
            self._convolution(number, layer) if isinstance(layer, Convolution) else self._dense(number, layer)
            for number, layer in enumerate(chain.layers)
        ]
        self.buffers = [self._buffer_constants(number) for number in range(len(chain.layers) + 1)]
        self.start_of_scratch = self._take_shared_floats(self.scratch)
        self.cost /= group

    # Who computes what ------------------------------------------------------------------------------------------------

    def _convolution(self, number: int, layer: Convolution) -> dict[str, int]:
        (c_in, height, width), (c_out, *out) = layer.inputs, layer.outputs
        (ky, kx), taps = layer.kernel, c_in * layer.kernel[0] * layer.kernel[1]
        pool = layer.window if layer.pool else (1, 1)
        tile = layer.window if layer.pool else tuple(min(2, size) for size in out)
        tiles = math.prod(-(-size // part) for size, part in zip(out, tile if not layer.pool else (1, 1), strict=True))
        block, split, cost = self._blocks(c_out, c_in, ky * kx, tile, tiles)
        self.cost += cost
        # A tile of inputs covers whole pooling windows.
        unit = [window * stride for window, stride in zip(pool, layer.stride, strict=True)]
        back = [one * max(1, 2 // one) for one in unit]
        across = math.prod(-(-size // part) for size, part in zip((height, width), back, strict=True))
        back_block, back_split, cost = self._blocks(c_in, c_out, ky * kx, back, across)
        self.cost += cost if number else 0.0
        c_out_pad, c_in_pad = -(-c_out // block) * block, -(-c_in // back_block) * back_block
        size = _rounded_up_to_four((taps + (layer.bias is not None)) * c_out_pad)
        pitch, plane, by_row = self._spacing(layer)
        reach = sum(
            (size - 1) * step for size, step in zip(pool, (layer.stride[0] * pitch, layer.stride[1]), strict=True)
        )
        if layer.pool == "max" and reach > LARGEST_MARK:
            raise NotFused("its images are too wide for its pooling")
        rounds = ky if by_row else c_in
        at_once = -(-rounds // -(-rounds // 6))
        most = max(1, min(8, 24 // at_once))
        channels = min(range(1, most + 1), key=lambda b: (-(-c_out // b) * b, -b))
        lanes_used = (c_in if by_row else ky) * kx
        tasks = -(-lanes_used // self.lanes) * -(-rounds // at_once) * -(-c_out // channels)
        warps = self.threads // self.lanes
        shares = max(1, min(warps // tasks, SCRATCH_WANTED // size))
        self.scratch = max(self.scratch, shares * size)
        values = {"CIN": c_in, "COUT": c_out, "KY": ky, "KX": kx, "TAPS": taps, "BIAS": int(layer.bias is not None)}
        values |= {"STRIDE_Y": layer.stride[0], "STRIDE_X": layer.stride[1], "POOL": POOLS[layer.pool]}
        values |= {"RECTIFIED_FIRST": int(layer.relu_first), "TILE_Y": tile[0], "TILE_X": tile[1]}
        values |= {"CB": block, "SPLIT": split, "COUT_PAD": c_out_pad, "SIZE": size}
        values |= {"BACK_Y": back[0], "BACK_X": back[1], "BACK_CB": back_block, "BACK_SPLIT": back_split}
        values |= {"CIN_PAD": c_in_pad, "BY_ROW": int(by_row), "ROUNDS_AT_ONCE": at_once, "WEIGHTS_CB": channels}
        values |= {"SHARES": shares, "SHARED": self._take_shared_floats(size), "SUMS": self._take_shared_floats(size)}
        values["TRANSPOSED"] = self._take_shared_floats(c_out * ky * kx * c_in_pad) if number else 0
        values |= {"PACKED": self._place_of_packed_weights(size), "PITCH": pitch, "PLANE": plane}
        return values

    def _blocks(
        self, made: int, summed: int, taps: int, tile: tuple[int, ...] | list[int], tiles: int
    ) -> tuple[int, int, float]:
        """Channels that a thread makes at once, lanes that share the sum, and what that costs."""
        entries = math.prod(tile)
        best = (math.inf, 1, 1)
        for block, split in itertools.product((8, 6, 5, 4, 3, 2, 1), (1, 2, 4)):
            if block * entries > max(REGISTERS, entries) or split > self.lanes or split > summed:
                continue
            items = self.group * tiles * -(-made // block) * split
            once = -(-summed // split) * (taps * entries * block + taps * -(-block // 4) * 2 + 4 * (taps + entries))
            once += entries * block * (split - 1) * 4
            best = min(best, (-(-items // self.threads) * once, block, split))
        return best[1], best[2], best[0]

    def _dense(self, number: int, layer: Dense) -> dict[str, int]:
        row, warps = _rounded_up_to_four(layer.inputs + (layer.bias is not None)), self.threads // self.lanes
        block = next(b for b in (1, 2, 4, 8) if b == 8 or b * warps >= layer.outputs)
        shares = max(1, min(self.threads // (row // 4), layer.outputs, 16))
        if number:
            self.scratch = max(self.scratch, shares * self.group * row)
        self.cost += layer.outputs * row * (3 + 2 * self.group / 128)
        values = {"IN": layer.inputs, "OUT": layer.outputs, "ROW": row, "CB": block, "SHARES": shares}
        return values | {"IS_FIRST": int(number == 0), "PACKED": self._place_of_packed_weights(layer.outputs * row)}

    # Where everything lies --------------------------------------------------------------------------------------------

    def _buffer_constants(self, number: int) -> dict[str, int]:
        """The values that enter layer `number`, their derivatives, and the marks of the pooling before."""
        layers = self.chain.layers
        following = layers[number] if number < len(layers) else None
        before = layers[number - 1] if number else None
        channels, height, width = self._shape_of_layer_input(number)
        pad = following.padding if isinstance(following, Convolution) else (0, 0)
        pitch, plane = width, height * width
        if isinstance(following, Convolution):
            pitch, plane = self.layers[number]["PITCH"], self.layers[number]["PLANE"]
        row = self.layers[number]["ROW"] if isinstance(following, Dense) else 0
        sample = _rounded_up_to_four(max(channels * plane, row))
        values = {"CHANNELS": channels, "HEIGHT": height, "WIDTH": width, "PITCH": pitch, "PLANE": plane}
        values |= {
            "PAD_Y": pad[0],
            "PAD_X": pad[1],
            "SAMPLE": sample,
            "START": self._take_shared_floats(self.group * sample),
        }
        values["RECTIFIED"] = int(before is not None and before.relu)
        cells = 1 if isinstance(before, Dense) else _rounded_up_to_four(height * width)
        flat = isinstance(before, Dense)
        values["SLOPE_CHANNEL"] = _rounded_up_to_four(self.group) if flat else cells
        values["SLOPE_SAMPLE"] = 1 if flat else channels * cells
        slopes = channels * _rounded_up_to_four(self.group) if flat else self.group * channels * cells
        values["SLOPE"] = self._take_shared_floats(slopes) if number else 0
        pooled = isinstance(before, Convolution) and bool(before.pool)
        values["MARKS_SAMPLE"] = channels * cells
        values["MARKS"] = self._take_shared_floats(self.group * channels * cells // 4) if pooled else 0
        return values

    def _shape_of_layer_input(self, number: int) -> tuple[int, int, int]:
        layers = self.chain.layers
        shape: tuple[int, ...]
        if number == 0:
            shape = self.chain.shape
        else:
            outputs = layers[number - 1].outputs
            shape = (outputs,) if isinstance(outputs, int) else outputs
        return (shape[0], shape[1], shape[2]) if len(shape) == 3 else (math.prod(shape), 1, 1)

    def _spacing(self, layer: Convolution) -> tuple[int, int, bool]:
        """Floats from row to row and from channel to channel, so that lanes that read together use different banks.

        Also whether the lanes of the sum for the weights are (channel, column), else (row, column).
        """
        (c_in, height, width), (c_out, *out) = layer.inputs, layer.outputs
        (ky, kx), window = layer.kernel, layer.window if layer.pool else (2, 2)
        tall, wide = height + 2 * layer.padding[0], width + 2 * layer.padding[1]
        rows, columns = ((n - 1) * s + k for n, s, k in zip(window, layer.stride, layer.kernel, strict=True))
        forward = self.group * math.prod(out) / BANKS * c_in * rows * columns * max(1, c_out / 6)
        best = (math.inf, 0, 0, False)
        for pitch, more, by_row in itertools.product(range(wide, wide + 9), range(BANKS), (False, True)):
            plane = tall * pitch + more
            if plane > max(ROOM * tall * wide, tall * wide + 2):
                continue
            offsets = [a * (plane if by_row else pitch) + b for a in range(c_in if by_row else ky) for b in range(kx)]
            turns = sum(_shared_memory_bank_conflicts(offsets[i : i + BANKS]) for i in range(0, len(offsets), BANKS))
            cost = self.group * math.prod(out) * c_out * turns * (ky if by_row else c_in)
            paired = pitch % 2 == plane % 2 == columns % 2 == 0
            best = min(best, (cost + forward * (1 if paired else 2) + plane / 1e3, pitch, plane, by_row))
        self.cost += best[0] * 4
        return best[1], best[2], best[3]

    def _take_shared_floats(self, floats: int) -> int:
        place = self.size
        self.size += _rounded_up_to_four(floats)
        return place

    def _place_of_packed_weights(self, floats: int) -> int:
        place = self.packed
        self.packed += _rounded_up_to_four(floats)
        return place

    # What comes out ---------------------------------------------------------------------------------------------------

    def constants(self) -> str:
        """Text of the constants in front of `fused.cu`."""
        small = min(4, self.group)
        numbers = {"THREADS": self.threads, "LANES": self.lanes, "GROUP": self.group, "SMALL_GROUP": small}
        numbers |= {"CLASSES": self.chain.classes, "WEIGHTS": self.packed, "SHARED_FLOATS": self.size}
        numbers["SCRATCH"] = self.start_of_scratch
        lines = [f"constexpr int {name} = {value};" for name, value in numbers.items()]
        for letter, parts in (("L", self.layers), ("A", self.buffers)):
            for number, part in enumerate(parts):
                inner = ", ".join(f"{name} = {value}" for name, value in part.items())
                lines.append(f"struct {letter}{number} {{ static constexpr int {inner}; }};")
        return "\n".join(lines) + "\n"

    def passes(self) -> str:
        """The passes over one group of samples."""
        layers = list(enumerate(self.chain.layers))
        convolutions = [number for number, layer in layers if isinstance(layer, Convolution)]
        ones = [
            f"memory[A{n}::START + s * A{n}::SAMPLE + {layer.inputs}] = 1.f;"
            for n, layer in layers
            if isinstance(layer, Dense) and layer.bias is not None
        ]
        forward = [line for number, layer in layers for line in self._forward_pass_source(number, layer)]
        backward = [line for number, layer in reversed(layers) for line in self._backward_pass_source(number, layer)]
        arguments = "const Thread& t, const Settings& by, float* weights, float* velocity, float* gradients, int n"
        parts = {
            "set_ones(const Thread& t)": [f"for (int s = t.id; s < GROUP; s += THREADS) {{ {' '.join(ones)} }}"],
            "fetch(const Thread& t, const float* weights)": [f"conv_fetch<L{n}>(t, weights);" for n in convolutions],
            "put_back(const Thread& t, float* weights)": [f"conv_return<L{n}>(t, weights);" for n in convolutions],
            "forward(const Thread& t, const float* images, const int* order, const float* weights, int n)": [
                "load_images<A0>(t, images, order, n);",
                "barrier();",
                *forward,
            ],
            f"backward({arguments}, bool first, bool last)": backward,
        }
        body = "\n".join(
            f"  DEVICE void {head} {{\n" + "\n".join(f"    {line}" for line in lines) + "\n  }"
            for head, lines in parts.items()
        )
        return f"struct Net {{\n  typedef A{len(layers)} Outputs;\n{body}\n}};"

    @staticmethod
    def _forward_pass_source(number: int, layer: Layer) -> Iterator[str]:
        types = f"L{number}, A{number}, A{number + 1}"
        if isinstance(layer, Convolution):
            yield f"conv_forward<{types}>(t, n);"
        else:
            yield f"if (n <= SMALL_GROUP) dense_forward<{types}, SMALL_GROUP>(t, weights);"
            yield f"else dense_forward<{types}, GROUP>(t, weights);"
        yield "barrier();"

    @staticmethod
    def _backward_pass_source(number: int, layer: Layer) -> Iterator[str]:
        types = f"L{number}, A{number}, A{number + 1}"
        if isinstance(layer, Convolution):
            yield f"conv_weights<{types}>(t, n);"
            if number:
                yield f"conv_backward<{types}>(t, n);"
            yield "barrier();"
            yield f"conv_step<L{number}>(t, by, velocity, first, last);"
        else:
            arguments = "(t, by, weights, velocity, gradients, first, last)"
            yield f"if (n <= SMALL_GROUP) dense_backward<{types}, SMALL_GROUP>{arguments};"
            yield f"else dense_backward<{types}, GROUP>{arguments};"
        yield "barrier();"

    def places(self) -> Tensor:
        """See `KernelPlan`."""
        sizes = [
            (math.prod(self._weight_shape(layer)), 0 if layer.bias is None else self._weight_shape(layer)[0])
            for layer in self.chain.layers
        ]
        places = torch.full((self.packed,), sum(map(sum, sizes)))
        start = 0
        for layer, values, (count, biases) in zip(self.chain.layers, self.layers, sizes, strict=True):
            index = start + torch.arange(count).reshape(self._weight_shape(layer))
            bias = start + count + torch.arange(biases)
            block: Tensor
            if isinstance(layer, Convolution):
                index = index.permute(1, 2, 3, 0).flatten(0, 2)  # (taps, channels)
                rows = torch.cat([index, bias[None]]) if biases else index
                block = places[values["PACKED"] :][: len(rows) * values["COUT_PAD"]].view(len(rows), -1)
            else:
                rows = torch.cat([index, bias[:, None]], 1) if biases else index
                block = places[values["PACKED"] :][: len(rows) * values["ROW"]].view(len(rows), -1)
            block[:, : rows.shape[1]] = rows
            start += count + biases
        return places

    @staticmethod
    def _weight_shape(layer: Layer) -> tuple[int, ...]:
        if isinstance(layer, Dense):
            return layer.outputs, layer.inputs
        return layer.outputs[0], layer.inputs[0], *layer.kernel


def _rounded_up_to_four(floats: int) -> int:
    return -(-floats // 4) * 4


def _shared_memory_bank_conflicts(offsets: list[int]) -> int:
    """Number of requests to the fullest memory bank at once."""
    banks = [offset % BANKS for offset in offsets]
    return max(banks.count(bank) for bank in set(banks))
