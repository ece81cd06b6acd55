"""Routing kernels against the eager torch code that they replace: GPU time in a graph, time in a loop from Python, and the floor.

Every cell is checked against the reference before it is timed. Logits are normal, float32; ids are those of a uniform router.

    python -m benchmarks.routing_cuda [--results FOLDER] [--compiled]
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple, cast

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks import _measure as measure
from moe_typed.ops.padded_rows import reference as padded_reference
from moe_typed.ops.padded_rows.triton import fill_padded_rows, fill_padded_rows_
from moe_typed.ops.shared_slots import reference as shared_reference
from moe_typed.ops.shared_slots.triton import append_shared_interleaved
from moe_typed.ops.topk_gate import reference as gate_reference
from moe_typed.ops.topk_gate.spec import GateRule
from moe_typed.ops.topk_gate.triton import topk_gate

ROWS: Final = (1, 64, 512, 4096, 16384)
EXPERTS: Final = (128, 256)
K, EP_SIZE, EP_RANK, NUM_SHARED, ROUTED_SCALING = 8, 8, 3, 1, 2.5  # DeepSeek-V3 on eight ranks
_INDEX_PUT: Final = "eager, index_put_"  # waits for the device, so that no graph can hold it
_INPUTS: Final = 16  # sets of inputs, and calls in a graph

RULES: Final = {
    "softmax, renormalised": GateRule(K, "softmax", renormalize=True),
    "softmax": GateRule(K, "softmax"),
    "softmax of the chosen (gpt-oss)": GateRule(4, "selected_softmax"),
    "sigmoid of the chosen (Llama 4)": GateRule(1, "sigmoid"),
    "sigmoid + bias, 4 of 8 groups (DeepSeek-V3)": GateRule(K, "sigmoid", True, ROUTED_SCALING, 8, 4, "top2_sum"),
    "sqrt(softplus) + bias": GateRule(6, "sqrt_softplus", True, ROUTED_SCALING),
}

Pair = tuple[Tensor, Tensor]


class Cell(NamedTuple):
    """One thing that is computed, and the ways to compute it: the first is ours, and the ratio is the second's time to it."""

    name: str
    rows: int
    moved: int
    calls: Mapping[str, Sequence[measure.Call]]
    expected: Pair


class Row(NamedTuple):
    """What was measured of one way to compute a cell."""

    cell: str
    rows: int
    implementation: str
    graph_us: float
    p10_us: float
    p90_us: float
    python_us: float
    floor_us: float


# ---- the eager code -----------------------------------------------------------------------------------------------------------------


def eager_gate(logits: Tensor, rule: GateRule, bias: Tensor | None) -> Pair:
    """Choose with torch.topk, as engines' fallbacks do."""
    if rule.score == "selected_softmax" or rule.top_k == 1:
        values, ids = logits.topk(rule.top_k)
        return ids.to(torch.int32), torch.softmax(values, 1) if rule.score == "selected_softmax" else torch.sigmoid(values)
    if rule.score == "softmax":
        weights, ids = torch.softmax(logits, 1).topk(rule.top_k)
    else:
        scores = torch.sigmoid(logits) if rule.score == "sigmoid" else torch.nn.functional.softplus(logits).sqrt()
        biased = scores if bias is None else scores + bias
        if rule.num_groups > 1:
            groups = biased.view(len(logits), rule.num_groups, -1).topk(2).values.sum(2).topk(rule.topk_group).indices
            stays = torch.zeros(len(logits), rule.num_groups, dtype=torch.bool, device=logits.device).scatter_(1, groups, True)
            biased = biased.masked_fill(~stays.repeat_interleave(logits.shape[1] // rule.num_groups, 1), float("-inf"))
        ids = biased.topk(rule.top_k).indices
        weights = scores.gather(1, ids)
    if rule.renormalize:
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    return ids.to(torch.int32), weights * rule.factor


def eager_append(ids: Tensor, weights: Tensor, num_local_routed: int, scale: float) -> Pair:
    """Append, then remap, in six small kernels and two concatenations."""
    moved = ids + torch.div(ids, num_local_routed, rounding_mode="floor").to(torch.int32) * NUM_SHARED
    first = shared_reference.first_local_shared_id(num_local_routed, NUM_SHARED, EP_RANK)
    shared = torch.arange(first, first + NUM_SHARED, dtype=torch.int32, device=ids.device).expand(ids.shape[0], -1)
    shared_weights = torch.full((ids.shape[0], NUM_SHARED), scale, device=ids.device)
    return torch.cat((moved, shared), 1), torch.cat((weights, shared_weights), 1)


def eager_masked_fill(ids: Tensor, weights: Tensor, count: Tensor) -> Pair:
    """Fill by a mask of rows."""
    is_padding = torch.arange(ids.shape[0], device=ids.device).unsqueeze(1) >= count
    return ids.masked_fill_(is_padding, -1), weights.masked_fill_(is_padding, 0.0)


def eager_index_put(ids: Tensor, weights: Tensor, count: Tensor) -> Pair:
    """Fill by boolean indices."""
    is_padding = torch.arange(ids.shape[0], device=ids.device) >= count
    ids[is_padding] = -1
    weights[is_padding] = 0.0
    return ids, weights


def filled(ids: Tensor, weights: Tensor, count: Tensor) -> Pair:
    """Fill in place with the kernel, and return what was filled."""
    fill_padded_rows_(ids, weights, count)
    return ids, weights


# ---- the cells ----------------------------------------------------------------------------------------------------------------------


def _bound(function: Callable[..., Pair], inputs: Sequence[tuple[object, ...]]) -> list[measure.Call]:
    return [partial(function, *arguments) for arguments in inputs]


def gate_cells(rows: int, *, compiled: bool) -> Iterator[Cell]:
    for experts in EXPERTS:
        for name, rule in RULES.items():
            bias = torch.randn(experts, device="cuda") if "bias" in name else None
            inputs = [(torch.randn(rows, experts, device="cuda"), rule, bias) for _ in range(_INPUTS)]
            calls = {"moe_typed": _bound(topk_gate, inputs), "eager": _bound(eager_gate, inputs)}
            if compiled and experts == EXPERTS[-1]:
                torch.compiler.reset()  # or it gives up on a function that it has compiled for eight rules
                calls["compiled"] = _bound(torch.compile(eager_gate, dynamic=False), inputs)  # pyright: ignore[reportUnknownMemberType]
            moved = rows * (experts * 4 + rule.top_k * 8)
            yield Cell(f"top-k of {experts}: {name}", rows, moved, calls, gate_reference.topk_gate(*inputs[0]))


def _routing(rows: int) -> Pair:
    ids = torch.rand(rows, 256, device="cuda").argsort(1)[:, :K].to(torch.int32)
    return ids, torch.rand(rows, K, device="cuda")


def append_cells(rows: int) -> Iterator[Cell]:
    local, scale = 256 // EP_SIZE, 1 / ROUTED_SCALING
    inputs = [_routing(rows) for _ in range(_INPUTS)]
    calls = {
        "moe_typed": _bound(append_shared_interleaved, [(*pair, NUM_SHARED, local, EP_RANK, scale) for pair in inputs]),
        "eager": _bound(eager_append, [(*pair, local, scale) for pair in inputs]),
    }
    expected = shared_reference.append_shared_interleaved(*inputs[0], NUM_SHARED, local, EP_RANK, scale)
    yield Cell("append and remap", rows, rows * (2 * K + NUM_SHARED) * 8, calls, expected)


def fill_cells(rows: int) -> Iterator[Cell]:
    live = rows - (rows + 3) // 4  # the last quarter is padding
    count = torch.tensor([live], device="cuda")
    routings = [_routing(rows) for _ in range(_INPUTS)]
    expected = padded_reference.fill_padded_rows(*routings[0], count)

    def calls(function: Callable[..., Pair]) -> list[measure.Call]:
        # Rows of its own that nothing has filled yet, or the check would see nothing. Filling them again and again costs the same.
        return _bound(function, [(ids.clone(), weights.clone(), count) for ids, weights in routings])

    in_place = {"moe_typed": calls(filled), "eager, masked_fill_": calls(eager_masked_fill), _INDEX_PUT: calls(eager_index_put)}
    yield Cell("fill padded rows in place", rows, (rows - live) * K * 8, in_place, expected)
    yield Cell("fill padded rows", rows, (rows + live) * K * 8, {"moe_typed": calls(fill_padded_rows)}, expected)


# ---- measuring them -----------------------------------------------------------------------------------------------------------------


def check(cell: Cell, implementation: str, result: Pair) -> None:
    """Raise RuntimeError where the result is wrong. Rounding may swap neighbours in one row of 200."""
    same = (result[0] == cell.expected[0]).all(1)
    if int((~same).sum()) > cell.rows // 200 or not torch.allclose(result[1][same], cell.expected[1][same], rtol=1e-5, atol=1e-30):
        raise RuntimeError(f"{implementation} computes {cell.name} of {cell.rows} rows wrongly")


def measured(cell: Cell, bandwidth: float, empty: float) -> Iterator[Row]:
    for implementation, calls in cell.calls.items():
        check(cell, implementation, cast("Pair", calls[0]()))
        timing = measure.NOT_TIMED if implementation == _INDEX_PUT else measure.in_graph(calls)
        yield Row(cell.name, cell.rows, implementation, *timing, measure.from_python(calls), cell.moved / bandwidth + empty)


def show(rows: Sequence[Row]) -> Table:
    table = Table("what", "rows", "by", "graph us", "x ours", "x floor", "python us", "x ours", title="Routing kernels")
    ours = {(row.cell, row.rows): row for row in rows if row.implementation == "moe_typed"}
    for row in rows:
        mine = ours[row.cell, row.rows]
        table.add_row(
            row.cell,
            str(row.rows),
            row.implementation,
            f"{row.graph_us:.1f}",
            f"{row.graph_us / mine.graph_us:.2f}",
            f"{row.graph_us / row.floor_us:.2f}",
            f"{row.python_us:.0f}",
            f"{row.python_us / mine.python_us:.2f}",
        )
    return table


def main() -> None:
    parser = measure.arguments_of(__doc__)
    parser.add_argument("--compiled", action="store_true", help="time torch.compile of the eager gates too, for the most experts")
    arguments = parser.parse_args()

    torch.random.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
    bandwidth, empty = measure.copy_bandwidth(), measure.empty_kernel()
    results: list[Row] = []
    for rows in ROWS:
        for cell in (*gate_cells(rows, compiled=arguments.compiled), *append_cells(rows), *fill_cells(rows)):
            results += measured(cell, bandwidth, empty)
    results.sort(key=lambda row: (row.cell, row.rows))
    ceilings = {"copy_bytes_per_us": bandwidth, "empty_kernel_us": empty}
    Console(width=150).print(show(results), measure.environment(), ceilings)
    measure.save(arguments.results, "routing", [one._asdict() for one in results], **ceilings)


if __name__ == "__main__":
    main()
