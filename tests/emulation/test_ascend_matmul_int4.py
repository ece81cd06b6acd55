"""Grouped products of int4 weights of the emulated NPU against their formulae."""

import pytest
import torch
from torch import Tensor

from moe_typed.runners.ascend.ops import GroupAxis, GroupListType, SplitItem
from tests.emulation.ascend.misuse import EmulatedMisuse, Reason
from tests.emulation.ascend.ops import EmulatedAscendOps
from tests.emulation.ascend_matmul import BF16, COUNTS, KIN, PADDING, ROWS, E, N, carrier, check, multiply, packed
from tests.emulation.ascend_reference import matrix, numbers, product, random, random_ints
from tests.emulation.hazards import poison_mask


def scaled_product(row: Tensor, weight: Tensor, scale: Tensor) -> list[float]:
    """Return the product of a row with W [K, N] scaled by [G, N]."""
    groups = scale.shape[0]
    length = len(weight) // groups
    parts = [product(numbers(row[g * length : (g + 1) * length]), weight[g * length : (g + 1) * length]) for g in range(groups)]
    return [sum(parts[g][n] * float(scale[g, n]) for g in range(groups)) for n in range(weight.shape[1])]


@pytest.mark.parametrize("groups", [1, 4])
def test_int8_by_int4_with_its_bias_is_the_product(groups: int) -> None:
    x, weight = random_ints(0, -128, 128, ROWS + PADDING, KIN), random_ints(1, -8, 8, E, KIN, N)
    scale, tokens = random(2, E, groups, N) * 1e-2, random(3, ROWS + PADDING).abs()
    bias = torch.tensor([[8 * value for value in scaled_product(torch.ones(KIN), weight[e], scale[e])] for e in range(E)])
    taken = x.clone()
    found = multiply(EmulatedAscendOps(), taken, packed(weight), out=BF16, bias=bias, scale=carrier(scale), per_token_scale=tokens)
    check(found, lambda row, e: [value * float(tokens[row]) for value in scaled_product(x[row], weight[e], scale[e])], 2e-2)
    assert poison_mask(taken).all()  # the kernel splits x in place


def test_int8_by_int4_is_off_by_eight_without_its_bias() -> None:
    x, weight = random_ints(0, -128, 128, ROWS, KIN), random_ints(1, -8, 8, E, KIN, N)
    scale, tokens = torch.full((E, 1, N), 0.01), torch.ones(ROWS)
    call: dict[str, Tensor] = {"scale": carrier(scale), "per_token_scale": tokens}
    found = multiply(EmulatedAscendOps("faithful"), x.clone(), packed(weight), out=torch.float16, given=call)
    check(found, lambda row, e: [0.01 * value for value in product([v - 8 for v in numbers(x[row])], weight[e])], 1e-2)
    no_bias: dict[str, Tensor] = {}
    for extra in (no_bias, {"bias": torch.zeros(E, N)}):
        with pytest.raises(EmulatedMisuse) as caught:
            multiply(EmulatedAscendOps(), x.clone(), packed(weight), out=torch.float16, given=call | extra)
        assert caught.value.reason is Reason.BIAS_MISSING


def test_int8_by_int4_reads_counts_whatever_is_said() -> None:
    x, weight, scale = random_ints(0, -128, 128, ROWS, KIN), random_ints(1, -8, 8, E, KIN, N), torch.full((E, 1, N), 0.01)
    bias = 8 * weight.float().sum(1) * 0.01
    tensors = {"bias": bias, "scale": carrier(scale), "per_token_scale": torch.ones(ROWS)}

    def said(ops: EmulatedAscendOps, kind: GroupListType) -> Tensor:
        lists = {name: [tensor] for name, tensor in tensors.items()}
        return ops.npu_grouped_matmul(
            [x.clone()],
            [packed(weight)],
            bias=lists["bias"],
            scale=lists["scale"],
            per_token_scale=lists["per_token_scale"],
            group_list=torch.tensor(COUNTS),
            split_item=SplitItem.SINGLE,
            group_type=GroupAxis.M,
            group_list_type=kind,
            output_dtype=BF16,
        )[0]

    faithful = EmulatedAscendOps("faithful")
    assert torch.equal(said(faithful, GroupListType.CUMSUM), said(faithful, GroupListType.COUNT))
    with pytest.raises(EmulatedMisuse) as caught:
        said(EmulatedAscendOps(), GroupListType.CUMSUM)
    assert caught.value.reason is Reason.COUNTS_ALWAYS


@pytest.mark.parametrize("groups", [None, 4])
@pytest.mark.parametrize("with_tokens", [True, False])
def test_int4_by_int4(groups: int | None, with_tokens: bool) -> None:
    x, weight = random_ints(0, -8, 8, ROWS + PADDING, KIN), random_ints(1, -8, 8, E, KIN, N)
    scale = random(2, E, groups or 1, N)
    tokens = random(3, ROWS + PADDING).abs()
    extra = {"per_token_scale": tokens} if with_tokens else {}
    given = carrier(scale if groups else scale[:, 0])
    found = multiply(EmulatedAscendOps(), packed(x), packed(weight), out=BF16, scale=given, given=extra)
    factor = numbers(tokens) if with_tokens else [1.0] * len(tokens)
    check(found, lambda row, e: [value * factor[row] for value in scaled_product(x[row], weight[e], scale[e])], 2e-2)


def test_scales_of_the_sibling_s_shape_and_encoding() -> None:
    """int4 by int4 has [E, N], int8 by int4 [E, 1, N]; both carry bits."""
    x, weight, scale = random_ints(0, -8, 8, ROWS, KIN), random_ints(1, -8, 8, E, KIN, N), torch.full((E, N), 0.5)
    ops = EmulatedAscendOps()
    with pytest.raises(EmulatedMisuse) as caught:
        multiply(ops, packed(x), packed(weight), out=BF16, scale=carrier(scale)[:, None])
    assert caught.value.reason is Reason.SCALE_SHAPE
    with pytest.raises(EmulatedMisuse) as caught:
        multiply(ops, packed(x), packed(weight), out=BF16, scale=ops.npu_trans_quant_param(scale))
    assert caught.value.reason is Reason.SCALE_CARRIER


def test_words_of_a_transposed_view_are_packed_along_k() -> None:
    x, weight = random_ints(0, -8, 8, ROWS, KIN), random_ints(1, -8, 8, E, KIN, N)
    along_n = multiply(EmulatedAscendOps(), packed(x), packed(weight), out=BF16, scale=carrier(torch.ones(E, N)))
    along_k = packed(weight.transpose(1, 2).contiguous()).transpose(1, 2)
    assert torch.equal(along_n, multiply(EmulatedAscendOps(), packed(x), along_k, out=BF16, scale=carrier(torch.ones(E, N))))


@pytest.mark.parametrize(("groups", "is_int4"), [(None, True), (4, True), (None, False)])  # int8 weights have one scale for each channel
def test_floats_by_integers_add_the_offset_before_they_scale(groups: int | None, is_int4: bool) -> None:
    x, weight = random(0, ROWS + PADDING, KIN, dtype=BF16), random_ints(1, -8, 8, E, KIN, N)
    shape = (E, N) if groups is None else (E, groups, N)
    scale, offset = random(2, *shape, dtype=BF16), random_ints(3, -8, 8, *shape, dtype=BF16)
    bias = random(4, E, N)
    given = packed(weight) if is_int4 else weight
    found = multiply(EmulatedAscendOps(), x, given, antiquant_scale=scale, antiquant_offset=offset, bias=bias)

    def formula(row: int, e: int) -> list[float]:
        length = KIN // (groups or 1)
        scales, offsets = matrix(scale[e].view(-1, N)), matrix(offset[e].view(-1, N))
        lines = [zip(line, offsets[k // length], scales[k // length], strict=True) for k, line in enumerate(matrix(weight[e]))]
        dense = [[(w + o) * s for w, o, s in line] for line in lines]
        return [a + b for a, b in zip(product(numbers(x[row]), torch.tensor(dense)), numbers(bias[e]), strict=True)]

    check(found, formula, 2e-2)
