"""The AITER runner: one call of ``aiter.fused_moe.fused_moe``, with everything that does not change between calls bound beforehand."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Never, cast, final, overload

import attrs
import torch
from torch import Tensor
from typing_extensions import override

from ...boundary import Dim, Rename, boundary, value_error
from ...formats import DenseRows, Payload, ScaledRows
from ...routing import live_tensor, sink_mask
from ...stages import AiterSinkInput, AiterSlotInput, LiveRowsOutput, RouteRowsOutput, RowsOutput, RunnerInput, SummedRowsOutput
from ..activations import Activation, SiluAndMul, SwigluOai
from ..base import PreparedWeights, Runner, UnsupportedError, refuse_payload
from .admission import Admission, admit_dense, admit_scaled, pins_fp8
from .library import AiterLibrary
from .prepared import AiterWeights, Operands, Scheme
from .shuffle import LANE_COLUMNS, mark_shuffled

if TYPE_CHECKING:
    from aiter import ActivationType

# What the library calls Swiglu: g * sigmoid(1.702 * g) * (u + 1), clamped at 7.0 unless it is given a limit (aiter/fused_moe.py, torch_moe).
_SWIGLU: Final = SwigluOai(alpha=1.702, limit=7.0)
# Its quantiser runs between the products of every call, and asserts that it is given no count (per_tensor_quant_hip), whatever the rows are.
_NO_COUNT: Final = (
    "AITER takes no count of live rows with fp8-tensor weights, which it would quantise under one scale with stale ones: "
    "give rows that are all live, or weights with a scale a row or block"
)
_MICROSCALED: Final = (Scheme.A4W4, Scheme.A16W4, Scheme.A8W4, Scheme.MXFP8)


@final
@boundary
class AiterSinkMeetsWeights:
    """Where rows with local ids and weights meet: with debug on, both have one hidden width, one number of experts, one device."""

    weights: AiterWeights
    runner_input: AiterSinkInput
    hidden: Annotated[int, Dim("hidden")]


@final
@boundary
class AiterSlotMeetsWeights:
    """Where rows with slots over all ranks and weights meet: one hidden width, one number of slots, one device; as many slots here as experts."""

    weights: AiterWeights
    runner_input: Annotated[AiterSlotInput, Rename({"experts": "slots", "out_hidden": "hidden"})]
    hidden: Annotated[int, Dim("hidden")]

    def check_values(self) -> None:
        """Raise BoundaryError unless the mask marks as many slots as the weights have experts: AITER counts, and reads what is there."""
        marked, experts = int(self.runner_input.mask.mask.sum()), self.weights.num_experts
        if marked != experts:
            raise value_error(self, "runner_input", f"has a mask of {marked} slots on this rank; the weights have {experts} experts")


@final
@attrs.frozen(eq=False)
class AiterRunner(Runner[AiterSinkInput | AiterSlotInput, RowsOutput]):
    """Run the experts in AITER.

    ``dense``, ``scaled``: which rows a call may have. ``sink``: the mask of local ids, int32 (experts + 1,), the last one 0. ``call``: ``fused_moe``
    over these weights; ``call_routes``: the same without the sum, None where AITER cannot. ``counts_rows``: AITER can be told how many rows are live.
    ``scales_rows_together``: AITER finds one scale for all dense rows, those that go nowhere among them.
    """

    name: ClassVar[str] = "aiter"
    inputs: ClassVar[tuple[type[RunnerInput], ...]] = (AiterSlotInput, AiterSinkInput)
    weights: AiterWeights
    dense: Admission
    scaled: Admission | None
    sink: Tensor
    call: Callable[..., Tensor]
    call_routes: Callable[..., Tensor] | None
    static_scale: Tensor | None
    writes_output: bool
    counts_rows: bool
    scales_rows_together: bool
    has_column_scale: bool

    @overload
    def run(self, runner_input: AiterSinkInput, /) -> SummedRowsOutput: ...
    @overload
    def run(self, runner_input: AiterSlotInput, /) -> LiveRowsOutput: ...
    @override
    def run(self, runner_input: AiterSinkInput | AiterSlotInput, /) -> SummedRowsOutput | LiveRowsOutput:
        """Run both products. An empty batch does not reach the library.

        Raises: UnsupportedError for rows that AITER would misread (``admission``); BoundaryError for a payload class that the weights do not take.
        """
        if isinstance(runner_input, AiterSinkInput):
            return SummedRowsOutput(self._run_sink(self.call, runner_input))
        output = runner_input.output if self.writes_output else None
        return LiveRowsOutput(self._run_slots(self.call if output is None else _with(self.call, output=output), runner_input))

    def run_routes(self, runner_input: AiterSinkInput | AiterSlotInput, /) -> RouteRowsOutput:
        """Return the result of each route, router weights pending; what a route to nowhere holds is undefined.

        Raises: as ``run``; UnsupportedError where AITER cannot leave out the sum.
        """
        if self.call_routes is None:
            raise UnsupportedError(_why_no_routes(self.weights))
        if runner_input.out_dtype != torch.bfloat16:
            raise UnsupportedError(f"AITER returns single routes in bf16 alone; {runner_input.out_dtype} was asked for")
        if isinstance(runner_input, AiterSinkInput):
            rows = self._run_sink(self.call_routes, runner_input)
        else:
            rows = self._run_slots(self.call_routes, runner_input)
        count, k = runner_input.routing.topk_ids.shape
        return RouteRowsOutput(rows.view(count, k, self.weights.hidden))

    def _run_sink(self, call: Callable[..., Tensor], runner_input: AiterSinkInput) -> Tensor:
        AiterSinkMeetsWeights(self.weights, runner_input, runner_input.payload.hidden)
        return self._rows(call, runner_input, self.sink, None)

    def _run_slots(self, call: Callable[..., Tensor], runner_input: AiterSlotInput) -> Tensor:
        AiterSlotMeetsWeights(self.weights, runner_input, runner_input.payload.hidden)
        live = live_tensor(runner_input.routing.live, runner_input.routing.topk_ids)
        return self._rows(call, runner_input, runner_input.mask.mask, live)

    def _rows(self, call: Callable[..., Tensor], runner_input: AiterSinkInput | AiterSlotInput, mask: Tensor, live: Tensor | None) -> Tensor:
        payload, routing = runner_input.payload, runner_input.routing
        rows = payload.data.shape[0]
        if rows == 0:
            return payload.data.new_empty((0, self.weights.hidden), dtype=runner_input.out_dtype)
        if live is not None and not self.counts_rows:
            raise UnsupportedError(_NO_COUNT)
        data = payload.data
        if type(payload) is self.dense.payload:
            admission, scale = self.dense, self.static_scale
            if self.scales_rows_together and isinstance(runner_input, AiterSinkInput):
                goes = (routing.topk_ids < routing.num_experts).any(1, keepdim=True)
                data = torch.where(goes, data, 0.0)  # stale rows and padding hold anything, and one NaN would be in the scale of all
        elif self.scaled is not None and isinstance(payload, ScaledRows) and type(payload) is self.scaled.payload:
            admission, scale = self.scaled, payload.scale.unsqueeze(1) if self.has_column_scale else payload.scale
        else:
            raise refuse_payload(type(payload), type(self.weights).__qualname__, _accepts(self.weights))
        if not admission.least <= rows < admission.below:
            raise admission.refuse(rows)
        return call(
            data.contiguous(),
            topk_weight=routing.topk_weights.contiguous(),
            topk_ids=routing.topk_ids.contiguous(),
            expert_mask=mask,
            a1_scale=scale,
            num_local_tokens=live,
            dtype=runner_input.out_dtype,
        )


def make_runner(weights: AiterWeights, activation: Activation) -> AiterRunner:
    """Return the runner over prepared weights. Raises: UnsupportedError for an activation that AITER cannot do with them."""
    library, operands = weights.library, weights.operands()
    member, limit = _activation(activation, library, operands.scheme)
    clamped = isinstance(activation, SwigluOai)
    dense_rows, *scaled_rows = _accepts(weights)
    whole_lanes = all(weight.shape[2] % LANE_COLUMNS == 0 for weight in (weights.w1, weights.w2))
    dense = admit_dense(operands.scheme, cast("type[DenseRows]", dense_rows), library.facts, clamped=clamped, whole_lanes=whole_lanes)
    if dense.is_empty:
        raise UnsupportedError(dense.reason)
    scaled = [admit_scaled(operands.scheme, cast("type[ScaledRows]", rows), library.facts, clamped=clamped) for rows in scaled_rows]
    call = _bind(weights, operands, member, limit)
    routes = _with(call, no_combine=True) if _why_no_routes(weights) == "" else None
    return AiterRunner(
        weights,
        dense,
        scaled[0] if scaled else None,
        sink_mask(weights.num_experts, weights.w1.device).mask,
        call,
        routes,
        operands.a1_scale,
        writes_output=library.facts.takes("output"),
        counts_rows=operands.scheme is not Scheme.PER_TENSOR,
        scales_rows_together=operands.scheme is Scheme.PER_TENSOR and operands.a1_scale is None,
        has_column_scale=operands.scheme is Scheme.PER_TOKEN,  # (rows, 1)
    )


def _bind(weights: AiterWeights, operands: Operands, activation: "ActivationType", limit: float | None) -> Callable[..., Tensor]:
    """Return ``fused_moe`` with all arguments that do not change; those that not every version has stand behind a look at its parameters."""
    library, options = weights.library, weights.options
    facts = library.facts
    mark_shuffled(weights.w1, weights.w2)
    call: Callable[..., Tensor] = partial(
        library.fused_moe,
        w1=weights.w1,
        w2=weights.w2,
        activation=activation,
        quant_type=operands.quant_type,
        doweight_stage1=options.doweight_stage1,
        w1_scale=operands.w1_scale,
        w2_scale=operands.w2_scale,
        a2_scale=operands.a2_scale,
        hidden_pad=options.hidden_pad,
        intermediate_pad=options.intermediate_pad,
        bias1=operands.b1,
        bias2=operands.b2,
    )
    if facts.has_gate_modes:
        call = _with(call, gate_mode="interleave" if operands.scheme.interleaves else "separated")
    if limit is not None:
        call = _with(call, swiglu_limit=limit)
    if pins_fp8(operands.scheme, facts):
        call = _with(call, quant_dtype_a=torch.float8_e4m3fn)
    return call


def _with(call: Callable[..., Tensor], **arguments: object) -> Callable[..., Tensor]:
    """Bind arguments that not every version has: the caller has looked."""
    return partial(call, **arguments)


def _activation(activation: Activation, library: AiterLibrary, scheme: Scheme) -> tuple["ActivationType", float | None]:
    """Return the library's member, and the limit where it is not the kernels' own."""
    match activation:
        case SiluAndMul():
            return library.silu, None
        case SwigluOai(alpha=_SWIGLU.alpha, limit=_SWIGLU.limit):
            return library.swiglu, None
        case SwigluOai(alpha=_SWIGLU.alpha, limit=limit):
            if not library.facts.takes("swiglu_limit"):
                raise UnsupportedError(f"the limit of AITER {library.facts.version} is {_SWIGLU.limit}; {limit} was asked for")
            if scheme not in _MICROSCALED:
                raise UnsupportedError(f"AITER's kernels for {scheme.value} get no limit, and keep {_SWIGLU.limit}; {limit} was asked for")
            return library.swiglu, limit
        case SwigluOai(alpha=alpha):
            raise UnsupportedError(f"the alpha of AITER's swiglu is {_SWIGLU.alpha}; {alpha} was asked for")
        case _:
            raise UnsupportedError(f"the AITER runner does not know the activation {activation.name!r}")


def _accepts(weights: AiterWeights) -> tuple[type[Payload], ...]:
    """Return the accept-set: dense rows, and then those that are quantised already, if any."""
    return cast("type[PreparedWeights[object, Never]]", type(weights)).accepts()


def _why_no_routes(weights: AiterWeights) -> str:
    """Return why AITER cannot return the rows of single routes; an empty text where it can."""
    facts = weights.library.facts
    if not facts.takes("no_combine"):
        return f"fused_moe of AITER {facts.version} has no no_combine, so that it returns sums alone"
    if weights.w1.dtype != torch.bfloat16:
        return "AITER returns single routes with bf16 weights alone"
    if weights.options.doweight_stage1:
        return "single routes have their router weights pending, but doweight_stage1 applies them"
    return ""
