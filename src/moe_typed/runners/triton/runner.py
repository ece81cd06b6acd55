"""The Triton runner: sort routes, multiply and activate, multiply, sum. Nothing waits for the device.

Which kernels do that, and with which tiles, is a plan; see ops.product_plans. For a few tokens nothing is sorted, and the second product sums.

Products accumulate in float32; what lies between the steps has the model's dtype. Over fp8 weights the rows between the products are quantised for
each 128 channels, as the payload was, except where a plan for few rows does so for each 64 or leaves them as they are, which is more exact.
"""

from typing import ClassVar, final, overload

import attrs
import torch
import triton
from torch import Tensor
from typing_extensions import override

from ...formats import Bf16ExpertWeights, Fp8Block128ExpertWeights, Fp8Block128Rows
from ...ops.activation.spec import Gate, Split
from ...ops.align.triton import align
from ...ops.down_product.triton import down_product
from ...ops.down_product.vector import down_product_summed
from ...ops.product_plans.choose import Layer, Plans, plans_for
from ...ops.product_plans.spec import WIDE_ROWS, How, Plan
from ...ops.quantised_product.spec import Formula
from ...ops.stream_product import triton as stream
from ...ops.sum_routes.triton import sum_routes
from ...ops.up_product import vector
from ...ops.up_product.triton import up_product
from ...ops.wide_product import triton as wide
from ...routing import Ids, Routing
from ...stages import (
    FlatRowsInput,
    LiveRowsOutput,
    RouteRowsOutput,
    RowsOutput,
    RunnerInput,
    SegmentRowsInput,
    SlabRowsInput,
    SummedRowsOutput,
)
from ..activations import Activation
from ..base import ExpertRowsMeetWeights, FlatRowsMeetWeights, Runner, UnsupportedError
from .activations import epilogue_of, split_of
from .devices import hopper_fault
from .general import live_count, require_general, require_routes
from .in_place import ExpertRowsInput, blocks_of, plan_for, weights_of
from .weights import TritonExpertWeights


@final
@attrs.frozen(eq=False)
class TritonRunner(Runner[FlatRowsInput | SlabRowsInput | SegmentRowsInput, RowsOutput]):
    """Run the experts by the plan for the number of tokens. Rows that lie by expert are neither sorted nor summed; see ``in_place``."""

    name: ClassVar[str] = "triton"
    inputs: ClassVar[tuple[type[RunnerInput], ...]] = (SlabRowsInput, SegmentRowsInput, FlatRowsInput)
    weights: TritonExpertWeights
    split: Split
    gate: Gate
    out_dtype: torch.dtype
    plans: Plans

    @overload
    def run(self, runner_input: FlatRowsInput, /) -> SummedRowsOutput: ...
    @overload
    def run(self, runner_input: SlabRowsInput | SegmentRowsInput, /) -> LiveRowsOutput: ...
    @override
    def run(self, runner_input: FlatRowsInput | SlabRowsInput | SegmentRowsInput, /) -> SummedRowsOutput | LiveRowsOutput:
        """Run both products.

        Raises: ValueError for slabs or segments that are not of the weights' experts, and for routes of another number of rows, even with debug off.
        """
        if not isinstance(runner_input, FlatRowsInput):
            return LiveRowsOutput(self._run_in_place(runner_input))
        rows, scale, routing, plan = self._met(runner_input)
        if plan.how is How.STREAM:
            operands, router = self._streamed(rows, scale, routing), routing.topk_weights.contiguous()
            return SummedRowsOutput(stream.layer(operands, router, self.split, self.gate, self.out_dtype, plan.up, plan.down))
        if plan.how is not How.VECTOR:
            results = self._multiply(rows, scale, routing, plan)
            ids, weights, live = routing.topk_ids.contiguous(), routing.topk_weights, live_count(routing)
            return SummedRowsOutput(sum_routes(results, ids, weights, live, self.weights.num_experts, self.out_dtype))
        (w13, w2), (s13, s2), (b13, b2) = self._operands()
        ids, live, split, gate, dtype = routing.topk_ids.contiguous(), live_count(routing), self.split, self.gate, self.out_dtype
        inner = vector.up_product(rows, scale, w13, s13, b13, ids, live, split, gate, dtype, plan.up)
        return SummedRowsOutput(down_product_summed(inner, w2, s2, b2, ids, routing.topk_weights.contiguous(), live, dtype, plan.down))

    def run_routes(self, runner_input: FlatRowsInput, /) -> RouteRowsOutput:
        """Return the result of each route, router weights pending; what a route to nowhere holds is undefined."""
        rows, scale, routing, plan = self._met(runner_input)
        if plan.how is How.VECTOR:  # whose second product sums
            plan = self.plans.by_tiles(*routing.topk_ids.shape)
        return RouteRowsOutput(self._multiply(rows, scale, routing, plan).view(*routing.topk_ids.shape, self.weights.hidden))

    def _run_in_place(self, runner_input: ExpertRowsInput) -> Tensor:
        ExpertRowsMeetWeights(self.weights, runner_input)
        payload = runner_input.payload
        scale = payload.scale if isinstance(payload, Fp8Block128Rows) else None
        plan = plan_for(self.plans if _is_aligned(payload.data) else self.plans.without_wide(), runner_input)
        slots, blocks = blocks_of(runner_input, self.weights.num_experts, _height(plan))
        return self._products(payload.data, scale, slots, blocks, None, 1, plan, weights_of(runner_input))

    def _met(self, runner_input: FlatRowsInput) -> tuple[Tensor, Tensor | None, Routing[Ids], Plan]:
        """Return rows, their scales, their routes, and how they are multiplied."""
        FlatRowsMeetWeights(self.weights, runner_input)
        payload, routing = runner_input.payload, runner_input.routing
        require_routes(payload, routing)
        scale = payload.scale if isinstance(payload, Fp8Block128Rows) else None
        plans = self.plans if _is_aligned(payload.data) else self.plans.without_wide()
        return payload.data, scale, routing, plans.choose(*routing.topk_ids.shape)

    def _operands(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor | None, Tensor | None], tuple[Tensor | None, Tensor | None]]:
        """Return both matrices, their scales and their biases."""
        weights = self.weights
        scales = (weights.w13_scale, weights.w2_scale) if isinstance(weights, Fp8Block128ExpertWeights) else (None, None)
        return (weights.w13, weights.w2), scales, (weights.b13, weights.b2)

    def _streamed(self, rows: Tensor, scale: Tensor | None, routing: Routing[Ids]) -> stream.Operands:
        (w13, w2), (s13, s2), (b13, b2) = self._operands()
        return stream.Operands(rows, scale, w13, s13, b13, w2, s2, b2, routing.topk_ids.contiguous(), live_count(routing))

    def _multiply(self, rows: Tensor, scale: Tensor | None, routing: Routing[Ids], plan: Plan) -> Tensor:
        """Return the result of each route, by tiles or by the streaming kernel."""
        if plan.how is How.STREAM:
            return stream.products(self._streamed(rows, scale, routing), self.split, self.gate, self.out_dtype, plan.up, plan.down)
        ids, live = routing.topk_ids.contiguous(), live_count(routing)
        blocks: Tensor | None = None
        slots = ids
        if plan.how is not How.WALK:
            slots, blocks = align(ids, live, self.weights.num_experts, _height(plan))
        return self._products(rows, scale, slots, blocks, live, ids.shape[1], plan, None)

    def _products(
        self,
        rows: Tensor,
        scale: Tensor | None,
        slots: Tensor,
        blocks: Tensor | None,
        live: Tensor | None,
        top_k: int,
        plan: Plan,
        by_route: Tensor | None,
    ) -> Tensor:
        """Return the result of each route, times ``by_route`` where that is given. ``slots``, ``blocks``, ``live``: see ops.up_product."""
        (w13, w2), (s13, s2), (b13, b2) = self._operands()
        split, gate, dtype, routes = self.split, self.gate, self.out_dtype, rows.shape[0] * top_k
        if plan.how is How.WIDE and blocks is not None:
            inner, by = wide.up_product(rows, scale, w13, s13, b13, slots, blocks, top_k, split, gate, dtype, plan.up.group)
            return wide.down_product(inner, by, w2, s2, b2, slots, blocks, routes, dtype, plan.down.group, by_route)
        inner, by = up_product(rows, scale, w13, s13, b13, slots, blocks, live, top_k, split, gate, dtype, plan.up)
        return down_product(inner, by, w2, s2, b2, slots, blocks, live, routes, top_k, dtype, plan.down, by_route)


def _height(plan: Plan) -> int:
    """Return the rows of a block."""
    return WIDE_ROWS if plan.how is How.WIDE else plan.up.rows


def _is_aligned(rows: Tensor) -> bool:
    """Say whether rows have no gaps, and a stride of whole 16 bytes, as asynchronous copies of 16 bytes need."""
    return rows.stride(1) == 1 and not rows.stride(0) * rows.element_size() % 16


def require_device(weights: TritonExpertWeights) -> None:
    """Raise UnsupportedError where the device of the weights cannot multiply them."""
    name = weights.format.name
    require_general(weights.w13, name)
    if weights.w13.device.type != "cuda" and isinstance(weights, (Bf16ExpertWeights, Fp8Block128ExpertWeights)):
        raise UnsupportedError(f"Triton's CPU interpreter multiplies bf16 and rounds to fp8 wrongly, so that {name} weights need a GPU")


def make_runner(weights: TritonExpertWeights, activation: Activation, out_dtype: torch.dtype) -> TritonRunner:
    """Return the runner over prepared weights. Raises: UnsupportedError for an activation or an order that the kernels do not know."""
    split = split_of(weights.order, weights.inter)
    if split is None:
        raise UnsupportedError(f"the tuned kernels multiply pairs of gate and up; these weights have the order {weights.order.title!r}")
    layer = Layer(weights.w13.dtype, weights.num_experts, weights.hidden, weights.inter, split.step > 1)
    plans = plans_for(weights.w13.device, layer)
    if weights.w13.data_ptr() % 16 or weights.w2.data_ptr() % 16:  # the copy engine's rule
        plans = plans.without_wide()
    if plans.wide and (fault := hopper_fault(triton.__version__)):
        plans = plans.without_wide(fault)
    return TritonRunner(weights, split, _gate(activation), out_dtype, plans)


def _gate(activation: Activation) -> Gate:
    formula, alpha, limit, shift = epilogue_of(activation)
    if formula is not Formula.GATED:
        raise UnsupportedError(f"the tuned kernels do not know the activation {activation.name!r}")
    return Gate(alpha, limit, shift)
