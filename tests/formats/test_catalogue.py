"""The facts of every format, and that the catalogue forgets none."""

from collections.abc import Iterator

import pytest
import torch

from moe_typed import Payload
from moe_typed.boundary import fields_of, is_boundary
from moe_typed.boundary.fields import TensorSpec
from moe_typed.formats import ExpertWeights, GateUpOrder, ScaleOrder, ScaleRounding, catalogue

BF16, F16, F32, I8, I32 = torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.int32
FN, FNUZ, FP4, E8 = torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float4_e2m1fn_x2, torch.float8_e8m0fnu
ROW, COLUMN, SWIZZLED = ScaleOrder.ROW_MAJOR, ScaleOrder.COLUMN_MAJOR_ALIGNED, ScaleOrder.SWIZZLED_128X4
SCALAR, PER_ROW, SLAB = ScaleOrder.SCALAR, ScaleOrder.PER_ROW, ScaleOrder.SLAB_COLUMN_MAJOR
PAIRS = ScaleOrder.ROW_MAJOR_PAIRS
NONE, POWER, DTYPE = ScaleRounding.NONE, ScaleRounding.POWER_OF_TWO, ScaleRounding.TO_DTYPE

Facts = tuple[torch.dtype, torch.dtype | None, tuple[int, int] | None, ScaleOrder | None, ScaleRounding | None, int]

PAYLOADS: dict[str, Facts] = {
    # name                 data  scale group     order     rounding values in an element of the data
    "bf16": (BF16, None, None, None, None, 1),
    "fp16": (F16, None, None, None, None, 1),
    "fp32": (F32, None, None, None, None, 1),
    "fp8-tensor": (FN, F32, (0, 0), SCALAR, NONE, 1),
    "fp8-fnuz-tensor": (FNUZ, F32, (0, 0), SCALAR, NONE, 1),
    "fp8-token": (FN, F32, (1, 0), PER_ROW, NONE, 1),
    "fp8-fnuz-token": (FNUZ, F32, (1, 0), PER_ROW, NONE, 1),
    "int8-token": (I8, F32, (1, 0), PER_ROW, NONE, 1),
    "fp8-block128": (FN, F32, (1, 128), ROW, NONE, 1),
    "fp8-fnuz-block128": (FNUZ, F32, (1, 128), ROW, NONE, 1),
    "fp8-block128-column": (FN, F32, (1, 128), COLUMN, NONE, 1),
    "fp8-block128-packed": (FN, I32, (1, 128), COLUMN, POWER, 1),
    "fp8-block128-slab": (FN, F32, (1, 128), SLAB, NONE, 1),
    "fp8-block128-packed-slab": (FN, I32, (1, 128), SLAB, POWER, 1),
    "mxfp8": (FN, E8, (1, 32), ROW, POWER, 1),
    "mxfp8-swizzled": (FN, E8, (1, 32), SWIZZLED, POWER, 1),
    "mxfp4": (FP4, E8, (1, 32), ROW, POWER, 2),
    "nvfp4": (FP4, FN, (1, 16), ROW, DTYPE, 2),
    "int4-token": (I32, F32, (1, 0), PER_ROW, NONE, 8),
    "mxfp8-pairs": (FN, E8, (1, 32), PAIRS, POWER, 1),
    "mxfp4-pairs": (FP4, E8, (1, 32), PAIRS, POWER, 2),
}
WEIGHTS: dict[str, Facts] = {
    "bf16": (BF16, None, None, None, None, 1),
    "fp16": (F16, None, None, None, None, 1),
    "fp32": (F32, None, None, None, None, 1),
    "bf16-transposed": (BF16, None, None, None, None, 1),
    "fp16-transposed": (F16, None, None, None, None, 1),
    "fp32-transposed": (F32, None, None, None, None, 1),
    "bf16-ungated": (BF16, None, None, None, None, 1),
    "fp16-ungated": (F16, None, None, None, None, 1),
    "fp32-ungated": (F32, None, None, None, None, 1),
    "fp8-tensor": (FN, F32, (0, 0), SCALAR, NONE, 1),
    "fp8-channel": (FN, F32, (1, 0), PER_ROW, NONE, 1),
    "int8-channel": (I8, F32, (1, 0), PER_ROW, NONE, 1),
    "fp8-block128": (FN, F32, (128, 128), ROW, NONE, 1),
    "mxfp8": (FN, E8, (1, 32), ROW, POWER, 1),
    "mxfp4": (FP4, E8, (1, 32), ROW, POWER, 2),
    "nvfp4": (FP4, FN, (1, 16), ROW, DTYPE, 2),
    "int4-awq": (I32, F16, (1, 128), ROW, DTYPE, 8),
    "int4-gptq": (I32, F16, (1, 128), ROW, DTYPE, 8),
    "int4-compressed": (I32, BF16, (1, 128), ROW, DTYPE, 8),
    "int4-channel-w4a8": (I8, F32, (1, 0), PER_ROW, NONE, 2),
    "int4-channel-w4a4": (I8, F32, (1, 0), PER_ROW, NONE, 1),
    "int4-channel-w4a4-packed": (I8, F32, (1, 0), PER_ROW, NONE, 2),
}
Entry = type[Payload] | type[ExpertWeights[GateUpOrder]]
_WEIGHTS: tuple[Entry, ...] = catalogue.WEIGHTS
ENTRIES: list[tuple[Entry, dict[str, Facts]]] = [*((cls, PAYLOADS) for cls in catalogue.PAYLOADS), *((cls, WEIGHTS) for cls in _WEIGHTS)]


@pytest.mark.parametrize(("cls", "facts"), ENTRIES, ids=lambda value: value.__name__ if isinstance(value, type) else "")
class TestFacts:
    def test_are_these(self, cls: Entry, facts: dict[str, Facts]) -> None:
        found, scale = cls.format, cls.format.scale
        of_scale = (None,) * 4 if scale is None else (scale.dtype, scale.group, scale.order, scale.rounding)
        assert (found.data_dtype, *of_scale, found.per_element) == facts[found.name]
        assert scale is None or scale.per_element == (4 if scale.dtype == I32 else 1)

    def test_are_in_the_annotations(self, cls: Entry, facts: dict[str, Facts]) -> None:
        """Of payloads, the rest is shown by building them; here the fields of weights are looked at, too."""
        specs = {field.name: field.spec for field in fields_of(cls) if isinstance(field.spec, TensorSpec)}
        values = [spec for name, spec in specs.items() if name in ("data", "w13", "w2")]
        scales = [spec for name, spec in specs.items() if name.endswith("scale")]
        data, scale, group, order, _, per_element = facts[cls.format.name]
        assert values
        assert {spec.dtypes for spec in values} == {(data,)}
        assert all(scale in spec.dtypes for spec in scales)
        assert bool(scales) is (scale is not None)
        if data != I32 and order is ROW and group is not None:  # int4 is held transposed, and its group is the object's
            for spec in scales:
                divisor = int(spec.dims[-1].text.rpartition("//")[2])
                assert group[1] == divisor * (per_element if "bytes" in spec.dims[-1].text else 1)
                assert spec.layout is not None
                assert spec.layout.contiguous


def concrete(base: type) -> Iterator[type]:
    below: list[type] = base.__subclasses__()
    for cls in below:
        yield from concrete(cls)
        if is_boundary(cls) and cls.__module__.startswith("moe_typed."):
            yield cls


@pytest.mark.parametrize(("base", "listed"), [(Payload, catalogue.PAYLOADS), (ExpertWeights, catalogue.WEIGHTS)])
def test_every_class_is_in_the_catalogue_under_a_name_of_its_own(base: type, listed: tuple[Entry, ...]) -> None:
    assert set(concrete(base)) == set(listed)
    assert len({cls.format.name for cls in listed}) == len(listed)


def test_the_table_says_it_for_people() -> None:
    payloads = {row[0]: row for row in catalogue.payload_facts()}
    assert payloads["Bf16Rows"] == ("Bf16Rows", "bf16", "bfloat16", "", "", "", "")
    assert payloads["Fp8Block128PackedRows"] == (
        "Fp8Block128PackedRows",
        "fp8-block128-packed",
        "float8_e4m3fn",
        "int32, 4 each",
        "1 x 128",
        "column-major, rows padded to 16 bytes",
        "power of two",
    )
    weights = {row[0]: row for row in catalogue.weight_facts()}
    assert weights["Fp8TensorExpertWeights"][2:] == ("float8_e4m3fn", "float32", "all x all", "one for all", "none")
    assert len(payloads) == len(catalogue.PAYLOADS)
    assert {len(row) for row in (*payloads.values(), *weights.values())} == {len(catalogue.FACTS)}
