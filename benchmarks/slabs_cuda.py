"""Rows in slabs through the Triton runner, where they lie, against routes made for each place of the slab: GPU time in a graph with a cold L2.

What a low-latency library delivers, to what its combine takes: both ways are rows of the transition table. The layer is an EP rank of DeepSeek-V3 (32
of 256 experts, top-8); stale rows hold NaN, and some live rows are checked against float32. The floor is the weights of the experts hit, at the
bandwidth of a large copy.

    python -m benchmarks.slabs_cuda [--results FOLDER]
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple, cast

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks import _measure as measure
from benchmarks.fused_moe_cuda import SHAPES, Layer, make_layer
from benchmarks.fused_moe_cuda import reference as float32_rows
from moe_typed import Bf16Rows, LocalIds, Payload, PhysicalIds, Routing, Settled, quantize_fp8_block128
from moe_typed.stages import DeepEPLLDispatchOutput, DeepEPLLHandle, FlatRowsInput, ReceivedPerExpert, RunnerInput, SlabCombineInput, SlabRowsInput
from moe_typed.table import TRANSITIONS, AnyRunner, Row

SIZES: Final = ((128, 64), (128, 512), (1024, 64), (1024, 512), (1024, 4096))
"""Capacity, and live rows in all."""
_WAYS: Final[Mapping[str, type[RunnerInput]]] = {"in place": SlabRowsInput, "by routes": FlatRowsInput}
_BANDWIDTH: Final = 4.3e6  # bytes in a microsecond: a large copy on an H200
_CHECKED: Final = 16  # rows
_SHAPE: Final = SHAPES["dsv3-ep8"]


class Timed(NamedTuple):
    """What was measured of one slab by one way."""

    format: str
    capacity: int
    live: int
    how: str
    error: float
    graph_us: float
    floor_us: float


class Slab(NamedTuple):
    """A dispatch output, and the experts of its rows."""

    dispatched: DeepEPLLDispatchOutput[Payload]
    experts: Tensor
    live: int


def make_slab(fmt: str, capacity: int, live: int, owner: object) -> Slab:
    """Return a slab of so many live rows in all, over experts drawn evenly; what is stale holds NaN."""
    generator = torch.Generator("cuda").manual_seed(live)
    drawn = torch.randint(_SHAPE.experts, (live,), device="cuda", generator=generator)
    received = ReceivedPerExpert(torch.bincount(drawn, minlength=_SHAPE.experts).clamp(max=capacity).to(torch.int32))
    experts = received.experts_of_slab(capacity)
    data = torch.full((experts.shape[0], _SHAPE.hidden), float("nan"), dtype=torch.bfloat16, device="cuda")
    data[experts >= 0] = torch.randn(int((experts >= 0).sum()), _SHAPE.hidden, device="cuda", dtype=torch.bfloat16)
    payload: Payload = Bf16Rows(data) if fmt == "bf16" else quantize_fp8_block128.run(Bf16Rows(data))
    # Each rank sends live / 8 rows or so to these experts: this rank's own routing tells top-k alone.
    ids = torch.zeros((1, _SHAPE.top_k), dtype=torch.int32, device="cuda")
    origin = Routing(ids, torch.ones(ids.shape, device="cuda"), PhysicalIds, _SHAPE.routed, Settled(), False, 1)
    expected = -(-live // _SHAPE.experts)
    return Slab(DeepEPLLDispatchOutput(payload, received, capacity, expected, origin, DeepEPLLHandle(None, owner)), experts, live)


def check(layer: Layer, slab: Slab, found: Tensor) -> float:
    """Return the relative error of some live rows."""
    rows = (slab.experts >= 0).nonzero().flatten()
    some = rows[torch.randperm(rows.shape[0], device="cuda")[:_CHECKED]]
    ids = slab.experts.unsqueeze(1)
    routing = Routing(ids, torch.ones(ids.shape, device="cuda"), LocalIds, _SHAPE.experts, Settled(), False, ids.shape[0])
    wanted = float32_rows(layer, slab.dispatched.payload, routing, some)
    return norm(found[some].float() - wanted) / norm(wanted)


def norm(rows: Tensor) -> float:
    return float(rows.square().sum().sqrt())


def bound(runner: AnyRunner, how: str) -> Callable[[DeepEPLLDispatchOutput[Payload]], SlabCombineInput]:
    """Return the experts' part of a layer by one row of the table."""
    row = TRANSITIONS[DeepEPLLDispatchOutput, _WAYS[how]]
    if not isinstance(row, Row):
        raise TypeError(f"there is no row: {row.detail}")
    return cast("Callable[[DeepEPLLDispatchOutput[Payload]], SlabCombineInput]", row.bind(runner))


def cells() -> Iterator[Timed]:
    owner = object()
    for fmt in ("bf16", "fp8"):
        layer = make_layer(_SHAPE, fmt)
        runner = layer.runner
        for capacity, live in SIZES:
            slab = make_slab(fmt, capacity, live, owner)
            hit = int((slab.dispatched.received.counts > 0).sum())
            floor = hit * 3 * _SHAPE.hidden * _SHAPE.inter * (1 if fmt == "fp8" else 2) / _BANDWIDTH
            for how in _WAYS:
                run = partial(bound(runner, how), slab.dispatched)
                error = check(layer, slab, run().hidden_states.flatten(0, 1))
                if not error < (0.05 if fmt == "fp8" else 0.01):
                    raise RuntimeError(f"{fmt}, capacity {capacity}, {live} rows, {how}: wrong by {error}")
                yield Timed(fmt, capacity, live, how, error, measure.in_graph([run], 12).median, floor)
            slab.dispatched.handle.discard("it was timed")
            del slab
        del layer, runner
        torch.cuda.empty_cache()


def show(rows: Sequence[Timed]) -> Table:
    table = Table("format", "capacity", "live", "how", "us", "x floor", "error", title="Rows in slabs, an EP rank of DeepSeek-V3")
    for row in rows:
        figures = f"{row.graph_us:.1f}", f"{row.graph_us / row.floor_us:.2f}", f"{row.error:.1e}"
        table.add_row(row.format, str(row.capacity), str(row.live), row.how, *figures)
    return table


def main() -> None:
    parser = measure.arguments_of(__doc__)
    arguments = parser.parse_args()
    torch.random.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
    results: list[Timed] = []
    for row in cells():
        results.append(row)
        measure.save(arguments.results, "slabs", [one._asdict() for one in results])
    Console(width=150).print(show(results), measure.environment())


if __name__ == "__main__":
    main()
