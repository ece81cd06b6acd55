"""What the real AITER does not notice: strict mode raises for each, and faithful mode has the real consequence."""

from typing import Final, Literal

import pytest
import torch

from tests.emulation.aiter.library import Tuned, VersionName
from tests.emulation.aiter.misuse import EmulatedMisuse, Reason
from tests.emulation.aiter.shuffles import is_marked, mark
from tests.emulation.aiter_cases import FP8, H, I, K, L, distance, make_aiter, make_hidden, make_layer, make_routes
from tests.emulation.aiter_hazards import (
    FNUZ,
    NOISE,
    POISON,
    TOKENS,
    Hazard,
    check_hazard,
    count,
    lane_weights,
    long_ids,
    many_slots,
    marked_plain,
    one_hot_id,
    situ,
    transposed,
    twice,
    two_routes,
    without_first_route,
    without_last,
    word_ids,
)

HAZARDS: Final = (
    Hazard(Reason.DTYPE, "topk_ids", long_ids, POISON),
    Hazard(Reason.DTYPE, "topk_ids", long_ids, word_ids, env={"AITER_USE_CK_MOE_SORTING": "1"}),
    Hazard(Reason.STRIDES, "topk_ids", lambda c: {"topk_ids": transposed(c.routes.ids)}, lambda c: {"topk_ids": c.routes.ids.t().reshape(TOKENS, K)}),
    Hazard(
        Reason.STRIDES,
        "topk_weight",
        lambda c: {"topk_weight": transposed(c.routes.weights)},
        lambda c: {"topk_weight": c.routes.weights.t().reshape(TOKENS, K)},
    ),
    Hazard(
        Reason.STRIDES,
        "hidden_states",
        lambda c: {"hidden_states": transposed(c.hidden)},
        lambda c: {"hidden_states": c.hidden.t().reshape(TOKENS, H)},
    ),
    Hazard(Reason.SHAPE, "topk_weight", lambda c: {"topk_weight": c.routes.weights[:, :1].contiguous()}, POISON),
    Hazard(Reason.SHAPE, "hidden_states", lambda c: {"hidden_states": c.hidden[:2]}, POISON),
    Hazard(Reason.NO_ROWS, "hidden_states", lambda c: {"hidden_states": c.hidden[:0], **make_routes(0).arguments}, POISON),
    Hazard(Reason.HIDDEN_DTYPE, "hidden_states", lambda c: {"hidden_states": c.hidden.float(), "dtype": torch.bfloat16}, POISON),
    Hazard(Reason.HIDDEN_DTYPE, "hidden_states", lambda c: {"hidden_states": c.hidden.to(FP8), "dtype": torch.bfloat16}, POISON),
    Hazard(Reason.NEGATIVE_ID, "topk_ids", lambda c: one_hot_id(c, -1), POISON),
    Hazard(Reason.NEGATIVE_ID, "topk_ids", lambda c: one_hot_id(c, -1), POISON, space="sink"),
    Hazard(Reason.ID_RANGE, "topk_ids", lambda c: one_hot_id(c, L), POISON),
    Hazard(Reason.ID_RANGE, "topk_ids", lambda c: {"expert_mask": c.mask[:-1]}, POISON, space="sink"),
    Hazard(Reason.DUPLICATE_EXPERT, "topk_ids", lambda c: {"topk_ids": twice(c)}, without_first_route),
    Hazard(Reason.SORT_LIMIT, "topk_ids", many_slots, POISON),
    Hazard(Reason.RANGE, "num_local_tokens", lambda _: count(TOKENS + 1), POISON),
    Hazard(Reason.RANGE, "num_local_tokens", lambda _: count(-1), POISON),
    Hazard(Reason.DTYPE, "num_local_tokens", lambda _: count(3, torch.int64), lambda _: count(3)),
    Hazard(Reason.DTYPE, "expert_mask", lambda c: {"expert_mask": c.mask.bool()}, NOISE, space="masked"),
    Hazard(
        Reason.DTYPE,
        "expert_mask",
        lambda c: {"expert_mask": c.mask.long()},
        lambda c: {"expert_mask": c.mask.long().view(torch.int32)[: len(c.mask)]},
        space="masked",
    ),
    Hazard(Reason.MASK_VALUE, "expert_mask", lambda c: {"expert_mask": 2 * c.mask}, POISON, space="masked"),
    Hazard(Reason.MASK_VALUE, "expert_mask", lambda c: two_routes(c, mask=(2, 0, 1, 1, 0, 1)), lambda c: two_routes(c, mask=None), space="masked"),
    Hazard(Reason.MASK_SUM, "expert_mask", lambda c: {"expert_mask": torch.ones_like(c.mask)}, POISON, space="masked"),
    Hazard(Reason.UNSHUFFLED, "w1", lambda c: {"w1": c.weight("w1").clone(), "w2": c.weight("w2").clone()}, NOISE),
    Hazard(Reason.UNSHUFFLED, "w1", lambda c: {"w1": c.weight("w1").view(c.weight("w1").shape)}, NOISE, version="0.1.7"),
    Hazard(Reason.UNSHUFFLED, "w1", lambda c: {"w1": c.layer.codes[0], "w2": c.layer.codes[1]}, NOISE),
    Hazard(Reason.WRONG_SHUFFLE, "w1", lane_weights, NOISE, kind="a4w4"),
    Hazard(Reason.MISSING, "w1_scale", lambda _: {"w1_scale": None}, POISON, kind="per_token_fp8"),
    Hazard(Reason.DTYPE, "w1_scale", lambda c: {"w1_scale": c.weight("w1_scale").double()}, NOISE, kind="per_token_fp8"),
    Hazard(Reason.SHAPE, "w1_scale", lambda c: {"w1_scale": c.weight("w1_scale")[:, :1].contiguous()}, NOISE, kind="per_token_fp8"),
    Hazard(Reason.DTYPE, "w1_scale", lambda c: {"w1_scale": c.weight("w1_scale").float()}, NOISE, kind="a4w4"),
    Hazard(Reason.SHAPE, "w2_scale", lambda c: {"w2_scale": c.weight("w2_scale")[: L * H, : I // 32].contiguous()}, NOISE, kind="a4w4"),
    Hazard(Reason.SCALE_DISCARDED, "w1_scale", lambda _: {"w1_scale": torch.ones(L)}, lambda _: {}),
    Hazard(Reason.DTYPE, "w1", lambda c: {"w1": c.weight("w1").view(torch.int16)}, POISON),
    Hazard(
        Reason.DTYPE, "w1", lambda c: {"w1": mark(c.weight("w1").view(FNUZ)), "w2": mark(c.weight("w2").view(FNUZ))}, lambda _: {}, kind="per_tensor"
    ),
    Hazard(Reason.BIAS_IGNORED, "bias1", lambda _: {"bias1": torch.ones(L, 2 * I)}, lambda _: {}),
    Hazard(Reason.BIAS_IGNORED, "bias2", lambda _: {"bias2": torch.ones(L, H)}, lambda _: {}, kind="per_128x128"),
    Hazard(Reason.LIMIT_IGNORED, "swiglu_limit", lambda _: {"swiglu_limit": 0.1}, lambda _: {}),
    Hazard(Reason.PAD_NOT_ZERO, "hidden_pad", lambda _: {"hidden_pad": 64}, lambda c: {"hidden_states": without_last(c.hidden, 64)}),
    Hazard(Reason.PAD_NOT_ZERO, "intermediate_pad", lambda _: {"intermediate_pad": 64}, lambda _: {}),
    Hazard(Reason.CONSTANTS_UNSET, "beta", lambda _: situ(), lambda _: situ(1.0, 1.0), kind="a4w4", env={"AITER_SITUV2_A4W4": "1"}),
    Hazard(Reason.CONSTANTS_UNSET, "linear_beta", lambda _: situ(1.0), lambda _: situ(1.0, 1.0), kind="a4w4", env={"AITER_SITUV2_A4W4": "1"}),
    Hazard(Reason.FLAT_IGNORES, "expert_mask", lambda _: {}, POISON, space="sink", tuned=Tuned(flat=True)),
    Hazard(Reason.FLAT_IGNORES, "num_local_tokens", lambda _: count(2), lambda _: {}, tuned=Tuned(flat=True)),
    Hazard(Reason.SCALE_DISCARDED, "a2_scale", lambda _: {"a2_scale": torch.ones(1)}, lambda _: {}),
    Hazard(Reason.SCALE_DISCARDED, "a1_scale", lambda _: {"a1_scale": torch.ones(1)}, lambda _: {}),
)


MODES: tuple[Literal["strict", "faithful"], ...] = ("strict", "faithful")


@pytest.mark.parametrize("hazard", HAZARDS, ids=lambda hazard: f"{hazard.kind}-{hazard.operand}-{hazard.reason.name}")
def test_a_misuse_raises_in_strict_mode_and_has_its_consequence_in_faithful_mode(hazard: Hazard) -> None:
    check_hazard(hazard)


def test_one_scale_between_the_stages_is_found_among_rows_that_nobody_wrote() -> None:
    """A route that goes nowhere leaves its row as it was; without a static scale that row is in the scale of all."""
    strict, faithful = (Hazard(Reason.UNWRITTEN, "a2_scale", marked_plain, POISON, kind="per_tensor", space="sink").case(mode) for mode in MODES)
    with pytest.raises(EmulatedMisuse) as raised:
        strict.library.fused_moe(**strict.arguments)
    assert (raised.value.reason, raised.value.operand) == (Reason.UNWRITTEN, "a2_scale")
    out, stays = faithful.library.fused_moe(**faithful.arguments), (faithful.routes.local >= 0).any(1)
    assert stays.any()
    assert out[stays].isnan().all()
    assert not out[~stays].any()
    assert strict.library.fused_moe(**strict.arguments, a2_scale=torch.ones(1)).isfinite().all()
    local = {"topk_ids": faithful.routes.local.clamp(min=0)[:, :1].int(), "topk_weight": faithful.routes.weights[:, :1].contiguous()}
    assert strict.library.fused_moe(**{**strict.arguments, **local, "expert_mask": None}).isfinite().all()  # no route goes nowhere


@pytest.mark.parametrize("mode", ["strict", "faithful"])
def test_rows_that_only_look_shuffled_are_noise(mode: Literal["strict", "faithful"]) -> None:
    case = Hazard(Reason.UNSHUFFLED, "w1", marked_plain, NOISE).case(mode)
    out = case.library.fused_moe(**{**case.arguments, **marked_plain(case)})
    assert distance(out, case.library.fused_moe(**case.arguments)) > 0.5


@pytest.mark.parametrize("mode", ["strict", "faithful"])
def test_swapped_halves_are_seen_by_nobody(mode: Literal["strict", "faithful"]) -> None:
    case = Hazard(Reason.UNSHUFFLED, "w1", marked_plain, NOISE).case(mode)
    gate, up = case.layer.codes[0].chunk(2, 1)
    swapped = case.library.shuffle_weight(torch.cat((up, gate), 1))
    assert distance(case.library.fused_moe(**{**case.arguments, "w1": swapped}), case.library.fused_moe(**case.arguments)) > 0.1


def test_a_mark_on_either_weight_is_enough_at_head_and_on_w1_in_the_wheel() -> None:
    versions: tuple[VersionName, ...] = ("head", "0.1.7")
    for version in versions:
        case = Hazard(Reason.UNSHUFFLED, "w1", marked_plain, NOISE, version=version).case("strict")
        name = "w1" if version == "head" else "w2"
        weight = case.weight(name)
        out = case.library.fused_moe(**{**case.arguments, name: weight.view(weight.shape)})
        assert torch.equal(out, case.library.fused_moe(**case.arguments))


def test_the_wheel_does_not_ask_for_a_mark_of_lanes() -> None:
    case = Hazard(Reason.UNSHUFFLED, "w1", marked_plain, NOISE, kind="a16w4", version="0.1.7").case("strict")
    assert not is_marked(case.weight("w1"))
    assert case.library.fused_moe(**case.arguments).isfinite().all()


def test_an_untouched_pad_changes_nothing() -> None:
    library = make_aiter()
    layer, routes, hidden = make_layer(library, "no"), make_routes(TOKENS), make_hidden(TOKENS)
    first, second = (codes.clone() for codes in layer.codes)
    first[:, :, -64:] = 0
    first[:, I - 32 : I] = first[:, -32:] = second[:, :, -32:] = 0
    arguments = {**layer.arguments, **routes.arguments, "w1": library.shuffle_weight(first), "w2": library.shuffle_weight(second)}
    padded = library.fused_moe(hidden_states=hidden, **arguments, hidden_pad=64, intermediate_pad=32)
    assert distance(padded, library.fused_moe(hidden_states=hidden, **arguments)) < 2.0**-7


def test_the_flat_kernels_convert_ids_and_weights() -> None:
    case = Hazard(Reason.UNSHUFFLED, "w1", marked_plain, NOISE, tuned=Tuned(flat=True)).case("strict")
    wide = {"topk_ids": case.routes.ids.long(), "topk_weight": case.routes.weights.double()}
    assert torch.equal(case.library.fused_moe(**{**case.arguments, **wide}), case.library.fused_moe(**case.arguments))
