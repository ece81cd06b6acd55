"""The Triton runner over weights in any format: sort routes, multiply and activate, quantise if the rows were, multiply, sum.

Weights are read as they are held and decoded in registers. Rows without scales are multiplied in their own dtype, whatever the weights are (W8A16,
W4A16). Rows that are quantised are multiplied as they are, and so are those between the products, which are quantised by the rule of the payload; but
where the payload has one scale for all, each of these rows has its own, which is finer and depends on no other row. A function that no kernel knows
is called as it is between the products, over the rows of all routes, and so is a norm behind them. Two cases differ:

* Few rows, where reading weights takes the time: routes are not sorted, and the rows between the products are not quantised, which is more exact.
* So many rows, in bfloat16 or mxfp8, that decoding weights for each block of them takes longer than doing so once: weights are decoded to bfloat16
  (and rounded to it), rows upscaled, and both multiplied by the wide kernel, on GPUs that run it. That takes memory for one projection of all
  experts at a time, at most 2 * experts * 2 * inter * hidden bytes, from torch's allocator and back to it in each call, so that layers share it.
"""

from typing import ClassVar, final, overload

import attrs
import torch
import triton
from torch import Tensor
from triton import knobs
from typing_extensions import override

from ...formats import (
    Bf16Rows,
    ExpertWeights,
    Fp8Block128Rows,
    Fp8TensorRows,
    Fp8TokenRows,
    Fp16Rows,
    Fp32Rows,
    GateUpOrder,
    Int8TokenRows,
    MxFp8Rows,
    Payload,
)
from ...ops.activation.spec import Gate, Split
from ...ops.align.triton import align
from ...ops.product_plans.choose import Layer, runs_wide
from ...ops.product_plans.spec import WIDE_ROWS, How
from ...ops.quantised_product.decoded import decoded
from ...ops.quantised_product.plan import choose_how, choose_tile, fitting_depth
from ...ops.quantised_product.spec import Code, Epilogue, Formula, Matrix, Rows
from ...ops.quantised_product.triton import product
from ...ops.quantize.triton import quantize_fp8_groups, quantize_fp8_rows, quantize_int8_rows, quantize_mxfp8
from ...ops.sum_routes.triton import sum_routes
from ...ops.upscale.triton import upscale_mxfp8
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
from ..activations import Activation, ThenNorm
from ..base import ExpertRowsMeetWeights, FlatRowsMeetWeights, Runner, UnsupportedError, refuse_payload
from .activations import epilogue_of, split_of
from .devices import FP8_CAPABILITY, TRITON_CAPABILITY, hopper_fault
from .in_place import ExpertRowsInput, blocks_of, planned_routes, weights_of
from .int4 import ExpertRowsMeetInt4Weights, FlatRowsMeetInt4Weights, TritonInt4Weights

_SUPERBLOCK = 8  # blocks that go through the columns side by side


@final
@attrs.frozen(eq=False)
class TritonGeneralRunner(Runner[FlatRowsInput | SlabRowsInput | SegmentRowsInput, RowsOutput]):
    """Run the experts as grouped GEMMs over rows that are sorted by expert, with weights in any format.

    ``accepts``: the payloads that it takes. ``split``: None where the columns of the first product are no pairs to the kernel. ``epilogue``: what the
    kernel does of the activation; nothing, where that is called as it is. ``out_dtype``: of results, where rows are quantised; that of the rows where
    they are not. ``has_fp8``: whether the device knows e4m3. ``wide``: what the wide kernel does between the products; None where it does not run, or
    does not take the layer.
    """

    name: ClassVar[str] = "triton"
    inputs: ClassVar[tuple[type[RunnerInput], ...]] = (SlabRowsInput, SegmentRowsInput, FlatRowsInput)
    weights: ExpertWeights[GateUpOrder] | TritonInt4Weights
    up: Matrix
    down: Matrix
    activation: Activation
    split: Split | None
    epilogue: Epilogue
    accepts: tuple[type[Payload], ...]
    out_dtype: torch.dtype
    has_fp8: bool
    wide: Gate | None = None

    @overload
    def run(self, runner_input: FlatRowsInput, /) -> SummedRowsOutput: ...
    @overload
    def run(self, runner_input: SlabRowsInput | SegmentRowsInput, /) -> LiveRowsOutput: ...
    @override
    def run(self, runner_input: FlatRowsInput | SlabRowsInput | SegmentRowsInput, /) -> SummedRowsOutput | LiveRowsOutput:
        """Run both products.

        Raises: UnsupportedError for rows that the device cannot multiply; BoundaryError for a payload of another class; ValueError for slabs or
        segments that are not of the weights' experts, and for routes of another number of rows, even with debug off.
        """
        if not isinstance(runner_input, FlatRowsInput):
            return LiveRowsOutput(self._run_in_place(runner_input))
        routing, live = runner_input.routing, live_count(runner_input.routing)
        results = self._multiply(runner_input, live)
        experts = self.down.data.shape[0]
        return SummedRowsOutput(sum_routes(results, routing.topk_ids.contiguous(), routing.topk_weights, live, experts, results.dtype))

    def run_routes(self, runner_input: FlatRowsInput, /) -> RouteRowsOutput:
        """Return the result of each route, router weights pending; what a route to nowhere holds is undefined. Raises: as ``run``."""
        results = self._multiply(runner_input, live_count(runner_input.routing))
        return RouteRowsOutput(results.view(*runner_input.routing.topk_ids.shape, results.shape[1]))

    def _multiply(self, runner_input: FlatRowsInput, live: Tensor | None) -> Tensor:
        if isinstance(self.weights, TritonInt4Weights):
            FlatRowsMeetInt4Weights(self.weights, runner_input)
        else:
            FlatRowsMeetWeights(self.weights, runner_input)
        payload, ids = runner_input.payload, runner_input.routing.topk_ids.contiguous()
        require_routes(payload, runner_input.routing)
        routes, top_k = ids.numel(), ids.shape[1]
        rows, dtype = self._rows(payload)
        how = choose_how(rows, self.up, routes, wide=self.wide is not None and dtype == torch.bfloat16)
        if how is How.WIDE:
            return self._multiply_decoded(payload, ids, live)
        tile = choose_tile(rows, self.up, routes, paired=self.split is not None)
        slots, blocks = (ids, None) if how is How.WALK else align(ids, live, self.up.data.shape[0], tile.rows)
        inner = product(rows, self.up, slots, blocks, routes, top_k, dtype, tile, self.split, self.epilogue, live=live)
        if self.epilogue.formula is Formula.NOTHING:
            inner = self.activation.activate(inner, self.weights.order)
        between = Rows(inner) if how is How.WALK else _requantised(payload, inner, None if live is None else live * top_k)
        tile = choose_tile(between, self.down, routes, paired=False)
        return self.activation.finish(product(between, self.down, slots, blocks, routes, 1, dtype, tile, live=live))

    def _multiply_decoded(self, payload: Payload, ids: Tensor, live: Tensor | None) -> Tensor:
        """Return the result of each route, by weights that are decoded first: one projection at a time."""
        if self.split is None or self.wide is None:
            raise ValueError("the wide kernel does not take this layer")
        rows = upscale_mxfp8(payload.data, payload.scale, live=live) if isinstance(payload, MxFp8Rows) else payload.data
        if rows.stride(1) != 1 or rows.stride(0) * rows.element_size() % 16:
            rows = rows.contiguous()
        slots, blocks = align(ids, live, self.up.data.shape[0], WIDE_ROWS)
        b13, b2, dtype, group = self.up.bias, self.down.bias, rows.dtype, _SUPERBLOCK
        inner, _ = wide.up_product(rows, None, decoded(self.up), None, b13, slots, blocks, ids.shape[1], self.split, self.wide, dtype, group)
        return self.activation.finish(wide.down_product(inner, None, decoded(self.down), None, b2, slots, blocks, ids.numel(), dtype, group))

    def _run_in_place(self, runner_input: ExpertRowsInput) -> Tensor:
        if isinstance(self.weights, TritonInt4Weights):
            ExpertRowsMeetInt4Weights(self.weights, runner_input)
        else:
            ExpertRowsMeetWeights(self.weights, runner_input)
        payload, experts = runner_input.payload, self.up.data.shape[0]
        planned, routes = planned_routes(runner_input, experts), payload.rows
        rows, dtype = self._rows(payload)
        tile = choose_tile(rows, self.up, planned, paired=self.split is not None)
        slots, block_expert = blocks_of(runner_input, experts, tile.rows)
        inner = product(rows, self.up, slots, block_expert, routes, 1, dtype, tile, self.split, self.epilogue)
        if self.epilogue.formula is Formula.NOTHING:
            inner = self.activation.activate(inner, self.weights.order)
        between = _requantised(payload, inner, None, slots)
        tile = choose_tile(between, self.down, planned, paired=False)
        by_route = weights_of(runner_input)
        if by_route is None or not isinstance(self.activation, ThenNorm):
            return self.activation.finish(product(between, self.down, slots, block_expert, routes, 1, dtype, tile, route_weights=by_route))
        normed = self.activation.finish(product(between, self.down, slots, block_expert, routes, 1, dtype, tile))
        return (normed * by_route.unsqueeze(1)).to(dtype)  # the router's weight comes behind the norm

    def _rows(self, payload: Payload) -> tuple[Rows, torch.dtype]:
        """Return the rows, and the dtype of what is made of them."""
        if not isinstance(payload, self.accepts):
            raise refuse_payload(type(payload), f"the Triton runner over {self.weights.format.name} weights", self.accepts)
        match payload:
            case Bf16Rows() | Fp16Rows() | Fp32Rows():
                rows, dtype = Rows(payload.data), payload.data.dtype
            case Fp8TensorRows():
                rows, dtype = Rows(payload.data, payload.scale.expand(payload.rows).unsqueeze(1)), self.out_dtype
            case Fp8TokenRows() | Int8TokenRows():
                rows, dtype = Rows(payload.data, payload.scale.unsqueeze(1)), self.out_dtype
            case MxFp8Rows() | Fp8Block128Rows():
                rows, dtype = Rows(payload.data, payload.scale), self.out_dtype
            case _:
                raise refuse_payload(type(payload), "the Triton runner", self.accepts)
        if dtype == torch.bfloat16 and payload.data.device.type != "cuda":
            raise UnsupportedError("Triton's CPU interpreter multiplies bf16 wrongly, so that bf16 rows, and rows that bf16 is made of, need a GPU")
        if rows.data.dtype == torch.float8_e4m3fn and not self.has_fp8:
            raise UnsupportedError(f"{payload.format.name} rows need compute capability 8.9 or later")
        return rows, dtype


def _requantised(payload: Payload, inner: Tensor, live: Tensor | None, only: Tensor | None = None) -> Rows:
    """Return the rows between the products, one a route, as the payload was. ``live``: the leading ones that count; ``only``: those that do."""
    match payload:
        case Fp8TensorRows() | Fp8TokenRows():
            data, scale = quantize_fp8_rows(inner, live=live, only=only)
            return Rows(data, scale.unsqueeze(1))
        case Int8TokenRows():
            data, scale = quantize_int8_rows(inner, live=live, only=only)
            return Rows(data, scale.unsqueeze(1))
        case MxFp8Rows():
            return Rows(*quantize_mxfp8(inner, live=live, only=only))
        case Fp8Block128Rows():
            return Rows(*quantize_fp8_groups(inner, live=live, only=only))
        case _:
            return Rows(inner)


def require_routes(payload: Payload, routing: Routing[Ids]) -> None:
    """Raise ValueError for routes of another number of rows, even with debug off: kernels would read beyond the ends of the rows."""
    if routing.topk_ids.shape[0] != payload.rows:
        raise ValueError(f"the payload has {payload.rows} rows, and the routes are those of {routing.topk_ids.shape[0]}")
    if routing.topk_weights.shape != routing.topk_ids.shape:
        raise ValueError(f"there are {list(routing.topk_ids.shape)} routes, and router weights {list(routing.topk_weights.shape)}")


def live_count(routing: Routing[Ids]) -> Tensor | None:
    """Return the live rows as int32 (1,) on the device, or None where every row is live."""
    if not isinstance(routing.live, int):
        return routing.live.count
    ids = routing.topk_ids
    return None if routing.live == ids.shape[0] else torch.full((1,), routing.live, dtype=torch.int32, device=ids.device)


def make_general_runner(
    weights: ExpertWeights[GateUpOrder] | TritonInt4Weights,
    up: Matrix,
    down: Matrix,
    activation: Activation,
    accepts: tuple[type[Payload], ...],
    out_dtype: torch.dtype = torch.bfloat16,
) -> TritonGeneralRunner:
    """Return the runner over prepared weights. Raises: UnsupportedError for an activation or an order that the kernels do not know."""
    if not activation.takes(weights.order):
        raise UnsupportedError(f"the activation {activation.name!r} does not take rows in the order {weights.order.title!r}")
    epilogue = epilogue_of(activation)
    split = split_of(weights.order, weights.inter) if epilogue.formula.is_paired else None
    gate = Gate(*epilogue[1:]) if epilogue.formula is Formula.GATED and _is_wide(up, down, split) else None
    return TritonGeneralRunner(weights, up, down, activation, split, epilogue, accepts, out_dtype, _has_fp8(up.data.device), gate)


def require_general(data: Tensor, name: str) -> None:
    """Raise UnsupportedError where the device of weights cannot multiply them. ``name``: of their format."""
    device = data.device
    if device.type != "cuda":
        if not knobs.runtime.interpret:
            raise UnsupportedError(f"the weights are on {device}, and Triton runs on GPUs (on a CPU with TRITON_INTERPRET=1 alone)")
        return
    if data.dtype == torch.float8_e4m3fn and torch.version.hip is not None:
        raise UnsupportedError(f"{name} weights are float8_e4m3fn, which the Triton runner multiplies on NVIDIA GPUs only")
    needed = FP8_CAPABILITY if data.dtype == torch.float8_e4m3fn else TRITON_CAPABILITY
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and capability < needed:
        raise UnsupportedError(
            f"{name} weights need compute capability {needed[0]}.{needed[1]} or later; {device} has {capability[0]}.{capability[1]}"
        )


def require_groups(up: Matrix, down: Matrix, name: str) -> None:
    """Raise UnsupportedError for groups of scales that no matrix instruction fits into."""
    for matrix in (up, down):
        try:
            fitting_depth(Rows(matrix.data.new_empty((0, matrix.depth), dtype=torch.bfloat16)), matrix, matrix.depth)
        except ValueError as error:
            raise UnsupportedError(f"{name} weights: {error}") from error


def _has_fp8(device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY


def _is_wide(up: Matrix, down: Matrix, split: Split | None) -> bool:
    """Say whether weights, decoded to bfloat16, are multiplied by the wide kernel."""
    device = up.data.device
    if split is None or up.code is Code.DENSE or device.type != "cuda" or torch.version.hip is not None:
        return False
    layer = Layer(torch.bfloat16, up.data.shape[0], up.depth, down.depth, split.step > 1)
    return not hopper_fault(triton.__version__) and runs_wide(torch.cuda.get_device_capability(device), layer)
