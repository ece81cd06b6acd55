"""The grouped product of the emulated NPU against its formulae, case by case."""

import pytest
import torch

from moe_typed.runners.ascend.ops import GroupAxis, GroupListType, NpuDtype, SplitItem
from tests.emulation.ascend.misuse import Device, EmulatedMisuse, EmulatedRefusal, Reason
from tests.emulation.ascend.ops import EmulatedAscendOps
from tests.emulation.ascend_matmul import BF16, COUNTS, KIN, PADDING, ROWS, E, N, check, group_list, multiply
from tests.emulation.ascend_reference import group_of, integers, numbers, product, random, random_ints


@pytest.mark.parametrize("kind", [GroupListType.CUMSUM, GroupListType.COUNT])
@pytest.mark.parametrize(("dtype", "bias_dtype"), [(BF16, torch.float32), (torch.float16, torch.float16), (torch.float32, torch.float32)])
def test_floats(dtype: torch.dtype, bias_dtype: torch.dtype, kind: GroupListType) -> None:
    x, weight, bias = random(0, ROWS + PADDING, KIN, dtype=dtype), random(1, E, KIN, N, dtype=dtype), random(2, E, N, dtype=bias_dtype)
    found = multiply(EmulatedAscendOps(), x, weight, kind=kind, bias=bias)
    assert found.dtype == dtype
    check(found, lambda row, e: [a + b for a, b in zip(product(numbers(x[row]), weight[e].float()), numbers(bias[e]), strict=True)], 1e-2)


def test_a_transposed_view_and_separate_matrices_are_the_same_weight() -> None:
    x, weight = random(0, ROWS, KIN, dtype=BF16), random(1, E, N, KIN, dtype=BF16)
    view = multiply(EmulatedAscendOps(), x, weight.transpose(1, 2))
    assert torch.equal(view, multiply(EmulatedAscendOps(), x, weight.transpose(1, 2).contiguous()))
    (separate,) = EmulatedAscendOps().npu_grouped_matmul(
        [x],
        [matrix.T for matrix in weight],
        group_list=group_list(GroupListType.CUMSUM),
        split_item=SplitItem.SINGLE,
        group_type=GroupAxis.M,
    )
    assert torch.equal(view, separate)


@pytest.mark.parametrize("bias_dtype", [None, torch.int32, torch.float32])
@pytest.mark.parametrize(("scale_dtype", "out"), [(BF16, BF16), (torch.float32, torch.float16)])
@pytest.mark.parametrize("kind", GroupListType)
def test_int8_with_scales_of_rows(bias_dtype: torch.dtype | None, scale_dtype: torch.dtype, out: torch.dtype, kind: GroupListType) -> None:
    x, weight = random_ints(0, -128, 128, ROWS + PADDING, KIN), random_ints(1, -128, 128, E, KIN, N)
    scale, tokens = random(2, E, N).abs().mul(1e-3).to(scale_dtype), random(3, ROWS + PADDING).abs() * 1e-2
    bias = random(4, E, N).mul(100 if bias_dtype == torch.int32 else 1).to(bias_dtype or torch.float32)
    extra = {} if bias_dtype is None else {"bias": bias}
    found = multiply(EmulatedAscendOps(), x, weight, kind=kind, out=out, scale=scale, per_token_scale=tokens, given=extra)

    def formula(row: int, e: int) -> list[float]:
        values = product(numbers(x[row]), weight[e])
        inner = numbers(bias[e]) if bias_dtype == torch.int32 else [0.0] * N
        outer = numbers(bias[e]) if bias_dtype == torch.float32 else [0.0] * N
        return [(v + i) * s * float(tokens[row]) + o for v, i, s, o in zip(values, inner, numbers(scale[e]), outer, strict=True)]

    check(found, formula, 1e-2)


def test_int8_products_are_exact_where_float32_is_not() -> None:
    """2048 products of 127 * 127 are above 2**24."""
    x, weight = torch.full((ROWS, 2048), 127, dtype=torch.int8), torch.full((E, 2048, N), 127, dtype=torch.int8)
    weight[:, 0] = 126
    found = multiply(EmulatedAscendOps(), x, weight, out=torch.int32)
    assert set(integers(found)) == {2047 * 127 * 127 + 127 * 126}


def test_int8_per_channel_by_a_quantisation_parameter() -> None:
    x, weight = random_ints(0, -20, 20, ROWS, KIN), random_ints(1, -20, 20, E, KIN, N)
    ops = EmulatedAscendOps()
    scale, offset = random(2, E, N).abs() * 1e-2, random_ints(3, -20, 20, E, N, dtype=torch.float32)
    found = multiply(ops, x, weight, scale=ops.npu_trans_quant_param(scale, offset))
    truncated = (scale.view(torch.int32) & ~0x1FFF).view(torch.float32)  # 19 of 32 bits
    assert found.dtype == torch.int8
    for row in range(ROWS):
        e = group_of(row, COUNTS)
        assert e is not None
        terms = zip(product(numbers(x[row]), weight[e]), numbers(truncated[e]), numbers(offset[e]), strict=True)
        assert integers(found[row]) == [max(-128, min(127, round(v * s + o))) for v, s, o in terms]


# ---- MX ------------------------------------------------------------------------------------------------------------------------------------


def test_mx_blocks_of_32() -> None:
    inner = 2 * KIN
    x, weight = random(0, ROWS + PADDING, inner).to(torch.float8_e4m3fn), random(1, E, inner, N).to(torch.float8_e4m3fn)
    x_scale = random_ints(2, 120, 130, ROWS + PADDING, inner // 64, 2, dtype=torch.uint8)
    w_scale = random_ints(3, 120, 130, E, inner // 64, N, 2, dtype=torch.uint8)
    found = multiply(
        EmulatedAscendOps(device=Device.A5),
        x,
        weight,
        out=BF16,
        scale=w_scale,
        per_token_scale=x_scale,
        scale_dtype=NpuDtype.FLOAT8_E8M0FNU,
        per_token_scale_dtype=NpuDtype.FLOAT8_E8M0FNU,
    )

    def formula(row: int, e: int) -> list[float]:
        values = [float(x[row, k]) * 2.0 ** (int(x_scale[row, k // 64, k // 32 % 2]) - 127) for k in range(inner)]
        powers = [[2.0 ** (int(w_scale[e, k // 64, n, k // 32 % 2]) - 127) for n in range(N)] for k in range(inner)]
        return [sum(v * float(weight[e, k, n]) * powers[k][n] for k, v in enumerate(values)) for n in range(N)]

    check(found, formula, 2e-2)


def test_fp4_weights_of_fp8_rows_have_their_scale_elsewhere() -> None:
    levels = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    codes = random_ints(1, 0, 16, E, N, KIN, dtype=torch.uint8)
    weight = (codes[..., 0::2] | (codes[..., 1::2] << 4)).transpose(1, 2)  # packed along K, a view
    x, ones = random(0, ROWS, KIN).to(torch.float8_e4m3fn), torch.full((E, 1, N, 2), 127, dtype=torch.uint8)
    tensors = {"antiquant_scale": ones, "per_token_scale": torch.full((ROWS, 1, 2), 128, dtype=torch.uint8)}
    ops, e8m0 = EmulatedAscendOps(device=Device.A5), NpuDtype.FLOAT8_E8M0FNU
    found = multiply(ops, x, weight, out=BF16, weight_dtype=NpuDtype.FLOAT4_E2M1FN_X2, per_token_scale_dtype=e8m0, given=tensors)
    dense = torch.tensor([levels[code & 7] * (-1 if code & 8 else 1) for code in integers(codes)]).view(E, N, KIN)
    check(found, lambda row, e: [2 * value for value in product(numbers(x[row]), dense[e].T)], 2e-2)


def test_e8m0_is_said_by_its_number_alone() -> None:
    x, weight = torch.zeros(ROWS, KIN).to(torch.float8_e4m3fn), torch.zeros(E, KIN, N).to(torch.float8_e4m3fn)
    tensors = {"scale": torch.zeros(E, 1, N, 2, dtype=torch.uint8), "per_token_scale": torch.zeros(ROWS, 1, 2, dtype=torch.uint8)}
    ops, e8m0 = EmulatedAscendOps("faithful", Device.A5), NpuDtype.FLOAT8_E8M0FNU
    for said in (None, 44, NpuDtype.FLOAT8_E4M3FN):
        with pytest.raises(EmulatedRefusal, match="E8M0"):
            multiply(ops, x, weight, out=BF16, scale_dtype=said, per_token_scale_dtype=e8m0, given=tensors)


# ---- refusals and misuse -------------------------------------------------------------------------------------------------------------------


def test_what_the_product_refuses() -> None:
    ops = EmulatedAscendOps("faithful")
    x, weight = random(0, ROWS, KIN, dtype=BF16), random(1, E, KIN, N, dtype=BF16)
    counts = torch.tensor(COUNTS)
    with pytest.raises(EmulatedRefusal, match="group_type must be given"):
        ops.npu_grouped_matmul([x], [weight], group_list=counts, split_item=SplitItem.SINGLE)
    with pytest.raises(EmulatedRefusal, match="split_item"):
        ops.npu_grouped_matmul([x], [weight], group_list=counts, group_type=GroupAxis.M)
    with pytest.raises(EmulatedRefusal, match="int64"):
        ops.npu_grouped_matmul([x], [weight], group_list=counts.int(), group_type=GroupAxis.M, split_item=SplitItem.SINGLE)
    with pytest.raises(EmulatedRefusal, match="bias"):
        multiply(ops, x, weight, bias=torch.zeros(E, N, dtype=BF16))
    with pytest.raises(EmulatedRefusal, match="pairs"):
        multiply(ops, x, weight, kind=GroupListType.PAIRS)
    with pytest.raises(EmulatedRefusal, match="zeros too"):
        multiply(ops, x, random_ints(0, -8, 8, E, KIN, N), antiquant_scale=torch.ones(E, N, dtype=BF16))


@pytest.mark.parametrize(("scale_dtype", "out"), [(BF16, torch.float16), (torch.float32, BF16), (BF16, None)])
def test_scale_and_result_of_int8_have_coupled_dtypes(scale_dtype: torch.dtype, out: torch.dtype | None) -> None:
    x, weight = random_ints(0, -8, 8, ROWS, KIN), random_ints(1, -8, 8, E, KIN, N)
    with pytest.raises(EmulatedRefusal, match="a bf16 scale gives bf16"):
        multiply(EmulatedAscendOps("faithful"), x, weight, out=out, scale=torch.ones(E, N, dtype=scale_dtype), per_token_scale=torch.ones(ROWS))


def test_more_rows_than_there_are_and_counts_that_fall() -> None:
    x, weight = random(0, ROWS - 1, KIN), random(1, E, KIN, N)
    with pytest.raises(EmulatedMisuse) as caught:
        multiply(EmulatedAscendOps(), x, weight)
    assert caught.value.reason is Reason.GROUP_TOTAL
    with pytest.raises(EmulatedMisuse) as caught:
        EmulatedAscendOps().npu_grouped_matmul(
            [random(0, ROWS, KIN)], [weight], group_list=torch.tensor(COUNTS), split_item=SplitItem.SINGLE, group_type=GroupAxis.M
        )
    assert caught.value.reason is Reason.GROUP_LIST_FALLS
