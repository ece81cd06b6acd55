"""The leading rows of every payload class: their values, in the same memory, or a refusal."""

import pytest
import torch
from torch import Tensor

from moe_typed import Payload, debug
from moe_typed.formats import Fp8Block128Rows, NvFp4Rows, ScaledRows, ScaleOrder, catalogue, head
from tests.formats.support import DENSE_DTYPES, make, noise, quantized, wide

ROWS = 6
CUT = [ScaleOrder.SCALAR, ScaleOrder.PER_ROW, ScaleOrder.ROW_MAJOR, ScaleOrder.ROW_MAJOR_PAIRS]
every_class = pytest.mark.parametrize("cls", catalogue.PAYLOADS, ids=lambda cls: cls.__name__)


def rows_of(cls: type[Payload]) -> Payload:
    data = noise(ROWS, wide(cls, 256), spread=3)
    return make(cls, data.to(cls.format.data_dtype)) if cls.format.data_dtype in DENSE_DTYPES else quantized(cls, data)


def can_be_cut(cls: type[Payload]) -> bool:
    return cls.format.scale is None or cls.format.scale.order in CUT


def test_both_kinds_are_among_the_classes() -> None:
    assert {can_be_cut(cls) for cls in catalogue.PAYLOADS} == {True, False}


@every_class
@pytest.mark.parametrize("rows", [0, 1, 4, ROWS])
def test_the_values_are_those_of_the_leading_rows(cls: type[Payload], rows: int) -> None:
    payload = rows_of(cls)
    if not can_be_cut(cls):
        assert cls.format.scale is not None
        with pytest.raises(ValueError, match=f"{cls.__name__} cannot be cut to {rows} rows: its scales are {cls.format.scale.order.value}"):
            head(payload, rows)
        return
    with debug("strict"):
        cut = head(payload, rows)
    assert type(cut) is cls
    assert (cut.rows, cut.hidden) == (rows, payload.hidden)
    assert torch.equal(cut.dequantize(), payload.dequantize()[:rows])


@every_class
def test_it_is_the_same_memory(cls: type[Payload]) -> None:
    if not can_be_cut(cls):
        pytest.skip("cannot be cut")
    payload = rows_of(cls)
    cut = head(payload, 2)
    assert shared(cut.data, payload.data)
    if isinstance(payload, ScaledRows):
        assert isinstance(cut, ScaledRows)
        assert shared(cut.scale, payload.scale)
    if isinstance(payload, NvFp4Rows):
        assert isinstance(cut, NvFp4Rows)
        assert cut.global_scale is payload.global_scale


def shared(part: Tensor, whole: Tensor) -> bool:
    return part.data_ptr() == whole.data_ptr() and part.stride() == whole.stride()


def test_one_row_and_all_rows_of_a_single_row() -> None:
    payload = quantized(Fp8Block128Rows, noise(1, 256))
    assert torch.equal(head(payload, 1).dequantize(), payload.dequantize())
