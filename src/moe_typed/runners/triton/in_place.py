"""Rows that lie by expert, for both Triton runners: the blocks in them, how many rows to expect, and the plan for them."""

from typing import Final, TypeAlias

from torch import Tensor

from ...ops.expert_blocks.triton import segment_blocks, slab_blocks
from ...ops.product_plans.choose import Plans
from ...ops.product_plans.spec import How, Plan
from ...stages import SegmentRowsInput, SlabRowsInput

ExpertRowsInput: TypeAlias = SlabRowsInput | SegmentRowsInput

_ROOM: Final = 2


def blocks_of(runner_input: ExpertRowsInput, experts: int, block_m: int) -> tuple[Tensor, Tensor]:
    """Return slots and the experts of blocks, as align makes them, where route r is row r.

    Raises: ValueError for rows of another number of experts, slabs of another number of rows, and segments that begin at multiples of nothing or have
    weights of another number of rows: the kernels would read beyond their ends.
    """
    rows = runner_input.payload.rows
    if isinstance(runner_input, SegmentRowsInput):
        segments = runner_input.segments
        _demand(segments.ends, experts)
        if segments.alignment < 1:
            raise ValueError(f"segments begin at multiples of {segments.alignment}; 1 says that nothing is padded")
        if runner_input.slot_weights.shape != (rows,):
            raise ValueError(f"the payload has {rows} rows, their weights are {list(runner_input.slot_weights.shape)}")
        return segment_blocks(segments.ends, segments.alignment, rows, block_m)
    counts, capacity = runner_input.received.counts, runner_input.capacity
    _demand(counts, experts)
    if rows != experts * capacity:
        raise ValueError(f"{experts} slabs of {capacity} rows are {experts * capacity} rows; the payload has {rows}")
    return slab_blocks(counts, capacity, runner_input.most_rows, block_m)


def planned_routes(runner_input: ExpertRowsInput, experts: int) -> int:
    """Return how many routes, over all experts, tiles are chosen for.

    How many rows there are is on the device alone, and nothing waits for it: the hint that dispatch gives chooses tiles, and a bound that holds
    sizes launches. So a wrong hint costs time, and no row. An expert that has a few rows more than a tile reads its weights twice, while a tile that
    is half empty costs little: hence room for twice as many as are expected, and 32 rows at the least (an EP rank of DeepSeek-V3 on an H200, slabs of
    1024 rows: at 16 rows an expert 661 microseconds, where tiles of 16 rows take 845; at two rows an expert 592, where they take 628).
    """
    return max(_ROOM * _expected(runner_input, experts), 16 * experts + 1)


def weights_of(runner_input: ExpertRowsInput) -> Tensor | None:
    """Return the weights by which the second product multiplies its rows; None for none."""
    return runner_input.slot_weights.contiguous() if isinstance(runner_input, SegmentRowsInput) else None


def plan_for(plans: Plans, runner_input: ExpertRowsInput) -> Plan:
    """Return the plan for rows that lie by expert: as measured for one route a row, for the rows that are expected, where the layer was measured so.

    Else how, and in which height, is by rule for ``planned_routes``, and the tiles are those of that height that were measured for the layer with
    more routes a row, if there are any. Nothing walks through all rows, of which most may be stale, and none is multiplied by itself.
    """
    experts = plans.layer.experts
    if 1 in plans.tuned:
        plan = plans.choose(_expected(runner_input, experts), 1)
        if plan.how in (How.SORTED, How.WIDE):
            return plan
    rule = plans.by_rule(planned_routes(runner_input, experts), 1)
    if rule.how is How.WIDE:
        return rule
    measured = (plan for known in plans.tuned.values() for _, plan in known if plan.how is How.SORTED and plan.up.rows == rule.up.rows)
    return next(measured, rule)


def _expected(runner_input: ExpertRowsInput, experts: int) -> int:
    """Return about how many rows are live, by what the host was told; no more than there can be."""
    most = runner_input.most_rows if isinstance(runner_input, SlabRowsInput) else runner_input.payload.rows
    return min(runner_input.expected_rows * experts, most)


def _demand(held: Tensor, experts: int) -> None:
    if held.shape[0] != experts:
        raise ValueError(f"the rows are of {held.shape[0]} experts, the weights of {experts}")
