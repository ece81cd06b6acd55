"""Activations and fused products of the emulated NPU against their formulae; and what their defaults do."""

import pytest
import torch

from moe_typed.runners.ascend.ops import FusedDequant, FusedQuant, GroupListType, NpuDtype, SwigluMode, SwigluQuantMode
from tests.emulation.ascend.misuse import Device, EmulatedMisuse, EmulatedRefusal, Reason
from tests.emulation.ascend.ops import EmulatedAscendOps
from tests.emulation.ascend_matmul import COUNTS, KIN, PADDING, ROWS, E, N, carrier, packed
from tests.emulation.ascend_reference import (
    accumulated,
    clamped,
    group_of,
    integers,
    numbers,
    product,
    quantized,
    random,
    random_ints,
    silu_halves,
)
from tests.emulation.hazards import poison_mask

M, HALF = 6, 16
DYNAMIC = SwigluQuantMode.DYNAMIC


def near(found: list[int], wanted: list[int]) -> bool:
    return all(abs(a - b) <= 1 for a, b in zip(found, wanted, strict=True)) and sum(a != b for a, b in zip(found, wanted, strict=True)) <= 1


def swapped(row: list[float]) -> list[float]:
    return row[len(row) // 2 :] + row[: len(row) // 2]


def test_swiglu_activates_the_left_half() -> None:
    x = random(0, M, 2 * HALF)
    found = EmulatedAscendOps().npu_swiglu(x)
    for row in range(M):
        assert numbers(found[row]) == pytest.approx(silu_halves(numbers(x[row])), rel=1e-5)
    assert torch.allclose(EmulatedAscendOps().npu_swiglu(x.T, 0), found.T)


@pytest.mark.parametrize("activate_left", [True, False])
def test_dequant_swiglu_quant_of_bf16(activate_left: bool) -> None:
    x = random(0, M, 2 * HALF, dtype=torch.bfloat16)
    values, scale = EmulatedAscendOps().npu_dequant_swiglu_quant(x, activate_left=activate_left, quant_mode=DYNAMIC)
    for row in range(M):
        line = numbers(x[row]) if activate_left else swapped(numbers(x[row]))
        wanted, wanted_scale = quantized(silu_halves(line), 127)
        assert near(integers(values[row]), wanted)
        assert float(scale[row]) == pytest.approx(wanted_scale, rel=1e-5)


def test_its_defaults_activate_the_right_half_and_give_no_scale() -> None:
    x = random(0, M, 2 * HALF, dtype=torch.bfloat16) * 10
    values, scale = EmulatedAscendOps("faithful").npu_dequant_swiglu_quant(x)
    assert near(integers(values[0]), [max(-128, min(127, round(value))) for value in silu_halves(swapped(numbers(x[0])))])
    assert poison_mask(scale).all()
    with pytest.raises(EmulatedMisuse) as caught:
        EmulatedAscendOps().npu_dequant_swiglu_quant(x)
    assert caught.value.reason is Reason.STATIC_WITHOUT_SCALE


def test_dequant_swiglu_quant_of_int32_by_groups() -> None:
    x = random_ints(0, -1000, 1000, ROWS + PADDING, 2 * HALF, dtype=torch.int32)
    weight_scale, activation_scale = random(1, E, 2 * HALF).abs() * 1e-2, random(2, ROWS + PADDING).abs()
    bias, smooth = random_ints(3, -100, 100, E, 2 * HALF, dtype=torch.int32), random(4, E, HALF).abs()
    values, scale = EmulatedAscendOps().npu_dequant_swiglu_quant(
        x,
        weight_scale=weight_scale,
        activation_scale=activation_scale,
        bias=bias,
        quant_scale=smooth,
        group_index=torch.tensor(COUNTS),
        activate_left=True,
        quant_mode=DYNAMIC,
    )
    for row in range(ROWS):
        e = group_of(row, COUNTS)
        assert e is not None
        terms = zip(numbers(x[row]), numbers(bias[e]), numbers(weight_scale[e]), strict=True)
        line = silu_halves([(v + b) * s * float(activation_scale[row]) for v, b, s in terms])
        wanted, wanted_scale = quantized([a * b for a, b in zip(line, numbers(smooth[e]), strict=True)], 127)
        assert near(integers(values[row]), wanted)
        assert float(scale[row]) == pytest.approx(wanted_scale, rel=1e-4)
    assert poison_mask(values[ROWS:]).all()
    assert poison_mask(scale[ROWS:]).all()


@pytest.mark.parametrize("mode", [SwigluMode.INTERLEAVED_CLAMPED, SwigluMode.HALVES_CLAMPED])
def test_clamped_modes(mode: SwigluMode) -> None:
    x = random(0, M, 2 * HALF, dtype=torch.bfloat16) * 3
    values, scale = EmulatedAscendOps().npu_dequant_swiglu_quant(
        x, quant_mode=DYNAMIC, swiglu_mode=mode, clamp_limit=2.0, glu_alpha=1.5, glu_bias=0.5
    )
    line = numbers(x[0])
    pairs = zip(line[0::2], line[1::2], strict=True) if mode == SwigluMode.INTERLEAVED_CLAMPED else zip(line[:HALF], line[HALF:], strict=True)
    wanted, wanted_scale = quantized([clamped(gate, up, 1.5, 2.0, 0.5) for gate, up in pairs], 127)
    assert near(integers(values[0]), wanted)
    assert float(scale[0]) == pytest.approx(wanted_scale, rel=1e-5)


def test_what_dequant_swiglu_quant_refuses() -> None:
    ops, x = EmulatedAscendOps("faithful"), random(0, M, 2 * HALF, dtype=torch.bfloat16)
    with pytest.raises(EmulatedRefusal, match="no scales"):
        ops.npu_dequant_swiglu_quant(x, weight_scale=torch.ones(1, 2 * HALF), quant_mode=DYNAMIC)
    with pytest.raises(EmulatedRefusal, match="need weight_scale"):
        ops.npu_dequant_swiglu_quant(x.int(), quant_mode=DYNAMIC)
    with pytest.raises(EmulatedRefusal, match="needs dynamic"):
        ops.npu_dequant_swiglu_quant(x, group_index=torch.tensor([M]))
    with pytest.raises(EmulatedRefusal, match="int64"):
        ops.npu_dequant_swiglu_quant(x, group_index=torch.tensor([M], dtype=torch.int32), quant_mode=DYNAMIC)


@pytest.mark.parametrize("kind", [GroupListType.CUMSUM, GroupListType.COUNT])
def test_swiglu_quant_smooths_by_groups(kind: GroupListType) -> None:
    x, smooth = random(0, ROWS + PADDING, 2 * HALF), random(1, E, HALF).abs()
    index = torch.tensor(COUNTS if kind == GroupListType.COUNT else accumulated(COUNTS), dtype=torch.int32)
    values, scale = EmulatedAscendOps().npu_swiglu_quant(
        x, smooth_scales=smooth, group_index=index, activate_left=True, quant_mode=DYNAMIC, group_list_type=kind
    )
    for row in range(ROWS):
        e = group_of(row, COUNTS)
        assert e is not None
        wanted, wanted_scale = quantized([a * b for a, b in zip(silu_halves(numbers(x[row])), numbers(smooth[e]), strict=True)], 127)
        assert near(integers(values[row]), wanted)
        assert float(scale[row]) == pytest.approx(wanted_scale, rel=1e-5)
    assert poison_mask(values[ROWS:]).all()


def test_clipped_swiglu_is_interleaved_by_default() -> None:
    x = random(0, M, 2 * HALF) * 5
    ops = EmulatedAscendOps()
    by_default, halves = ops.npu_clipped_swiglu(x), ops.npu_clipped_swiglu(x, interleaved=False)
    for row in range(M):
        line = numbers(x[row])
        assert numbers(by_default[row]) == pytest.approx([clamped(a, b, 1.702, 7, 1) for a, b in zip(line[0::2], line[1::2], strict=True)], rel=1e-4)
        assert numbers(halves[row]) == pytest.approx([clamped(a, b, 1.702, 7, 1) for a, b in zip(line[:HALF], line[HALF:], strict=True)], rel=1e-4)
    assert poison_mask(ops.npu_clipped_swiglu(x, group_index=torch.tensor([1, 3]))[4:]).all()


# ---- fused with the product ----------------------------------------------------------------------------------------------------------------


def test_the_first_fused_product_reads_cumulative_counts() -> None:
    x, weight = random_ints(0, -128, 128, ROWS + PADDING, KIN), random_ints(1, -128, 128, E, KIN, N)
    scale, tokens = random(2, E, N).abs() * 1e-3, random(3, ROWS + PADDING).abs() * 1e-2
    values, out_scale, offset = EmulatedAscendOps().npu_grouped_matmul_swiglu_quant(x, weight, torch.tensor(accumulated(COUNTS)), scale, tokens)
    for row in range(ROWS):
        e = group_of(row, COUNTS)
        assert e is not None
        line = [v * s * float(tokens[row]) for v, s in zip(product(numbers(x[row]), weight[e]), numbers(scale[e]), strict=True)]
        wanted, wanted_scale = quantized(silu_halves(line), 127)
        assert near(integers(values[row]), wanted)
        assert float(out_scale[row]) == pytest.approx(wanted_scale, rel=1e-4)
    assert poison_mask(values[ROWS:]).all()
    assert offset.numel() == 0


@pytest.mark.parametrize("kind", [GroupListType.CUMSUM, GroupListType.COUNT])
@pytest.mark.parametrize("case", ["int8", "int8 by int4", "int4"])
def test_the_second_fused_product(case: str, kind: GroupListType) -> None:
    is_int4 = case == "int4"
    x = random_ints(0, -8, 8, ROWS, KIN) if is_int4 else random_ints(0, -128, 128, ROWS, KIN)
    weight = random_ints(1, -128, 128, E, KIN, N) if case == "int8" else random_ints(1, -8, 8, E, KIN, N)
    scale, tokens, smooth = random(2, E, N).abs() * 1e-3, random(3, ROWS).abs() * 1e-1, random(4, E, N // 2).abs()
    given_scale = {"int8": scale, "int8 by int4": carrier(scale)[:, None], "int4": carrier(scale)}[case]
    assist = torch.tensor([[8 * s * sum(numbers(weight[e, :, n])) for n, s in enumerate(numbers(scale[e]))] for e in range(E)])
    values, out_scale = EmulatedAscendOps().npu_grouped_matmul_swiglu_quant_v2(
        packed(x) if is_int4 else x.clone(),
        [weight if case == "int8" else packed(weight)],
        [given_scale],
        tokens,
        torch.tensor(COUNTS if kind == GroupListType.COUNT else accumulated(COUNTS)),
        smooth_scale=smooth if is_int4 else None,
        weight_assist_matrix=[assist] if case == "int8 by int4" else None,
        dequant_mode=FusedDequant.PER_CHANNEL,
        quant_mode=FusedQuant.PER_TOKEN,
        group_list_type=kind,
    )
    for row in range(ROWS):
        e = group_of(row, COUNTS)
        assert e is not None
        line = silu_halves([v * s * float(tokens[row]) for v, s in zip(product(numbers(x[row]), weight[e]), numbers(scale[e]), strict=True)])
        wanted, wanted_scale = quantized([a * b for a, b in zip(line, numbers(smooth[e]), strict=True)] if is_int4 else line, 127)
        assert near(integers(values[row]), wanted)
        assert float(out_scale[row]) == pytest.approx(wanted_scale, rel=1e-3)


def test_the_second_fused_product_of_mx() -> None:
    width = 128
    x, weight = random(0, ROWS + PADDING, KIN).to(torch.float8_e4m3fn), random(1, E, KIN, width).to(torch.float8_e4m3fn)
    ones, e8m0 = 127, NpuDtype.FLOAT8_E8M0FNU
    values, scale = EmulatedAscendOps(device=Device.A5).npu_grouped_matmul_swiglu_quant_v2(
        x,
        [weight],
        [torch.full((E, 1, width, 2), ones, dtype=torch.uint8)],
        torch.full((ROWS + PADDING, 1, 2), ones, dtype=torch.uint8),
        torch.tensor(COUNTS),
        dequant_mode=FusedDequant.MX,
        quant_mode=FusedQuant.MX,
        quant_dtype=torch.float8_e4m3fn,
        group_list_type=GroupListType.COUNT,
        weight_scale_dtype=e8m0,
        x_scale_dtype=e8m0,
    )
    assert (values.shape, scale.shape, scale.dtype) == ((ROWS + PADDING, width // 2), (ROWS + PADDING, 1, 2), torch.uint8)
    for row in range(ROWS):
        e = group_of(row, COUNTS)
        assert e is not None
        wanted = silu_halves(product(numbers(x[row]), weight[e].float()))
        found = [float(values[row, n]) * 2.0 ** (int(scale[row, 0, n // 32]) - 127) for n in range(width // 2)]
        amax = max(abs(value) for value in wanted)
        assert all(abs(a - b) <= amax / 7 for a, b in zip(found, wanted, strict=True))  # the floor rule cuts 12.5 % off at the most
    assert poison_mask(values[ROWS:]).all()


def test_finalisation_within_the_product_counts_by_default() -> None:
    x, weight = random_ints(0, -128, 128, ROWS, KIN), random_ints(1, -128, 128, E, KIN, N)
    scale, tokens, logit, shared = random(2, E, N).abs() * 1e-3, random(3, ROWS).abs() * 1e-2, random(4, ROWS), random(5, 2, N)
    row_index = torch.tensor([0, 2, 1, 0, 3, 2, 2])
    found = EmulatedAscendOps().npu_grouped_matmul_finalize_routing(
        x,
        weight,
        torch.tensor(COUNTS),
        scale=scale,
        pertoken_scale=tokens,
        shared_input=shared,
        logit=logit,
        row_index=row_index,
        shared_input_weight=0.5,
        shared_input_offset=1,
        output_bs=4,
    )
    wanted = [[0.0] * N for _ in range(4)]
    for token in range(2):
        wanted[1 + token] = [0.5 * value for value in numbers(shared[token])]
    for row, token in enumerate(integers(row_index)):
        e = group_of(row, COUNTS)
        assert e is not None
        for n, value in enumerate(product(numbers(x[row]), weight[e])):
            wanted[token][n] += float(logit[row]) * value * float(scale[e, n]) * float(tokens[row])
    for token in range(4):
        assert numbers(found[token]) == pytest.approx(wanted[token], rel=1e-3, abs=1e-4)
