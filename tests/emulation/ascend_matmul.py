"""One call of the grouped product, and its check row by row."""

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from moe_typed.runners.ascend.ops import GroupAxis, GroupListType, SplitItem
from tests.emulation.ascend.ops import EmulatedAscendOps
from tests.emulation.ascend_reference import accumulated, group_of, integers, matrix, numbers
from tests.emulation.hazards import poison_mask

E, KIN, N = 3, 64, 16
COUNTS = [4, 0, 3]
ROWS, PADDING = sum(COUNTS), 2
BF16 = torch.bfloat16

Formula = Callable[[int, int], list[float]]


def group_list(kind: GroupListType) -> Tensor:
    if kind == GroupListType.PAIRS:
        return torch.tensor([[0, 4], [2, 3], [0, 0], [1, 99]])  # what comes after a pair without rows is undefined
    return torch.tensor(COUNTS if kind == GroupListType.COUNT else accumulated(COUNTS))


def multiply(
    ops: EmulatedAscendOps,
    x: Tensor,
    weight: Tensor,
    *,
    kind: GroupListType = GroupListType.COUNT,
    out: torch.dtype | None = None,
    scale_dtype: int | None = None,
    x_dtype: int | None = None,
    weight_dtype: int | None = None,
    per_token_scale_dtype: int | None = None,
    given: Mapping[str, Tensor] | None = None,
    **tensors: Tensor,
) -> Tensor:
    lists = {name: [tensor] for name, tensor in (tensors | dict(given or {})).items()}
    (result,) = ops.npu_grouped_matmul(
        [x],
        [weight],
        bias=lists.get("bias"),
        scale=lists.get("scale"),
        antiquant_scale=lists.get("antiquant_scale"),
        antiquant_offset=lists.get("antiquant_offset"),
        per_token_scale=lists.get("per_token_scale"),
        group_list=group_list(kind),
        split_item=SplitItem.SINGLE,
        group_type=GroupAxis.M,
        group_list_type=kind,
        output_dtype=out,
        x_dtype=x_dtype,
        weight_dtype=weight_dtype,
        scale_dtype=scale_dtype,
        per_token_scale_dtype=per_token_scale_dtype,
    )
    return result


def check(found: Tensor, formula: Formula, tolerance: float) -> None:
    """Compare each row of a group with its formula, and look for poison in all others."""
    for row in range(ROWS):
        group = group_of(row, COUNTS)
        assert group is not None
        assert numbers(found[row]) == pytest.approx(formula(row, group), rel=tolerance, abs=tolerance)
    assert poison_mask(found[ROWS:]).all()


def packed(values: Tensor) -> Tensor:
    """Return integers as int32 words, bit by bit."""
    words: list[int] = []
    for row in matrix(values.reshape(-1, values.shape[-1])):
        for start in range(0, len(row), 8):
            word = sum((int(value) & 15) << (4 * place) for place, value in enumerate(row[start : start + 8]))
            words.append(word - (1 << 32) if word >= 1 << 31 else word)
    return torch.tensor(words, dtype=torch.int32).view(*values.shape[:-1], -1)


def carrier(scale: Tensor) -> Tensor:
    """Return float32 bits in int64, zeros above them."""
    return torch.tensor([value & 0xFFFFFFFF for value in integers(scale.view(torch.int32))]).view(scale.shape)
