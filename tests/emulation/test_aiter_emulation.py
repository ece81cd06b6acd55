"""The emulated AITER against a plain float32 layer: every quant type, id space and number of rows, and what else changes the numbers."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.emulation.aiter.enums import ActivationType, QuantType
from tests.emulation.aiter.library import VersionName
from tests.emulation.aiter_cases import (
    BF16,
    FP8,
    FP8_MAX,
    KINDS,
    ROUNDING,
    H,
    I,
    Kind,
    L,
    Layer,
    Space,
    distance,
    make_aiter,
    make_hidden,
    make_layer,
    make_routes,
    oai_gate,
    reference,
    rounded,
    silu_gate,
    tolerance,
)


def call(layer: Layer, tokens: int, space: Space = "plain", *, kind: Kind, **changes: object) -> tuple[Tensor, Tensor, Tensor]:
    routes, hidden = make_routes(tokens, space), make_hidden(tokens)
    library = make_aiter(kind)
    static = {"a2_scale": torch.tensor([2.0**-5])} if kind == "per_tensor" and space != "plain" else {}  # rows that nobody writes are in any other
    out = library.fused_moe(hidden_states=hidden, **{**layer.arguments, **routes.arguments, **static, **changes})
    return out, reference(layer, hidden, routes), routes.local


@pytest.mark.parametrize("space", ["plain", "masked", "sink"])
@pytest.mark.parametrize("tokens", [1, 5, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_every_quant_type_is_near_a_float32_layer(kind: Kind, tokens: int, space: Space) -> None:
    layer = make_layer(make_aiter(kind), kind)
    out, expected, local = call(layer, tokens, space, kind=kind)
    assert out.shape == (tokens, H)
    assert out.dtype is torch.bfloat16
    absent = (local < 0).all(1)
    assert absent.any() == (space != "plain")
    assert (out[absent] == 0).all()
    if not absent.all():
        assert distance(out, expected) < tolerance(kind)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "per_tensor"])
def test_rounding_the_rows_alike_leaves_bfloat16(kind: Kind) -> None:
    layer = make_layer(make_aiter(kind), kind)
    routes, hidden = make_routes(64), make_hidden(64)
    out = make_aiter(kind).fused_moe(hidden_states=hidden, **layer.arguments, **routes.arguments)
    expected = reference(layer, hidden, routes, rounded(kind))
    assert distance(out, expected) < 2 * BF16
    if ROUNDING[kind]:
        assert distance(out, reference(layer, hidden, routes)) > 2 * BF16  # so the rounding is seen


def test_static_scales_of_a_tensor_are_used() -> None:
    library = make_aiter()
    layer, routes, hidden = make_layer(library, "per_tensor"), make_routes(5), make_hidden(5)
    static = {"a1_scale": torch.tensor([2.0**-6]), "a2_scale": torch.tensor([2.0**-7])}
    out = library.fused_moe(hidden_states=hidden, **layer.arguments, **routes.arguments, **static)
    scales = iter(static.values())
    first = next(scales)

    def keep(value: Tensor) -> Tensor:
        scale = first if value.shape[-1] == H else static["a2_scale"]
        return (value.bfloat16().float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8).float() * scale

    assert distance(out, reference(layer, hidden, routes, keep)) < 2 * BF16


def test_rows_past_the_count_are_poison() -> None:
    layer = make_layer(make_aiter(), "no")
    count = torch.tensor([3], dtype=torch.int32)
    out, expected, _ = call(layer, 5, kind="no", num_local_tokens=count)
    assert out[3:].isnan().all()
    assert distance(out[:3], expected[:3]) < tolerance("no")


def test_ids_past_the_count_are_not_read() -> None:
    layer, routes = make_layer(make_aiter(), "no"), make_routes(5)
    routes.ids[3:] = -1
    count = torch.tensor([3], dtype=torch.int32)
    out, expected, _ = call(layer, 5, kind="no", num_local_tokens=count, topk_ids=routes.ids)
    assert distance(out[:3], expected[:3]) < tolerance("no")


def test_float16_comes_out_where_it_is_asked_for() -> None:
    layer = make_layer(make_aiter(), "per_128x128")
    out, expected, _ = call(layer, 5, kind="per_128x128", dtype=torch.float16)
    assert out.dtype is torch.float16
    assert distance(out, expected) < tolerance("per_128x128")


def test_weights_in_stage_1_count_before_bias_and_activation() -> None:
    layer, routes, hidden = make_layer(make_aiter(), "a16w4"), make_routes(5), make_hidden(5)
    bias1, bias2 = torch.randn(L, 2 * I), torch.randn(L, H)
    for early in (False, True):
        expected = torch.zeros(5, H)
        for row, slot, expert in routes.each():
            weight = routes.weights[row, slot]
            inter = oai_gate(layer.w1[expert] @ hidden[row].float() * (weight if early else 1) + bias1[expert])
            expected[row] += (layer.w2[expert] @ inter + bias2[expert]) * (1 if early else weight)
        out, _, _ = call(layer, 5, kind="a16w4", bias1=bias1, bias2=bias2, doweight_stage1=early)
        assert distance(out, expected) < tolerance("a16w4")


def test_a_limit_clamps_gate_above_and_up_on_both_sides() -> None:
    kind: Kind = "a4w4"
    limit = 0.25
    layer, routes, hidden = make_layer(make_aiter(), kind), make_routes(64), make_hidden(64)
    out = make_aiter().fused_moe(hidden_states=hidden, **layer.arguments, **routes.arguments, swiglu_limit=limit)
    keep, expected = rounded(kind), torch.zeros(64, H)
    for row, slot, expert in routes.each():
        g, u = (layer.w1[expert] @ keep(hidden[row, None].float())[0]).chunk(2)
        inter = torch.nn.functional.silu(g.clamp(max=limit)) * u.clamp(-limit, limit)
        expected[row] += routes.weights[row, slot] * (layer.w2[expert] @ keep(inter[None])[0])
    assert distance(out, expected) < 2 * BF16


def test_experts_without_gate_have_one_half() -> None:
    library = make_aiter()
    layer, routes, hidden = make_layer(library, "no"), make_routes(5), make_hidden(5)
    up = layer.codes[0][:, :I].contiguous()
    out = library.fused_moe(hidden_states=hidden, **{**layer.arguments, **routes.arguments, "w1": library.shuffle_weight(up)})
    expected = torch.zeros(5, H)
    for row, slot, expert in routes.each():
        inter = torch.nn.functional.silu(up[expert].float() @ hidden[row].float())
        expected[row] += routes.weights[row, slot] * (layer.w2[expert] @ inter)
    assert distance(out, expected) < tolerance("no")


def test_rows_that_are_quantised_already_pass_with_their_scale() -> None:
    kinds: tuple[Kind, ...] = ("per_token_fp8", "per_128x128")
    for kind in kinds:
        library = make_aiter()
        layer, routes, hidden = make_layer(library, kind), make_routes(64), make_hidden(64)
        quant = library.get_hip_quant(QuantType.per_Token if kind == "per_token_fp8" else QuantType.per_1x128)
        payload, scale = quant(hidden, quant_dtype=FP8)
        arguments = {**layer.arguments, **routes.arguments, "a1_scale": scale}
        passed = library.fused_moe(hidden_states=payload, dtype=torch.bfloat16, **arguments)
        assert library.decisions[-1].branch == 7
        assert torch.equal(passed, library.fused_moe(hidden_states=hidden, **{**arguments, "a1_scale": None}))
        assert library.decisions[-1].branch == 6


def test_rows_of_microscaled_formats_pass_in_the_versions_that_have_it() -> None:
    cases: tuple[tuple[Kind, VersionName, torch.dtype, int], ...] = (
        ("a4w4", "head", torch.float4_e2m1fn_x2, 5),
        ("a8w4", "later", FP8, 3),
        ("mxfp8", "later", FP8, 3),
    )
    for kind, version, dtype, branch in cases:
        library = make_aiter(kind, version=version)
        layer, routes, hidden = make_layer(library, kind), make_routes(64), make_hidden(64)
        payload, scale = library.get_hip_quant(QuantType.per_1x32)(hidden, quant_dtype=dtype, scale_type=torch.float8_e8m0fnu)
        arguments = {**layer.arguments, **routes.arguments}
        passed = library.fused_moe(hidden_states=payload, dtype=torch.bfloat16, a1_scale=scale, **arguments)
        assert library.decisions[-1].branch == branch
        assert torch.equal(passed, library.fused_moe(hidden_states=hidden, **arguments))


def test_activations_are_their_formulas() -> None:
    library = make_aiter()
    layer, routes, hidden = make_layer(library, "no"), make_routes(5), make_hidden(5)
    gates: dict[ActivationType, Callable[[Tensor], Tensor]] = {
        ActivationType.Silu: silu_gate,
        ActivationType.Swiglu: oai_gate,
        ActivationType.Gelu: lambda h: torch.nn.functional.gelu(h[:I]) * h[I:],
    }
    for activation, gate in gates.items():
        out = library.fused_moe(hidden_states=hidden, **layer.arguments, **routes.arguments, activation=activation)
        expected = torch.zeros(5, H)
        for row, slot, expert in routes.each():
            expected[row] += routes.weights[row, slot] * (layer.w2[expert] @ gate(layer.w1[expert] @ hidden[row].float()))
        assert distance(out, expected) < tolerance("no")
