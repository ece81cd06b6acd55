"""Layers for the AITER runner: weights of every format in every order, rows of every format, the emulated library, and the float32 reference."""

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, cast

import torch
from torch import Tensor

from moe_typed import DeviceCount, GateUp, LocalIds, LocalSinkIds, Payload, PhysicalIds, Routing, Settled, SiluAndMul, SwigluOai
from moe_typed.formats import (
    Bf16ExpertWeights,
    Bf16Rows,
    ExpertWeights,
    Fp8Block128ExpertWeights,
    Fp8Block128Rows,
    Fp8ChannelExpertWeights,
    Fp8FnuzBlock128Rows,
    Fp8FnuzTensorRows,
    Fp8FnuzTokenRows,
    Fp8TensorExpertWeights,
    Fp8TensorRows,
    Fp8TokenRows,
    Fp16ExpertWeights,
    Fp16Rows,
    Fp32Rows,
    GateUpOrder,
    Int8ChannelExpertWeights,
    Int8TokenRows,
    MxFp4ExpertWeights,
    MxFp8ExpertWeights,
    ScaleFactor,
    quantize_fp8_block128,
    quantize_mxfp4,
    quantize_mxfp8,
)
from moe_typed.routing import ExpertMask, to_sink
from moe_typed.runners import Activation, AiterFacts, AiterLibrary, AiterOptions, AiterRunner, reference_experts
from moe_typed.runners.aiter import MxFp4Layout, RowBounds, StaticScales, prepare_aiter, prepare_aiter_fnuz
from moe_typed.runners.aiter.prepared import AiterWeights
from moe_typed.stages import AiterSinkInput, AiterSlotInput
from tests.emulation.aiter.aiter import EmulatedAiter
from tests.emulation.aiter.dtypes import Gfx
from tests.emulation.aiter.library import Tuned, VersionName

if TYPE_CHECKING:
    from aiter import ActivationType, QuantType

SILU: Final = SiluAndMul()
OAI: Final = SwigluOai()
L, HIDDEN, INTER, K = 4, 256, 128, 3
SLOTS: Final = 10  # over all ranks
HERE: Final = (7, 2, 9, 4)  # the slots of this rank, which AITER numbers in ascending order
FNUZ: Final = torch.float8_e4m3fnuz

Form: TypeAlias = Literal["bf16", "fp16", "fp8-tensor", "fp8-channel", "fp8-block128", "int8-channel", "a4w4", "a16w4", "a8w4", "mxfp8"]
FORMS: Final[tuple[Form, ...]] = ("bf16", "fp16", "fp8-tensor", "fp8-channel", "fp8-block128", "int8-channel", "a4w4", "a16w4", "a8w4", "mxfp8")
FNUZ_FORMS: Final[tuple[Form, ...]] = ("fp8-tensor", "fp8-channel", "fp8-block128")
LAYOUTS: Final[Mapping[Form, MxFp4Layout]] = {"a4w4": MxFp4Layout.A4W4, "a16w4": MxFp4Layout.A16W4, "a8w4": MxFp4Layout.A8W4}

# |found - reference| / |reference| over all rows. What is rounded: the rows (unless they come so), what lies between the products, the result. Half a
# unit in the last place is 2^-(bits + 1); errors of one rounding average out over a product of hundreds, so that a bound is not reached.
_BF16: Final = 2.0**-8
_ROUNDING: Final[Mapping[Form, float]] = {"fp16": 0.0, "int8-channel": 5 / 254, "a4w4": 2.0**-2, "a16w4": 0.0, "bf16": 0.0}
_OTHERS: Final = 2.0**-4  # e4m3


def tolerance(form: Form) -> float:
    """Return how far a layer may be: the rows and what lies between, of the format of the rows, and two roundings to bf16."""
    return 2 * _ROUNDING.get(form, _OTHERS) + 2 * _BF16


# ---- the library ---------------------------------------------------------------------------------------------------------------------------


def make_library(
    version: VersionName = "later",
    gfx: Gfx = "gfx950",
    *,
    mode: Literal["strict", "faithful"] = "strict",
    env: Mapping[str, str] | None = None,
    tuned: Tuned | None = None,
) -> tuple[AiterLibrary, EmulatedAiter]:
    """Return the emulated library as the facade holds it, and the emulation itself."""
    emulated = EmulatedAiter(version=version, gfx=gfx, mode=mode, env=env, tuned=tuned)
    facts = AiterFacts(
        version,
        quantizes_mxfp8=version != "0.1.7",
        passes_mxfp8=version == "later",
        passes_mxfp4=version != "0.1.7",
        parameters=frozenset(inspect.signature(emulated.fused_moe).parameters),
        gfx=gfx,
        bounds=RowBounds.read(env or {}),
    )
    return facade(emulated, facts), emulated


def facade(emulated: EmulatedAiter, facts: AiterFacts) -> AiterLibrary:
    """Return the facade. The members of the enums are those of the emulation, which the stubs of the real library do not know."""
    activation, quant = emulated.ActivationType, emulated.QuantType
    return AiterLibrary(
        facts,
        emulated.fused_moe,
        silu=cast("ActivationType", activation.Silu),
        swiglu=cast("ActivationType", activation.Swiglu),
        no_quant=cast("QuantType", quant.No),
        per_tensor=cast("QuantType", quant.per_Tensor),
        per_token=cast("QuantType", quant.per_Token),
        per_128x128=cast("QuantType", quant.per_128x128),
        per_1x32=cast("QuantType", quant.per_1x32),
    )


# ---- weights ---------------------------------------------------------------------------------------------------------------------------------


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def positive(seed: int, *shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.5


def _bytes(seed: int, low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def make_weights(
    form: Form, order: type[GateUpOrder] = GateUp, *, biased: bool = False, hidden: int = HIDDEN, inter: int = INTER
) -> ExpertWeights[GateUpOrder]:
    """Return weights whose products are about as large as their inputs; of every order the same gate and up, but for block scales."""
    gate, up, w2 = randn(1, L, inter, hidden), randn(2, L, inter, hidden), randn(3, L, hidden, inter)
    b13 = order.join(randn(4, L, inter), randn(5, L, inter), 1).to(torch.bfloat16) if biased else None
    b2 = randn(6, L, hidden).to(torch.bfloat16) if biased else None
    w13 = order.join(gate, up, 1)
    in_13, in_2 = hidden**-0.5, inter**-0.5
    fp8, e8 = torch.float8_e4m3fn, torch.float8_e8m0fnu
    channels = order.join(positive(7, L, inter), positive(8, L, inter), 1) * in_13 / 32, positive(9, L, hidden) * in_2 / 32
    match form:
        case "bf16":
            return Bf16ExpertWeights((w13 * in_13).to(torch.bfloat16), (w2 * in_2).to(torch.bfloat16), order, b13, b2)
        case "fp16":
            return Fp16ExpertWeights((w13 * in_13).half(), (w2 * in_2).half(), order)
        case "fp8-tensor":
            scales = torch.stack((positive(7, L), positive(8, L) * 2), 1) * in_13 / 32, positive(9, L) * in_2 / 32
            return Fp8TensorExpertWeights((w13 * 32).to(fp8), (w2 * 32).to(fp8), *scales, order, b13, b2)
        case "fp8-channel":
            return Fp8ChannelExpertWeights((w13 * 32).to(fp8), (w2 * 32).to(fp8), *channels, order, b13, b2)
        case "int8-channel":
            codes = (w13 * 32).round().clamp(-127, 127).to(torch.int8), (w2 * 32).round().clamp(-127, 127).to(torch.int8)
            return Int8ChannelExpertWeights(*codes, *channels, order, b13, b2)
        case "fp8-block128":
            scales = positive(7, L, 2 * inter // 128, hidden // 128) * in_13 / 32, positive(8, L, hidden // 128, inter // 128) * in_2 / 32
            return Fp8Block128ExpertWeights((w13 * 32).to(fp8), (w2 * 32).to(fp8), *scales, order, b13, b2)
        case "mxfp8":
            s13 = order.join(_bytes(7, 118, 120, L, inter, hidden // 32), _bytes(8, 118, 120, L, inter, hidden // 32), 1)
            s2 = _bytes(9, 118, 120, L, hidden, inter // 32)
            return MxFp8ExpertWeights((w13 * 32).to(fp8), (w2 * 32).to(fp8), s13.view(e8), s2.view(e8), order, b13, b2)
        case _:
            fp4 = torch.float4_e2m1fn_x2
            half_gate, half_up = _bytes(1, 0, 256, L, inter, hidden // 2), _bytes(2, 0, 256, L, inter, hidden // 2)
            half_2 = _bytes(3, 0, 256, L, hidden, inter // 2)
            s13 = order.join(_bytes(7, 120, 123, L, inter, hidden // 32), _bytes(8, 120, 123, L, inter, hidden // 32), 1)
            s2 = _bytes(9, 120, 123, L, hidden, inter // 32)
            return MxFp4ExpertWeights(order.join(half_gate, half_up, 1).view(fp4), half_2.view(fp4), s13.view(e8), s2.view(e8), order, b13, b2)


def static_scales(w13_input: float | None = None, w2_input: float = 1 / 32) -> StaticScales:
    """Return calibrated scales. ``w2_input``: what lies between products of these weights is below 448 / 32, or little of it is not."""
    first = None if w13_input is None else ScaleFactor(torch.tensor([w13_input]))
    return StaticScales(w13_input=first, w2_input=ScaleFactor(torch.tensor([w2_input])))


def _static(form: Form) -> dict[str, StaticScales]:
    return {"static": static_scales()} if form == "fp8-tensor" else {}


def prepare(form: Form, weights: ExpertWeights[GateUpOrder], library: AiterLibrary, options: AiterOptions | None = None) -> AiterWeights:
    """Prepare weights whose class no checker knows."""
    call = cast("Callable[..., AiterWeights]", prepare_aiter)
    chosen = {"layout": LAYOUTS[form]} if form in LAYOUTS else {}
    return call(weights, library, options=options or AiterOptions(), **chosen, **_static(form))


def prepare_fnuz(form: Form, weights: ExpertWeights[GateUpOrder], library: AiterLibrary) -> AiterWeights:
    return cast("Callable[..., AiterWeights]", prepare_aiter_fnuz)(weights, library, **_static(form))


# ---- rows ----------------------------------------------------------------------------------------------------------------------------------


def make_rows(cls: type[Payload], rows: int, seed: int = 20, hidden: int = HIDDEN) -> Payload:
    """Return rows of a class."""
    data = randn(seed, rows, hidden)
    if cls in (Fp8TensorRows, Fp8FnuzTensorRows):
        dtype = cls.format.data_dtype
        scale = (data.abs().max() / torch.finfo(dtype).max).view(1)
        return cast("Callable[..., Payload]", cls)((data / scale).to(dtype), scale)
    if cls in (Fp8TokenRows, Fp8FnuzTokenRows):
        dtype = cls.format.data_dtype
        scale = data.abs().amax(1) / torch.finfo(dtype).max
        return cast("Callable[..., Payload]", cls)((data / scale[:, None]).to(dtype), scale)
    if cls is Int8TokenRows:
        scale = data.abs().amax(1) / 127
        return Int8TokenRows((data / scale[:, None]).round().to(torch.int8), scale)
    if cls is Fp8FnuzBlock128Rows:
        groups = data.view(rows, -1, 128)
        scale = groups.abs().amax(2) / torch.finfo(FNUZ).max
        return Fp8FnuzBlock128Rows((groups / scale[:, :, None]).view(rows, hidden).to(FNUZ), scale)
    if cls is Bf16Rows:
        return Bf16Rows(data.to(torch.bfloat16))
    if cls is Fp16Rows:
        return Fp16Rows(data.half())
    exact = Fp32Rows(data)
    if cls is Fp8Block128Rows:
        return quantize_fp8_block128.run(exact)
    return quantize_mxfp4.run(exact) if cls.format.per_element == 2 else quantize_mxfp8.run(exact)


def out_dtype(form: Form) -> torch.dtype:
    return torch.float16 if form == "fp16" else torch.bfloat16


def local_routing(ids: Tensor, experts: int = L, live: int | None = None) -> Routing[LocalIds, Settled]:
    weights = torch.rand(ids.shape, generator=torch.Generator().manual_seed(30)) + 0.1
    return Routing(ids.to(torch.int32), weights, LocalIds, experts, Settled(), False, ids.shape[0] if live is None else live)


def sink_routing(ids: Tensor) -> Routing[LocalSinkIds, Settled]:
    return to_sink(local_routing(ids))


def random_ids(rows: int, count: int, k: int = K) -> Tensor:
    """Return k distinct ids a row."""
    return torch.rand(rows, count, generator=torch.Generator().manual_seed(31)).argsort(1)[:, :k].to(torch.int32)


def slot_input(payload: Payload, ids: Tensor, live: int | DeviceCount, dtype: torch.dtype, output: Tensor | None = None) -> AiterSlotInput:
    """Return rows with slots over all ranks; which of them are here is in HERE."""
    mask = torch.zeros(SLOTS, dtype=torch.int32)
    mask[list(HERE)] = 1
    weights = torch.rand(ids.shape, generator=torch.Generator().manual_seed(30)) + 0.1
    routing = Routing(ids, weights, PhysicalIds, SLOTS, Settled(), False, live)
    return AiterSlotInput(payload, routing, ExpertMask(mask, PhysicalIds), dtype, output)


def localized(ids: Tensor) -> Tensor:
    """Return the local number of each slot, -1 for slots of other ranks: by a loop over the slots in ascending order."""
    found = torch.full_like(ids, -1)
    for number, slot in enumerate(sorted(HERE)):
        found[ids == slot] = number
    return found


# ---- comparison ----------------------------------------------------------------------------------------------------------------------------


def reference(payload: Payload, ids: Tensor, topk_weights: Tensor, weights: ExpertWeights[GateUpOrder], activation: Activation) -> Tensor:
    return reference_experts(payload.dequantize(), ids, topk_weights, weights, activation)


def distance(found: Tensor, expected: Tensor) -> float:
    """Return |found - expected| / |expected|."""
    return float((found.float() - expected).square().sum().sqrt() / expected.square().sum().sqrt())


def accepted(prepared: AiterWeights) -> tuple[type[Payload], ...]:
    return cast("Callable[[], tuple[type[Payload], ...]]", getattr(prepared, "accepts"))()  # noqa: B009 - the base does not have it


def sink_input(payload: Payload, ids: Tensor, form: Form) -> AiterSinkInput:
    return AiterSinkInput(payload, sink_routing(ids), out_dtype(form))


def activation_of(form: Form) -> Activation:
    """Return an activation for which AITER chooses this layout."""
    return OAI if form == "a16w4" else SILU


def make_runner(form: Form, weights: ExpertWeights[GateUpOrder], library: AiterLibrary, options: AiterOptions | None = None) -> AiterRunner:
    return prepare(form, weights, library, options).runner(activation_of(form))
