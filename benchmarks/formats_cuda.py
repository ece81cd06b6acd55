"""The Triton runner over weights in other formats: GPU time of one layer in a graph with a cold L2, beside bf16 weights and the floor.

Every cell is checked against float32 before it is timed. The floor is the larger of the weights of the experts hit, as they are held, at the
bandwidth of a large copy, and of the arithmetic, at the rate of a large product (rows in fp8 or int8: twice that of bf16). Kernels are compiled
first, by several processes, into Triton's cache.

    python -m benchmarks.formats_cuda [--results FOLDER] [--shapes NAMES] [--tokens NUMBERS] [--formats NAMES] [--processes NUMBER]
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing import get_context
from typing import Final, NamedTuple, TypeAlias, cast

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks import _measure as measure
from benchmarks.fused_moe_cuda import SHAPES, Shape, make_layer, make_routing
from moe_typed import Bf16Rows, GateUp, LocalIds, Payload, Routing, SiluAndMul
from moe_typed.formats import (
    CompressedInt4ExpertWeights,
    Fp8ChannelExpertWeights,
    Fp8TensorExpertWeights,
    Int8ChannelExpertWeights,
    MxFp4ExpertWeights,
    MxFp8ExpertWeights,
    quantizers,
)
from moe_typed.ops.quantised_product.reference import matrix_values
from moe_typed.ops.quantised_product.spec import Matrix
from moe_typed.runners.triton import AnyTritonWeights, TritonCheckpoint, prepare_triton
from moe_typed.runners.triton.general import TritonGeneralRunner
from moe_typed.runners.triton.runner import TritonRunner
from moe_typed.stages import FlatRowsInput

TOKENS: Final = (1, 8, 64, 512, 4096)
_SHAPES: Final = ("qwen3-30b-a3b", "mixtral-8x7b")
_BANDWIDTH, _BF16_RATE = 4.3e6, 790e6  # bytes and operations in a microsecond: ceilings measured on an H200
_CHECKED: Final = 8  # tokens
_GROUP: Final = 128  # of int4

_Payloads: TypeAlias = Callable[[Tensor], Payload]


class Row(NamedTuple):
    """What was measured of one layer at one number of tokens; ``bf16_us``: of the same layer with bf16 weights."""

    shape: str
    weights: str
    rows: str
    tokens: int
    routes: int
    experts_hit: int
    error: float
    graph_us: float
    p10_us: float
    p90_us: float
    floor_us: float
    bf16_us: float


def _bytes(*shape: int, low: int = 0, high: int = 256) -> Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8, device="cuda")


def _normal(experts: int, rows: int, columns: int) -> Tensor:
    out = torch.empty(experts, rows, columns, dtype=torch.float8_e4m3fn, device="cuda")
    for expert in range(experts):
        out[expert] = torch.randn(rows, columns, device="cuda").to(torch.float8_e4m3fn)
    return out


def _scales(depth: int, *shape: int) -> Tensor:
    return (torch.rand(shape, device="cuda") + 0.5) / math.sqrt(depth)


def make_weights(shape: Shape, fmt: str) -> TritonCheckpoint:
    """Return random weights whose values are about 1 / sqrt(depth)."""
    experts, _, _, hidden, inter = shape
    first, second = (experts, 2 * inter, hidden), (experts, hidden, inter)

    def e8m0(*sizes: int) -> Tensor:
        return _bytes(*sizes, low=120, high=123).view(torch.float8_e8m0fnu)

    match fmt:
        case "fp8-tensor":
            return Fp8TensorExpertWeights(_normal(*first), _normal(*second), _scales(hidden, experts, 2), _scales(inter, experts), GateUp)
        case "fp8-channel":
            scales = _scales(hidden, *first[:2]), _scales(inter, *second[:2])
            return Fp8ChannelExpertWeights(_normal(*first), _normal(*second), *scales, GateUp)
        case "int8-channel":
            scales = _scales(hidden, *first[:2]) / 73, _scales(inter, *second[:2]) / 73
            return Int8ChannelExpertWeights(_bytes(*first).view(torch.int8), _bytes(*second).view(torch.int8), *scales, GateUp)
        case "mxfp8":
            scales = e8m0(*first[:2], hidden // 32), e8m0(*second[:2], inter // 32)
            return MxFp8ExpertWeights(_normal(*first), _normal(*second), *scales, GateUp)
        case "mxfp4":
            w13, w2 = (_bytes(experts, rows, depth // 2).view(torch.float4_e2m1fn_x2) for _, rows, depth in (first, second))
            return MxFp4ExpertWeights(w13, w2, e8m0(*first[:2], hidden // 32), e8m0(*second[:2], inter // 32), GateUp)
        case "int4":
            w13, w2 = (_bytes(experts, rows, depth // 2).view(torch.int32) for _, rows, depth in (first, second))
            s13, s2 = (_scales(depth, experts, rows, depth // _GROUP).bfloat16() / 4 for _, rows, depth in (first, second))
            return CompressedInt4ExpertWeights(w13, w2, s13, s2, GateUp, _GROUP)
        case _:
            raise ValueError(f"no weights are called {fmt!r}")


_ROWS: Final[dict[str, _Payloads]] = {
    "bf16": Bf16Rows,
    "fp8-token": lambda data: quantizers.fp8_token.run(Bf16Rows(data)),
    "int8-token": lambda data: quantizers.int8_token.run(Bf16Rows(data)),
    "mxfp8": lambda data: quantizers.mxfp8.run(Bf16Rows(data)),
}
FORMATS: Final = (
    ("fp8-tensor", "fp8-token"),
    ("fp8-channel", "fp8-token"),
    ("fp8-channel", "bf16"),
    ("int8-channel", "int8-token"),
    ("int8-channel", "bf16"),
    ("mxfp8", "mxfp8"),
    ("mxfp8", "bf16"),
    ("mxfp4", "mxfp8"),
    ("mxfp4", "bf16"),
    ("int4", "bf16"),
)


def _prepare(weights: TritonCheckpoint) -> TritonGeneralRunner:
    # Over a union of formats no overload is the one.
    made = cast("Callable[[TritonCheckpoint], AnyTritonWeights]", prepare_triton)(weights).runner(SiluAndMul())
    if not isinstance(made, TritonGeneralRunner):
        raise TypeError(f"the general runner is what is timed here; these weights made {type(made).__qualname__}")
    return made


def _values(matrix: Matrix, expert: int) -> Tensor:
    one = Matrix(*(None if part is None else part[expert : expert + 1] for part in matrix[:3]))  # type: ignore[arg-type]
    return matrix_values(one)[0]


def reference(runner: TritonGeneralRunner, payload: Payload, routing: Routing[LocalIds], tokens: Tensor) -> Tensor:
    """Return some rows of the layer in float32."""
    rows = payload.dequantize()[tokens]
    out = torch.zeros_like(rows)
    for place, token in enumerate(int(one) for one in tokens):
        for expert, weight in zip(routing.topk_ids[token], routing.topk_weights[token], strict=True):
            if int(expert) >= 0:
                gate, up = (_values(runner.up, int(expert)) @ rows[place]).chunk(2)
                out[place] += weight * (_values(runner.down, int(expert)) @ (torch.nn.functional.silu(gate) * up))
    return out


def _norm(rows: Tensor) -> float:
    return float(rows.square().sum().sqrt())


def _size(runner: TritonGeneralRunner) -> float:
    """Return the bytes of an expert, scales and zeros with it."""
    parts = [part for matrix in (runner.up, runner.down) for part in matrix[:3] if part is not None]
    return sum(part[0].numel() * part.element_size() for part in parts)


def cell(name: str, fmt: str, rows_fmt: str, runner: TritonGeneralRunner, bf16: TritonRunner, tokens: int) -> Row:
    shape = SHAPES[name]
    data = torch.randn(tokens, shape.hidden, device="cuda", dtype=torch.bfloat16)
    payload, routing = _ROWS[rows_fmt](data), make_routing(shape, tokens, "uniform")
    runner_input = FlatRowsInput(payload, routing)
    some = torch.randperm(tokens, device="cuda")[:_CHECKED]
    wanted = reference(runner, payload, routing, some)
    error = _norm(runner.run(runner_input).hidden_states[some].float() - wanted) / max(_norm(wanted), 1e-30)
    if not error < (0.02 if rows_fmt == "bf16" else 0.06):
        raise RuntimeError(f"{name}, {fmt} by {rows_fmt} at {tokens} tokens is wrong: relative error {error}")
    replays = 8 if tokens > 512 else 20
    timing = measure.in_graph([partial(runner.run, runner_input)], replays)
    bf16_us = measure.in_graph([partial(bf16.run, FlatRowsInput(Bf16Rows(data), routing))], replays).median
    kept = routing.topk_ids[routing.topk_ids >= 0]
    hit = int((torch.bincount(kept.flatten()) > 0).sum())
    rate = 2 * _BF16_RATE if rows_fmt in ("fp8-token", "int8-token") else _BF16_RATE
    floor = max(hit * _size(runner) / _BANDWIDTH, 6 * kept.numel() * shape.hidden * shape.inter / rate)
    return Row(name, fmt, rows_fmt, tokens, kept.numel(), hit, error, *timing, floor, bf16_us)


def cells(shapes: Sequence[str], tokens: Sequence[int], formats: Sequence[str]) -> Iterator[Row]:
    for name in shapes:
        bf16 = make_layer(SHAPES[name], "bf16").runner
        for fmt in dict.fromkeys(fmt for fmt, _ in FORMATS if fmt in formats):
            runner = _prepare(make_weights(SHAPES[name], fmt))
            for rows_fmt in (rows for known, rows in FORMATS if known == fmt):
                for count in tokens:
                    yield cell(name, fmt, rows_fmt, runner, bf16, count)
            del runner
        del bf16
        torch.cuda.empty_cache()


def compile_kernels(task: tuple[str, str, str, Sequence[int]]) -> None:
    """Run a layer once for each number of tokens, so that its kernels stand in Triton's cache."""
    name, fmt, rows_fmt, tokens = task
    runner = _prepare(make_weights(SHAPES[name], fmt))
    for count in tokens:
        data = torch.randn(count, SHAPES[name].hidden, device="cuda", dtype=torch.bfloat16)
        runner.run(FlatRowsInput(_ROWS[rows_fmt](data), make_routing(SHAPES[name], count, "uniform")))
    torch.cuda.synchronize()


def show(rows: Sequence[Row]) -> Table:
    table = Table("shape", "weights", "rows", "tokens", "hit", "us", "x floor", "bf16 us", "x bf16", "error", title="One layer")
    for row in rows:
        ratios = f"{row.graph_us / row.floor_us:.2f}", f"{row.bf16_us:.1f}", f"{row.graph_us / row.bf16_us:.2f}"
        table.add_row(
            row.shape, row.weights, row.rows, str(row.tokens), str(row.experts_hit), f"{row.graph_us:.1f}", *ratios, f"{row.error:.1e}"
        )  # fmt: skip
    return table


def main() -> None:
    parser = measure.arguments_of(__doc__)
    parser.add_argument("--shapes", default=",".join(_SHAPES), help="names, by commas")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="numbers, by commas")
    parser.add_argument("--formats", default=",".join(dict.fromkeys(fmt for fmt, _ in FORMATS)), help="of weights: names, by commas")
    parser.add_argument("--processes", type=int, default=8, help="that compile, each with a layer of its own on the GPU")
    arguments = parser.parse_args()

    torch.random.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
    tokens = [int(one) for one in cast("str", arguments.tokens).split(",")]
    shapes, formats = cast("str", arguments.shapes).split(","), cast("str", arguments.formats).split(",")
    tasks = [(name, fmt, rows_fmt, tokens) for name in shapes for fmt, rows_fmt in FORMATS if fmt in formats]
    with get_context("spawn").Pool(cast("int", arguments.processes)) as pool:
        pool.map(compile_kernels, tasks, chunksize=1)
    results: list[Row] = []
    for row in cells(shapes, tokens, formats):
        results.append(row)
        measure.save(arguments.results, "formats", [one._asdict() for one in results])
    Console(width=150).print(show(results), measure.environment())


if __name__ == "__main__":
    main()
