"""The extension's activations against their formulae, their rounding, and their conventions of group lists."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moe_typed.runners.ascend.ops import GroupListType, GroupQuantListType, SwigluQuantMode, ZeroLedGroupListType
from tests.emulation.ascend.extension import EmulatedAscendExtensionOps
from tests.emulation.ascend.misuse import Device, EmulatedMisuse, EmulatedRefusal, Reason
from tests.emulation.ascend.ops import EmulatedAscendOps
from tests.emulation.ascend_reference import clamped, half_up, integers, numbers, quantized, random, sigmoid, silu, silu_halves
from tests.emulation.hazards import poison_mask

M, HALF, COUNTS = 8, 64, [3, 0, 2]
ROWS = sum(COUNTS)
FROM_ZERO, COUNT = ZeroLedGroupListType.CUMSUM_FROM_ZERO, ZeroLedGroupListType.COUNT
LIST = torch.tensor(COUNTS)


def situ(gate: float, up: float, beta: float = 4.0, linear: float = 25.0) -> float:
    return beta * math.tanh(gate / beta) * sigmoid(gate) * linear * math.tanh(up / linear)


def halves(row: Tensor, formula: Callable[[float, float], float]) -> list[float]:
    line = numbers(row)
    return [formula(a, b) for a, b in zip(line[: len(line) // 2], line[len(line) // 2 :], strict=True)]


@pytest.mark.parametrize("do_limit", [False, True])
def test_swiglu_quant(do_limit: bool) -> None:
    x = random(0, M, 2 * HALF) * 4
    ops = EmulatedAscendExtensionOps()
    values, scale = ops.swiglu_quant(x, LIST, COUNT, do_limit=do_limit, limit=2.0)
    plain, undefined = ops.swiglu_quant(x, LIST, COUNT, need_quant=False, do_limit=do_limit, limit=2.0)
    for row in range(ROWS):
        limited = halves(x[row], lambda a, b: min(silu(a), 2.0) * max(-2.0, min(b, 2.0)))  # clamped after silu
        wanted = limited if do_limit else silu_halves(numbers(x[row]))
        assert numbers(plain[row]) == pytest.approx(wanted, rel=1e-5)
        codes, wanted_scale = quantized(wanted, 127, half_up)
        assert sum(abs(a - b) for a, b in zip(integers(values[row]), codes, strict=True)) <= 1
        assert float(scale[row]) == pytest.approx(wanted_scale, rel=1e-5)
    for undefined_rows in (values[ROWS:], scale[ROWS:], plain[ROWS:], undefined):
        assert poison_mask(undefined_rows).all()


def test_ties_go_up_where_torch_npu_s_go_to_even() -> None:
    """The sigmoid of 64 is 1 in float32, so that products are exact; the scale is 1."""
    x = torch.tensor([[127.0, 64.0, 64.0, 64.0, 1.0, 2.5 / 64, -2.5 / 64, 0.5 / 64]])
    values, scale = EmulatedAscendExtensionOps().swiglu_quant(x, torch.tensor([1]), COUNT)
    others, other_scale = EmulatedAscendOps().npu_swiglu_quant(x, activate_left=True, quant_mode=SwigluQuantMode.DYNAMIC)
    assert float(scale) == float(other_scale) == 1.0
    assert integers(values) == [127, 3, -2, 1]
    assert integers(others) == [127, 2, -2, 0]


def test_cumulative_counts_start_at_zero_and_are_read_one_further() -> None:
    x, counts = random(0, M, 2 * HALF), torch.tensor([0, 3, 3, ROWS])
    strict, faithful = EmulatedAscendExtensionOps(), EmulatedAscendExtensionOps("faithful")
    within = strict.swiglu_quant(x, counts[:-1], FROM_ZERO)  # the element after the view is the total
    assert torch.equal(within[0][:ROWS], strict.swiglu_quant(x, LIST, COUNT)[0][:ROWS])
    assert poison_mask(within[0][ROWS:]).all()
    for operator in ("swiglu_quant", "situ"):
        for ops in (strict, faithful):
            call: Callable[[], tuple[Tensor, Tensor | None]] = {
                "swiglu_quant": lambda ops=ops: ops.swiglu_quant(x, counts[1:], FROM_ZERO),
                "situ": lambda ops=ops: ops.situ(x, counts[1:], FROM_ZERO, need_quant=True),
            }[operator]
            if ops is strict:
                with pytest.raises(EmulatedMisuse) as caught:
                    call()
                assert caught.value.reason is Reason.GROUP_LIST_END
            else:
                assert not poison_mask(call()[0]).all(1).any()  # the element is a huge number: all rows are computed


def test_the_sibling_reads_inclusive_cumulative_counts() -> None:
    x = random(0, M, 2 * HALF) * 4
    ops = EmulatedAscendExtensionOps()
    plain, _ = ops.swiglu_oai_quant(x, 1.702, 7.0, need_quant=False, group_list=torch.tensor([3, 3, ROWS]), group_list_type=GroupListType.CUMSUM)
    values, scale = ops.swiglu_oai_quant(x, 1.702, 7.0, group_list=LIST, group_list_type=GroupListType.COUNT)
    for row in range(ROWS):
        wanted = halves(x[row], lambda a, b: clamped(a, b, 1.702, 7.0, 1.0))
        assert numbers(plain[row]) == pytest.approx(wanted, rel=1e-4)
        assert numbers(values[row] * scale[row]) == pytest.approx(wanted, abs=float(scale[row]) * 1.01)
    assert poison_mask(plain[ROWS:]).all()
    assert not poison_mask(ops.swiglu_oai_quant(x, 1.702, 7.0)[0]).all(1).any()
    with pytest.raises(ValueError, match="must be 0 or 1"):
        ops.swiglu_oai_quant(x, 1.702, 7.0, group_list=LIST)


def test_the_triton_one_is_interleaved() -> None:
    x = random(0, M, 2 * HALF) * 4
    found = EmulatedAscendExtensionOps().swiglu_oai_triton(x, 2 * HALF, 1.702, 7.0)
    line = numbers(x[1])
    assert numbers(found[1]) == pytest.approx([clamped(a, b, 1.702, 7.0, 1.0) for a, b in zip(line[0::2], line[1::2], strict=True)], rel=1e-4)


def test_situ() -> None:
    x = random(0, M, 2 * HALF) * 10
    ops = EmulatedAscendExtensionOps()
    values, scale = ops.situ(x, LIST, COUNT, need_quant=True)
    unbounded, _ = ops.situ(x, LIST, COUNT, need_quant=False, linear_beta=None)
    assert scale is not None
    for row in range(ROWS):
        codes, wanted_scale = quantized(halves(x[row], situ), 127, half_up)
        assert sum(abs(a - b) for a, b in zip(integers(values[row]), codes, strict=True)) <= 1
        assert float(scale[row]) == pytest.approx(wanted_scale, rel=1e-5)
        wanted = halves(x[row], lambda a, b: 4 * math.tanh(a / 4) * sigmoid(a) * b)
        assert numbers(unbounded[row]) == pytest.approx(wanted, rel=1e-4)
    assert poison_mask(values[ROWS:]).all()


def test_rows_of_zeros() -> None:
    """situ has a least scale; swiglu_quant divides zero by zero."""
    x, ops = torch.zeros(1, 2 * HALF), EmulatedAscendExtensionOps()
    values, scale = ops.situ(x, torch.tensor([1]), COUNT, need_quant=True)
    assert scale is not None
    assert float(scale) == pytest.approx(1e-30)
    assert not values.any()
    values, scale = ops.swiglu_quant(x, torch.tensor([1]), COUNT)
    assert float(scale) == 0.0
    assert poison_mask(values).all()


def test_mx_activations_of_a5() -> None:
    x = random(0, M, 2 * HALF) * 4
    ops = EmulatedAscendExtensionOps(device=Device.A5)
    results: dict[str, tuple[tuple[Tensor, Tensor], Callable[[float, float], float]]] = {
        "situ": (ops.situ_mxfp8_quant(x, LIST), situ),
        "clamped": (
            ops.swiglu_group_quant(x, None, LIST, quant_mode=2, group_list_type=GroupQuantListType.COUNT, clamp_value=2.0)[:2],
            lambda a, b: silu(min(a, 2.0)) * max(-2.0, min(b, 2.0)),
        ),
    }
    for (values, scale), formula in results.values():
        assert (values.dtype, scale.dtype, scale.shape) == (torch.float8_e4m3fn, torch.float8_e8m0fnu, (M, 1, 2))
        for row in range(ROWS):
            wanted = halves(x[row], formula)
            found = [float(values[row, n]) * 2.0 ** (int(scale.view(torch.uint8)[row, 0, n // 32]) - 127) for n in range(HALF)]
            assert all(abs(a - b) <= max(map(abs, wanted)) / 7 for a, b in zip(found, wanted, strict=True))
        assert poison_mask(values[ROWS:]).all()
    with pytest.raises(EmulatedRefusal, match="A5"):
        EmulatedAscendExtensionOps("faithful").situ_mxfp8_quant(x, LIST)


def test_l1_norm() -> None:
    x = random(0, M, 4).abs()
    assert numbers(EmulatedAscendExtensionOps().l1_norm(x).sum(-1)) == pytest.approx([1.0] * M)
