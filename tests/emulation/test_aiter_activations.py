"""What becomes of the rows and their scale before stage 1: every branch, with the precision that the library chose by itself."""

from typing import Final, Literal

import pytest
import torch

from tests.emulation.aiter.dtypes import Gfx
from tests.emulation.aiter.enums import ActivationType, QuantType
from tests.emulation.aiter.library import Tuned, VersionName
from tests.emulation.aiter.misuse import Reason
from tests.emulation.aiter_cases import FP8, H, Kind, distance, make_aiter, make_hidden, make_layer, make_routes
from tests.emulation.aiter_hazards import (
    NOISE,
    TOKENS,
    Arguments,
    Case,
    Hazard,
    check_hazard,
    mxfp8,
    quantised,
    scale_of,
    transposed,
)

FP4: Final = torch.float4_e2m1fn_x2
E8M0: Final = torch.float8_e8m0fnu
BF16: Final = torch.bfloat16


def blocks(case: Case) -> Arguments:
    return quantised(case, QuantType.per_1x128, quant_dtype=FP8)


def tokens(case: Case) -> Arguments:
    return quantised(case, QuantType.per_Token, quant_dtype=FP8)


def scale_of_ones(case: Case) -> Arguments:
    """Return the rows of bfloat16 with a scale that nobody reads."""
    return {"a1_scale": torch.ones(TOKENS, H // 32).to(E8M0)}


def only_cast(case: Case) -> Arguments:
    """Return the fp8 rows as bfloat16, as if their scale was 1."""
    rows = mxfp8(case)["hidden_states"]
    assert isinstance(rows, torch.Tensor)
    return {"hidden_states": rows.to(BF16)}


def changed_scale(case: Case, rows: Arguments, *, group: int) -> Arguments:
    """Return rows with one scale for every ``group`` columns in float32, where that is not what the kernel reads."""
    return {**rows, "a1_scale": scale_of(rows).float().repeat_interleave(H // group // scale_of(rows).shape[-1], -1)}


DISCARDED: Final = (Reason.SCALE_DISCARDED, "a1_scale")
HAZARDS: Final = (
    # 1: the kernel quantises itself
    Hazard(*DISCARDED, blocks, lambda c: {**blocks(c), "a1_scale": None}, kind="per_128x128", tuned=Tuned(self_quantizing=True)),
    Hazard(*DISCARDED, blocks, NOISE, kind="per_128x128", tuned=Tuned(self_quantizing=True)),
    # 2: rows are cast
    Hazard(*DISCARDED, scale_of_ones, lambda _: {}, kind="a16w4"),
    Hazard(*DISCARDED, mxfp8, only_cast, kind="a16w4"),
    Hazard(*DISCARDED, mxfp8, NOISE, kind="a16w4"),
    Hazard(*DISCARDED, mxfp8, only_cast, kind="a8w4", version="later", env={"AITER_BF16_FP8_MOE_BOUND": "6"}),
    Hazard(*DISCARDED, scale_of_ones, lambda _: {}, kind="a4w4", tuned=Tuned(split_k=True)),
    Hazard(Reason.CAST_WITHOUT_SCALE, "hidden_states", lambda c: {**mxfp8(c), "a1_scale": None}, only_cast, kind="a16w4"),
    # 3: fp8 over microscaled weights
    Hazard(*DISCARDED, scale_of_ones, lambda _: {}, kind="a8w4"),
    Hazard(*DISCARDED, scale_of_ones, lambda _: {}, kind="mxfp8", version="later"),
    Hazard(Reason.DTYPE, "a1_scale", blocks, NOISE, kind="a8w4", version="later"),
    Hazard(Reason.DTYPE, "a1_scale", lambda c: quantised(c, QuantType.per_1x32, quant_dtype=FP8), NOISE, kind="mxfp8", version="later"),
    Hazard(
        Reason.STRIDES,
        "a1_scale",
        lambda c: {**mxfp8(c), "a1_scale": transposed(scale_of(mxfp8(c)))},
        lambda c: {**mxfp8(c), "a1_scale": scale_of(mxfp8(c)).t().reshape(TOKENS, -1)},
        kind="mxfp8",
        version="later",
    ),
    Hazard(
        Reason.SHAPE,
        "a1_scale",
        lambda c: quantised(c, QuantType.per_1x32, quant_dtype=FP8, scale_type=E8M0, shuffle=True),
        NOISE,
        kind="a8w4",
        version="later",
    ),
    # 5: fp4
    Hazard(*DISCARDED, scale_of_ones, lambda _: {}, kind="a4w4"),
    # 7: rows that are quantised already
    Hazard(
        Reason.SHAPE,
        "a1_scale",
        lambda c: changed_scale(c, tokens(c), group=128),
        lambda c: {**tokens(c), "a1_scale": scale_of(changed_scale(c, tokens(c), group=128)).flatten()[:TOKENS, None].contiguous()},
        kind="per_token_fp8",
    ),
    Hazard(Reason.DTYPE, "a1_scale", mxfp8, NOISE, kind="per_128x128"),
    Hazard(
        Reason.STRIDES,
        "a1_scale",
        lambda c: {**blocks(c), "a1_scale": transposed(scale_of(blocks(c)))},
        lambda c: {**blocks(c), "a1_scale": scale_of(blocks(c)).t().reshape(TOKENS, -1)},
        kind="per_128x128",
    ),
    Hazard(*DISCARDED, lambda _: {"a1_scale": torch.ones(1)}, lambda _: {}),
)


@pytest.mark.parametrize("hazard", HAZARDS, ids=lambda hazard: f"{hazard.kind}-{hazard.operand}-{hazard.reason.name}")
def test_a_scale_that_is_not_read_or_misread(hazard: Hazard) -> None:
    check_hazard(hazard)


@pytest.mark.parametrize("mode", ["strict", "faithful"])
def test_the_launchers_raise_in_both_modes(mode: Literal["strict", "faithful"]) -> None:
    def outcome(kind: Kind, change: Arguments, version: VersionName = "head") -> type[BaseException]:
        case = Hazard(*DISCARDED, scale_of_ones, NOISE, kind=kind, version=version).case(mode)
        with pytest.raises((RuntimeError, ValueError, AssertionError)) as raised:
            case.library.fused_moe(**{**case.arguments, **change})
        return raised.type

    case = Hazard(*DISCARDED, scale_of_ones, NOISE).case("strict")
    passed = mxfp8(case)
    fp4 = quantised(case, QuantType.per_1x32)
    static: Arguments = {"a1_scale": torch.ones(1)}
    one = torch.tensor([1], dtype=torch.int32)
    assert outcome("a8w4", passed) is RuntimeError  # HEAD has no passthrough
    assert outcome("mxfp8", passed) is RuntimeError
    assert outcome("mxfp8", {**passed, "a1_scale": None}, "later") is RuntimeError
    assert outcome("a4w4", passed) is RuntimeError
    assert outcome("a4w4", {**fp4, "a1_scale": None}) is RuntimeError
    assert outcome("a16w4", fp4) is RuntimeError
    assert outcome("a4w4", fp4, "0.1.7") is ValueError  # the wheel takes no rows that are fp4 already
    assert outcome("per_token_fp8", static) is ValueError
    assert outcome("per_128x128", static) is ValueError
    assert outcome("per_128x128", {**blocks(case), "a1_scale": None}) is AssertionError
    assert outcome("per_tensor", {"num_local_tokens": one}) is AssertionError
    fp8 = {"hidden_states": case.hidden.to(FP8), "a1_scale": torch.ones(1), "a2_scale": torch.ones(1), "dtype": torch.bfloat16}
    assert outcome("per_tensor", {**fp8, "num_local_tokens": one}) is AssertionError  # the quantiser of stage 2
    assert outcome("per_token_int8", {**tokens(case), "a1_scale": None}) is RuntimeError
    assert outcome("per_token_fp8", {"a2_scale": torch.ones(1)}) is ValueError
    assert outcome("per_128x128", {"a2_scale": torch.ones(1)}) is ValueError


def chosen(
    rows: int, changes: Arguments | None = None, *, gfx: Gfx = "gfx950", version: VersionName = "head", env: dict[str, str] | None = None
) -> torch.dtype:
    """Return the precision that a call with fp4 weights gets."""
    library = make_aiter("a4w4", "faithful", version=version, gfx=gfx, env=env)
    arguments = {**make_layer(library, "a4w4").arguments, **(changes or {})}
    library.fused_moe(hidden_states=make_hidden(rows), **arguments, **make_routes(rows).arguments)
    return library.decisions[-1].activation


def test_the_precision_depends_on_rows_architecture_and_environment() -> None:
    swiglu: Arguments = {"activation": ActivationType.Swiglu}
    interleave: Arguments = {"gate_mode": "interleave"}
    assert chosen(5) is FP4
    assert chosen(255, swiglu) is BF16
    assert chosen(256, swiglu) is FP4
    assert chosen(5, swiglu, env={"GPTOSS_SWIGLU_MXFP4_BF16_BOUND": "5"}) is FP4
    assert chosen(255, interleave) is BF16
    assert chosen(256, interleave) is FP8
    assert chosen(256, interleave, gfx="gfx942") is BF16
    assert chosen(5, interleave, env={"AITER_BF16_FP8_MOE_BOUND": "0"}) is FP8
    assert chosen(256, {**swiglu, **interleave}) is FP8
    assert chosen(256, swiglu, version="0.1.7") is BF16
    assert chosen(5, version="0.1.7") is FP4
    assert chosen(5, {"quant_dtype_a": FP8}, version="later") is FP8


def test_the_precision_can_be_asked_for_where_no_rows_are_known() -> None:
    library = make_aiter(version="later")
    swiglu = ActivationType.Swiglu
    assert library.resolve_activation_dtype(QuantType.per_1x32, FP4) is FP4
    assert library.resolve_activation_dtype(QuantType.per_1x32, FP8) is FP8
    assert library.resolve_activation_dtype(QuantType.per_128x128, FP8) is FP8
    assert library.resolve_activation_dtype(QuantType.per_1x32, FP4, swiglu) is None
    assert library.resolve_activation_dtype(QuantType.per_1x32, FP4, swiglu, M=255) is BF16
    assert library.resolve_activation_dtype(QuantType.per_1x32, FP4, gate_mode="interleave", M=256) is FP8
    assert make_aiter(gfx="gfx942").resolve_activation_dtype(QuantType.per_1x32, FP4, gate_mode="interleave") is BF16
    assert "resolve_activation_dtype" in vars(library.modules()["aiter.fused_moe"])
    assert "resolve_activation_dtype" not in vars(make_aiter().modules()["aiter.fused_moe"])


def test_the_precision_of_situ_is_that_of_the_environment() -> None:
    situ: Arguments = {"activation": ActivationType.Situv2, "beta": 4.0, "linear_beta": 25.0}
    assert chosen(300, situ) is BF16
    assert chosen(5, situ, env={"AITER_SITUV2_A8W4": "1"}) is FP8
    assert chosen(5, situ, env={"AITER_SITUV2_A4W4": "1"}) is FP4


def test_rows_that_fill_a_receive_buffer_decide_the_precision() -> None:
    """The padded rows count, not those that are live: the same live rows get another precision in a larger buffer."""
    library = make_aiter("a4w4", "faithful")
    arguments = {**make_layer(library, "a16w4").arguments, "num_local_tokens": torch.tensor([TOKENS], dtype=torch.int32)}
    outputs = [
        library.fused_moe(hidden_states=make_hidden(256)[:rows], **arguments, topk_ids=routes.ids[:rows], topk_weight=routes.weights[:rows])
        for routes in (make_routes(256),)
        for rows in (255, 256)
    ]
    assert [decision.activation for decision in library.decisions] == [BF16, FP4]
    assert distance(outputs[0][:TOKENS], outputs[1][:TOKENS]) > 2.0**-7


def test_situ_over_bfloat16_refuses_what_its_kernel_has_not() -> None:
    library = make_aiter("a16w4")
    layer, hidden = make_layer(library, "a16w4"), make_hidden(TOKENS)
    situ = {**layer.arguments, "activation": ActivationType.Situv2, "beta": 4.0, "linear_beta": 25.0}
    plain, masked = make_routes(TOKENS).arguments, make_routes(TOKENS, "masked").arguments
    assert library.fused_moe(hidden_states=hidden, **situ, **plain).isfinite().all()
    for refused in ({**plain, "doweight_stage1": True}, masked, {**plain, "bias2": torch.zeros(4, H)}):
        with pytest.raises(NotImplementedError, match="Situv2"):
            library.fused_moe(hidden_states=hidden, **situ, **refused)
