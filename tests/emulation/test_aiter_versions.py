"""Versions, architectures and tuned rows of the emulated AITER: what they add, and numbers that they change."""

import inspect

import pytest
import torch

from tests.emulation.aiter.dtypes import Gfx
from tests.emulation.aiter.enums import ActivationType, QuantType
from tests.emulation.aiter.library import Tuned, VersionName
from tests.emulation.aiter.misuse import EmulatedMisuse, Reason
from tests.emulation.aiter_cases import (
    BF16,
    FP8,
    H,
    K,
    Kind,
    distance,
    make_aiter,
    make_hidden,
    make_layer,
    make_routes,
    oai_gate,
    reference,
    rounded,
    tolerance,
)

FNUZ = torch.float8_e4m3fnuz
CASES: tuple[tuple[VersionName, Gfx, Kind], ...] = (
    ("0.1.7", "gfx950", "no"),
    ("0.1.7", "gfx950", "per_128x128"),
    ("0.1.7", "gfx950", "a4w4"),
    ("0.1.7", "gfx950", "a16w4"),
    ("0.1.7", "gfx942", "per_token_fp8"),
    ("head", "gfx942", "per_tensor"),
    ("head", "gfx942", "per_128x128"),
    ("head", "gfx942", "mxfp8"),
    ("later", "gfx950", "a8w4"),
)


@pytest.mark.parametrize(("version", "gfx", "kind"), CASES)
def test_versions_and_architectures_are_near_a_float32_layer(version: VersionName, gfx: Gfx, kind: Kind) -> None:
    library = make_aiter(kind, version=version, gfx=gfx)
    layer = make_layer(library, kind, FNUZ if gfx == "gfx942" else FP8)
    # with one scale for all, rows between the products that no stage wrote would be in it: no route may be dropped
    routes, hidden = make_routes(64, "plain" if kind == "per_tensor" else "masked"), make_hidden(64)
    out = library.fused_moe(hidden_states=hidden, **layer.arguments, **routes.arguments)
    assert distance(out, reference(layer, hidden, routes)) < tolerance(kind)


def test_the_wheel_and_head_round_fp4_apart() -> None:
    hidden, routes = make_hidden(64), make_routes(64)
    wheel, head = make_aiter("a4w4", version="0.1.7"), make_aiter("a4w4")
    layers = [(library, make_layer(library, "a4w4")) for library in (wheel, head)]
    outputs = [library.fused_moe(hidden_states=hidden, **layer.arguments, **routes.arguments) for library, layer in layers]
    assert distance(outputs[0], outputs[1]) > 4 * BF16


@pytest.mark.parametrize("kind", ["no", "a4w4", "a16w4", "a8w4", "per_128x128"])
def test_a_kernel_that_quantises_itself_has_the_same_numbers(kind: Kind) -> None:
    outputs: list[torch.Tensor] = []
    for tuned in (Tuned(), Tuned(self_quantizing=True)):
        library = make_aiter(kind, tuned=tuned)
        arguments = {**make_layer(library, kind).arguments, **make_routes(5).arguments}
        outputs.append(library.fused_moe(hidden_states=make_hidden(5), **arguments))
        assert (library.decisions[-1].branch == 1) == tuned.self_quantizing
    assert torch.equal(*outputs)


def test_rows_with_one_scale_pass_too() -> None:
    library = make_aiter()
    layer, routes, hidden = make_layer(library, "per_tensor"), make_routes(5), make_hidden(5)
    payload, scale = library.get_hip_quant(QuantType.per_Tensor)(hidden, quant_dtype=FP8)
    arguments = {**layer.arguments, **routes.arguments}
    passed = library.fused_moe(hidden_states=payload, a1_scale=scale, dtype=torch.bfloat16, **arguments)
    assert torch.equal(passed, library.fused_moe(hidden_states=hidden, **arguments))


def test_swiglu_has_a_limit_of_seven_unless_told() -> None:
    library = make_aiter("a16w4")
    layer, routes, hidden = make_layer(library, "a16w4"), make_routes(5), make_hidden(5)
    arguments = {"hidden_states": hidden, **layer.arguments, **routes.arguments}
    assert torch.equal(library.fused_moe(**arguments), library.fused_moe(**arguments, swiglu_limit=7.0))
    expected = torch.zeros(5, H)
    for row, slot, expert in routes.each():
        inter = oai_gate(layer.w1[expert] @ hidden[row].float(), 0.25)
        expected[row] += routes.weights[row, slot] * (layer.w2[expert] @ inter)
    assert distance(library.fused_moe(**arguments, swiglu_limit=0.25), expected) < tolerance("a16w4")


def test_situ_is_its_formula() -> None:
    library, beta, linear_beta = make_aiter("a4w4", env={"AITER_SITUV2_A4W4": "1"}), 4.0, 0.5
    layer, routes, hidden = make_layer(library, "a4w4"), make_routes(5), make_hidden(5)
    constants = {"activation": ActivationType.Situv2, "beta": beta, "linear_beta": linear_beta}
    out = library.fused_moe(hidden_states=hidden, **layer.arguments, **routes.arguments, **constants)
    keep, expected = rounded("a4w4"), torch.zeros(5, H)
    for row, slot, expert in routes.each():
        g, u = (layer.w1[expert] @ keep(hidden[row, None].float())[0]).chunk(2)
        inter = beta * torch.tanh(g / beta) * torch.sigmoid(g) * linear_beta * torch.tanh(u / linear_beta)
        expected[row] += routes.weights[row, slot] * (layer.w2[expert] @ keep(inter[None])[0])
    assert distance(out, expected) < 2 * BF16


def test_one_preparation_serves_both_precisions_of_a_gate_mode() -> None:
    """Rows of fp4 weights move between precisions with their number; the bytes that the kernels read stay."""
    kinds: tuple[tuple[Kind, dict[str, str]], ...] = (("a16w4", {}), ("a8w4", {"AITER_BF16_FP8_MOE_BOUND": "256"}))
    for kind, env in kinds:
        library = make_aiter(kind, env=env)
        layer = make_layer(library, kind)
        for tokens in (255, 256):
            routes, hidden = make_routes(tokens), make_hidden(tokens)
            out = library.fused_moe(hidden_states=hidden, **layer.arguments, **routes.arguments)
            assert distance(out, reference(layer, hidden, routes)) < tolerance("a4w4")
        assert len({decision.activation for decision in library.decisions}) == 2


def test_more_rows_than_24_bits_count_are_refused() -> None:
    library, rows = make_aiter(), 2**24
    layer = make_layer(library, "no")
    with pytest.raises(EmulatedMisuse) as raised:
        library.fused_moe(
            hidden_states=torch.zeros(1, H, dtype=torch.bfloat16).expand(rows, H),
            topk_ids=torch.zeros(1, 1, dtype=torch.int32).expand(rows, 1),
            topk_weight=torch.ones(1, 1).expand(rows, 1),
            **layer.arguments,
        )
    assert (raised.value.reason, raised.value.operand) == (Reason.SORT_LIMIT, "topk_ids")


def test_parameters_are_those_of_the_version() -> None:
    versions: tuple[VersionName, ...] = ("0.1.7", "head", "later", "no_combine")
    names = {version: tuple(inspect.signature(make_aiter(version=version).fused_moe).parameters) for version in versions}
    assert names["0.1.7"][-1] == "bias2"
    assert len(names["0.1.7"]) == 21
    assert names["head"][:21] == names["0.1.7"]
    assert names["head"][-1] == "stage2_scatter"
    assert len(names["head"]) == 32
    assert set(names["later"]) - set(names["head"]) == {"output", "quant_type_a", "quant_dtype_a", "quant_dtype_a2"}
    assert set(names["no_combine"]) - set(names["head"]) == {"no_combine"}


def test_an_output_is_filled_and_returned() -> None:
    library = make_aiter(version="later")
    layer, routes, hidden = make_layer(library, "no"), make_routes(5), make_hidden(5)
    output = torch.empty(5, H, dtype=torch.bfloat16)
    arguments = {"hidden_states": hidden, **layer.arguments, **routes.arguments}
    assert library.fused_moe(**arguments, output=output) is output
    assert torch.equal(output, library.fused_moe(**arguments))
    wrong = (output[:4], output.float(), output.T.contiguous().T, hidden)
    for refused in wrong:
        with pytest.raises(RuntimeError, match="output"):
            library.fused_moe(**arguments, output=refused)


def test_without_combine_every_route_has_its_row() -> None:
    library = make_aiter(version="no_combine")
    layer, routes, hidden = make_layer(library, "no"), make_routes(5, "masked"), make_hidden(5)
    arguments = {"hidden_states": hidden, **layer.arguments, **routes.arguments}
    each = library.fused_moe(**arguments, no_combine=True)
    assert each.shape == (5, K, H)
    assert torch.equal(each.isnan().any(-1), routes.local < 0)
    total = (each.nan_to_num().float() * routes.weights[..., None]).sum(1)
    assert distance(library.fused_moe(**arguments), total) < tolerance("no")
