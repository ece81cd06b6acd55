"""Quantisation and packing of the emulated NPU against their goldens."""

import itertools
import math
import struct

import pytest
import torch
from torch import Tensor

from moe_typed.runners.ascend.ops import AclFormat, MxScaleAlg, NpuDtype, RoutingQuantMode, TorchDtypeCode
from tests.emulation.ascend import mx
from tests.emulation.ascend.misuse import Device, EmulatedRefusal
from tests.emulation.ascend.ops import EmulatedAscendOps
from tests.emulation.ascend_matmul import carrier, packed
from tests.emulation.ascend_reference import integers, numbers, quantized, random, random_ints

M, KIN = 5, 64
HALVES = [torch.float16, torch.bfloat16]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E1M2 = [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75]


def agree(found: list[int], wanted: list[int]) -> bool:
    """Return whether integers agree but for one tie, which float32 and Python see apart."""
    return sum(abs(a - b) for a, b in zip(found, wanted, strict=True)) <= 1


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("smooth", [False, True])
def test_dynamic_int8(dtype: torch.dtype, smooth: bool) -> None:
    x, factors = random(0, M, KIN, dtype=dtype), random(1, KIN, dtype=dtype)
    values, scale = EmulatedAscendOps().npu_dynamic_quant(x, smooth_scales=factors if smooth else None)
    assert (values.dtype, scale.dtype, scale.shape) == (torch.int8, torch.float32, (M,))
    for row in range(M):
        wanted, wanted_scale = quantized([a * (b if smooth else 1) for a, b in zip(numbers(x[row]), numbers(factors), strict=True)], 127)
        assert agree(integers(values[row]), wanted)
        assert float(scale[row]) == pytest.approx(wanted_scale, rel=1e-6)


def test_smooth_scales_of_groups_are_by_int32_cumulative_counts() -> None:
    x, factors = random(0, M, KIN, dtype=torch.float16), random(1, 2, KIN).abs()
    ops = EmulatedAscendOps()
    values, scale = ops.npu_dynamic_quant(x, smooth_scales=factors, group_index=torch.tensor([2, M], dtype=torch.int32))
    for row in range(M):
        one, one_scale = ops.npu_dynamic_quant(x[row : row + 1], smooth_scales=factors[0 if row < 2 else 1])
        assert torch.equal(values[row], one[0])
        assert torch.equal(scale[row], one_scale[0])
    with pytest.raises(EmulatedRefusal, match="int32"):
        ops.npu_dynamic_quant(x, smooth_scales=factors, group_index=torch.tensor([2, M]))


@pytest.mark.parametrize("dst_type", [torch.quint4x2, TorchDtypeCode.QUINT4X2, 16])
def test_dynamic_int4_is_packed_in_int32(dst_type: torch.dtype | int) -> None:
    x = random(0, M, KIN, dtype=torch.bfloat16)
    words, scale = EmulatedAscendOps().npu_dynamic_quant(x, dst_type=dst_type)
    assert (words.dtype, words.shape) == (torch.int32, (M, KIN // 8))
    for row in range(M):
        wanted, wanted_scale = quantized(numbers(x[row]), 7)
        found = [(int(word) >> (4 * place)) & 15 for word in words[row] for place in range(8)]
        assert agree([nibble - 16 if nibble > 7 else nibble for nibble in found], wanted)
        assert float(scale[row]) == pytest.approx(wanted_scale, rel=1e-6)
    with pytest.raises(EmulatedRefusal, match="multiple of 8"):
        EmulatedAscendOps().npu_dynamic_quant(x[:, :12], dst_type=dst_type)


def test_ties_go_to_even_and_zeros_stay_zeros() -> None:
    """A row whose scale is 1, and one without a value."""
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5], [0.0, 0.0, 0.0, 0.0]], dtype=torch.float16)
    values, scale = EmulatedAscendOps().npu_dynamic_quant(x)
    assert integers(values) == [127, 0, 2, -2, 0, 0, 0, 0]
    assert numbers(scale) == [1.0, 0.0]


def test_asymmetric_int8_covers_the_range_of_a_row() -> None:
    x = random(0, M, KIN, dtype=torch.float16) + 3
    values, scale, offset = EmulatedAscendOps().npu_dynamic_quant_asymmetric(x)
    for row in range(M):
        high, low = max(numbers(x[row])), min(numbers(x[row]))
        assert float(scale[row]) == pytest.approx((high - low) / 255, rel=1e-5)
        back = [(value - float(offset[row])) * float(scale[row]) for value in integers(values[row])]
        assert back == pytest.approx(numbers(x[row]), abs=float(scale[row]) * 0.51)
        assert (min(integers(values[row])), max(integers(values[row]))) == (-128, 127)


def test_quantisation_with_given_scales() -> None:
    x, scales, zeros = random(0, M, KIN), random(1, KIN).abs() + 0.5, random_ints(2, -4, 4, KIN, dtype=torch.float32)
    ops = EmulatedAscendOps()
    divided = ops.npu_quantize(x, scales, zeros, torch.qint8, 1)
    multiplied = ops.npu_quantize(x, 1 / scales, zeros, torch.qint8, -1, div_mode=False)
    wanted = [round(a / b + c) for a, b, c in zip(numbers(x[1]), numbers(scales), numbers(zeros), strict=True)]
    assert agree(integers(divided[1]), wanted)
    assert agree(integers(multiplied[1]), wanted)
    words = ops.npu_quantize(x, 1 / scales, None, torch.quint4x2, -1, div_mode=False)
    assert torch.equal(words, packed((x * (1 / scales)).round().clamp(-8, 7)))


# ---- MX ------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alg", MxScaleAlg)
@pytest.mark.parametrize(("dtype", "emax", "largest"), [(torch.float8_e4m3fn, 8, 448.0), (torch.float8_e5m2, 15, 57344.0)])
def test_mx_fp8_by_both_rules(dtype: torch.dtype, emax: int, largest: float, alg: MxScaleAlg) -> None:
    x = random(0, M, 96)
    x[0, 0] = 500.0  # the floor rule saturates: 500 / 2**(8 - emax) is above the largest
    x[1, :32] = 0
    x[2, 32:64] = 0
    x[2, 32] = largest / 8  # a power of two times the largest: no rounding up
    values, scale = EmulatedAscendOps(device=Device.A5).npu_dynamic_mx_quant(x, dst_type=dtype, scale_alg=alg)
    assert (values.dtype, scale.dtype, scale.shape) == (dtype, torch.uint8, (M, 2, 2))  # three blocks are padded to four
    for row in range(M):
        for block in range(3):
            part = numbers(x[row, 32 * block : 32 * block + 32])
            amax = max(abs(value) for value in part)
            byte = int(scale[row, block // 2, block % 2])
            exponent = (
                math.floor(math.log2(amax)) - emax if alg == MxScaleAlg.FLOOR and amax else math.ceil(math.log2(amax / largest)) if amax else -127
            )
            assert byte == exponent + 127
            wanted = [max(-largest, min(largest, value / 2.0**exponent)) for value in part]
            assert numbers(values[row, 32 * block : 32 * block + 32]) == numbers(torch.tensor(wanted).to(dtype))


def test_the_rules_differ_where_the_fraction_is_above_the_largest_s() -> None:
    """An amax of 1.9 * 2**k is cut off by the floor rule at 1.75 * 2**k, and has a scale twice as large by the ceiling rule."""
    x = torch.full((1, 64), 1.9)
    ops = EmulatedAscendOps(device=Device.A5)
    floor, floor_scale = ops.npu_dynamic_mx_quant(x, dst_type=torch.float8_e4m3fn)
    ceil, ceil_scale = ops.npu_dynamic_mx_quant(x, dst_type=torch.float8_e4m3fn, scale_alg=MxScaleAlg.CEIL)
    assert integers(ceil_scale - floor_scale) == [1, 1]
    assert float(floor[0, 0]) * 2.0 ** (int(floor_scale[0, 0, 0]) - 127) == 1.75
    assert float(ceil[0, 0]) * 2.0 ** (int(ceil_scale[0, 0, 0]) - 127) == pytest.approx(1.9, rel=0.07)


@pytest.mark.parametrize(("dtype", "emax", "levels"), [(NpuDtype.FLOAT4_E2M1FN_X2, 2, E2M1), (NpuDtype.FLOAT4_E1M2FN_X2, 0, E1M2)])
def test_mx_fp4_takes_the_nearest_level(dtype: NpuDtype, emax: int, levels: list[float]) -> None:
    x = random(0, M, KIN)
    values, scale = EmulatedAscendOps(device=Device.A5).npu_dynamic_mx_quant(x, dst_type=dtype)
    assert (values.dtype, values.shape, scale.shape) == (torch.uint8, (M, KIN // 2), (M, 1, 2))
    for row in range(M):
        codes = [code for byte in integers(values[row]) for code in (byte & 15, byte >> 4)]
        for column, value in enumerate(numbers(x[row])):
            amax = max(abs(other) for other in numbers(x[row, column // 32 * 32 : column // 32 * 32 + 32]))
            exponent = math.floor(math.log2(amax)) - emax
            assert int(scale[row, 0, column // 32]) == exponent + 127
            scaled = value / 2.0**exponent
            found = levels[codes[column] & 7] * (-1 if codes[column] & 8 else 1)
            assert abs(found - scaled) <= min(abs(level * sign - scaled) for level in levels for sign in (1, -1)) + 1e-6


def test_ties_of_fp4_go_to_the_even_code() -> None:
    for levels, table in ((E2M1, mx.E2M1), (E1M2, mx.E1M2)):
        middles = [(a + b) / 2 for a, b in itertools.pairwise(levels)]
        assert table.levels is not None
        found = mx.encode_fp4(torch.tensor([*middles, 0.0]), table.levels)
        codes = [code for byte in integers(found) for code in (byte & 15, byte >> 4)][:-1]
        assert codes == [place if place % 2 == 0 else place + 1 for place in range(7)]


def test_blocks_along_another_axis() -> None:
    x = random(0, KIN, 6)
    ops = EmulatedAscendOps(device=Device.A5)
    values, scale = ops.npu_dynamic_mx_quant(x, axis=0, dst_type=torch.float8_e4m3fn)
    other, other_scale = ops.npu_dynamic_mx_quant(x.T.contiguous(), dst_type=torch.float8_e4m3fn)
    assert torch.equal(values.float(), other.float().T)
    assert scale.shape == (1, 6, 2)
    assert torch.equal(scale[0], other_scale[:, 0])


# ---- packing -------------------------------------------------------------------------------------------------------------------------------


def test_int4_pack_is_the_byte_pair_stream_of_checkpoints() -> None:
    """Four bytes of low and high nibble are one word on a little-endian host."""
    values = random_ints(0, -8, 8, 4, 32, dtype=torch.int32)
    values[0, :8] = torch.tensor([0] * 7 + [-8])  # the least int32
    words = EmulatedAscendOps().npu_convert_weight_to_int4pack(values)
    assert torch.equal(words, packed(values))
    pairs = [(a & 15) | ((b & 15) << 4) for row in values for a, b in zip(integers(row[0::2]), integers(row[1::2]), strict=True)]
    assert list(struct.unpack(f"<{words.numel()}i", bytes(pairs))) == integers(words)


@pytest.mark.parametrize("bad", [torch.full((2, 8), 8, dtype=torch.int32), torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, 8, dtype=torch.int8)])
def test_what_int4_pack_refuses(bad: Tensor) -> None:
    with pytest.raises(EmulatedRefusal):
        EmulatedAscendOps("faithful").npu_convert_weight_to_int4pack(bad)


def test_three_axes_are_packed_on_a5_alone() -> None:
    values = random_ints(0, -8, 8, 2, 4, 16, dtype=torch.int32)
    assert torch.equal(EmulatedAscendOps(device=Device.A5).npu_convert_weight_to_int4pack(values), packed(values))
    with pytest.raises(EmulatedRefusal, match="axes"):
        EmulatedAscendOps().npu_convert_weight_to_int4pack(values)


def test_a_quantisation_parameter_is_not_a_carrier() -> None:
    scale, offset = torch.tensor([0.1, 3.0, 1e-4]), torch.tensor([-7.0, 0.0, 255.0])
    ops = EmulatedAscendOps()
    for number, (value, zero) in enumerate(zip(numbers(scale), integers(offset), strict=True)):
        (bits,) = struct.unpack("<I", struct.pack("<f", value))
        assert int(ops.npu_trans_quant_param(scale)[number]) == (bits & 0xFFFFE000) | 1 << 46
        assert int(ops.npu_trans_quant_param(scale, offset)[number]) == (bits & 0xFFFFE000) | 1 << 46 | (zero & 0x1FF) << 37
        assert int(carrier(scale)[number]) == bits


def test_a_format_is_no_matter_of_values_and_a_view_becomes_contiguous() -> None:
    weight = random(0, 3, 4, 5)
    cast = EmulatedAscendOps().npu_format_cast(weight.transpose(1, 2), AclFormat.FRACTAL_NZ)
    assert torch.equal(cast, weight.transpose(1, 2))
    assert cast.is_contiguous()


def test_the_dense_product_adds_the_offset_too() -> None:
    x, weight = random(0, M, KIN, dtype=torch.bfloat16), random_ints(1, -8, 8, KIN, 16)
    scale, offset = random(2, 2, 16, dtype=torch.bfloat16), random_ints(3, -8, 8, 2, 16, dtype=torch.bfloat16)
    found = EmulatedAscendOps().npu_weight_quant_batchmatmul(x, packed(weight), scale, offset, antiquant_group_size=32)
    for n in range(16):
        dense = [(float(weight[k, n]) + float(offset[k // 32, n])) * float(scale[k // 32, n]) for k in range(KIN)]
        assert float(found[0, n]) == pytest.approx(sum(a * b for a, b in zip(numbers(x[0]), dense, strict=True)), rel=2e-2, abs=2e-1)


@pytest.mark.parametrize("device", [device for device in Device if device is not Device.A5])
def test_mx_is_of_a5_alone(device: Device) -> None:
    ops, x = EmulatedAscendOps("faithful", device, limits=True), random(0, M, KIN, dtype=torch.float16)
    with pytest.raises(EmulatedRefusal, match="A5"):
        ops.npu_dynamic_mx_quant(x)
    ids = torch.zeros(M, 1, dtype=torch.int32)
    with pytest.raises(EmulatedRefusal, match=r"A5|310P"):
        ops.npu_moe_init_routing_v2(x, ids, expert_num=1, quant_mode=RoutingQuantMode.MXFP8_E4M3)
