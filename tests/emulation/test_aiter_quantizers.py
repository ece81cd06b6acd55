"""The emulated quantisers: their tables, their traps, and the rounding of scales by version."""

import inspect

import pytest
import torch
from torch import Tensor

from tests.emulation.aiter.enums import MxRounding, QuantType
from tests.emulation.aiter.library import VersionName
from tests.emulation.aiter.misuse import EmulatedMisuse, Reason
from tests.emulation.aiter.numerics import e8m0_scale, e8m0_scale_wheel
from tests.emulation.aiter.permutations import Layout, as_bytes, unshuffle
from tests.emulation.aiter_cases import E2M1, FP8, FP8_MAX, make_aiter

FP4 = torch.float4_e2m1fn_x2
FNUZ = torch.float8_e4m3fnuz
E8M0 = torch.float8_e8m0fnu
ROWS, COLUMNS = 5, 256


def rows() -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)).bfloat16()


def mx(version: VersionName = "head", x: Tensor | None = None, **options: object) -> tuple[Tensor, Tensor]:
    payload, scale = make_aiter(version=version).get_hip_quant(QuantType.per_1x32)(rows() if x is None else x, **options)
    assert scale is not None
    return payload, scale


def power(scale: Tensor) -> Tensor:
    return torch.exp2(as_bytes(scale).float() - 127)


def fp4_values(payload: Tensor) -> Tensor:
    pairs = as_bytes(payload).long()
    return E2M1[torch.stack((pairs % 16, pairs // 16), -1).flatten(-2)]


def byte(amax: float, dtype: torch.dtype, rounding: MxRounding = MxRounding.RoundUp) -> int:
    return int(as_bytes(e8m0_scale(torch.tensor([amax]), dtype, rounding)))


def test_scales_round_as_the_contract_tells() -> None:
    assert [byte(amax, FP4) for amax in (6.0, 6.01, 3.0, 0.0, float("inf"))] == [127, 128, 126, 0, 255]
    assert [byte(amax, FP8) for amax in (448.0, 449.0, 224.0)] == [127, 128, 126]
    assert [byte(amax, FNUZ) for amax in (240.0, 241.0)] == [127, 128]
    assert [byte(amax, FP4, MxRounding.RoundDown) for amax in (4.0, 6.0, 7.9, 8.0)] == [127, 127, 127, 128]
    assert [byte(amax, FP4, MxRounding.Ceil) for amax in (4.0, 4.1, 8.0)] == [127, 128, 128]
    assert [byte(amax, FP4, MxRounding.Even) for amax in (6.9, 7.0, 4.0)] == [127, 128, 127]  # 7 rounds to 8 with one bit of mantissa


def test_the_wheel_rounds_a_quarter_to_the_nearest_power() -> None:
    bytes_of = [int(as_bytes(e8m0_scale_wheel(torch.tensor([amax])))) for amax in (4.0, 5.9, 6.0, 7.9, 8.0)]
    assert bytes_of == [127, 127, 128, 128, 128]
    assert [byte(amax, FP4) for amax in (4.0, 5.9, 6.0, 7.9, 8.0)] == [127, 127, 127, 128, 128]
    x = torch.zeros(1, 32, dtype=torch.bfloat16)
    x[0, 0] = 6.0
    assert (int(as_bytes(mx("0.1.7", x)[1])), int(as_bytes(mx("head", x)[1]))) == (128, 127)


def test_fp4_is_nearest_with_ties_to_even() -> None:
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.0, -0.25, 6.0]
    x = torch.zeros(1, 32, dtype=torch.bfloat16)
    x[0, : len(ties)] = torch.tensor(ties)
    payload, scale = mx(x=x)
    assert float(power(scale)) == 1.0
    values = fp4_values(payload)[0, : len(ties)]
    assert torch.equal(values, torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -0.0, -0.0, 6.0]))
    assert torch.equal(values.signbit(), torch.tensor(ties).signbit())


def test_microscaled_outputs_are_those_of_the_table() -> None:
    payload, scale = mx()
    assert (payload.dtype, payload.shape, scale.dtype, scale.shape) == (FP4, (ROWS, COLUMNS // 2), E8M0, (ROWS, COLUMNS // 32))
    error = (fp4_values(payload) * power(scale).repeat_interleave(32, 1) - rows().float()).abs()
    assert (error <= power(scale).repeat_interleave(32, 1)).all()  # half of the widest distance, of 4 and 6
    payload, scale = mx(quant_dtype=FP8, scale_type=E8M0)
    assert (payload.dtype, payload.shape, scale.dtype, scale.shape) == (FP8, (ROWS, COLUMNS), E8M0, (ROWS, COLUMNS // 32))
    amax = rows().float().abs().view(ROWS, -1, 32).amax(-1)
    assert (amax <= FP8_MAX * power(scale)).all()
    assert (amax > FP8_MAX / 2 * power(scale)).all()
    for options in ({"quant_dtype": FP4}, {"quant_dtype": FP8, "scale_type": E8M0}):
        plain, shuffled = mx("head", None, **options)[1], mx("head", None, **options, shuffle=True)[1]
        assert shuffled.shape == (256, 8)
        assert torch.equal(as_bytes(unshuffle(shuffled, Layout.SCALE_TILES, 1))[:ROWS], as_bytes(plain))


def test_fp8_without_a_scale_type_has_float32_scales_of_another_range() -> None:
    payload, scale = mx(quant_dtype=FP8)
    amax = rows().float().abs().view(ROWS, -1, 32).amax(-1)
    assert scale.dtype is torch.float32
    assert torch.equal(scale, amax / 256)
    assert payload.float().abs().max() == 256


def test_what_microscaling_refuses() -> None:
    x = rows()
    refused: tuple[tuple[type[Exception], VersionName, dict[str, object]], ...] = (
        (ValueError, "head", {"scale_type": torch.float32}),
        (NotImplementedError, "head", {"quant_dtype": FP8, "shuffle": True}),
        (NotImplementedError, "head", {"quant_dtype": FP8, "scale_type": torch.float32, "shuffle": True}),
        (ValueError, "head", {"quant_dtype": torch.int8}),
        (ValueError, "head", {"scale": torch.ones(1)}),
        (ValueError, "0.1.7", {"quant_dtype": FP8}),
        (TypeError, "0.1.7", {"scale_type": E8M0}),
        (AssertionError, "head", {"x": x[:, :40]}),
        (AssertionError, "head", {"x": x[None]}),
        (RuntimeError, "head", {"x": x.float()}),
    )
    for error, version, options in refused:
        with pytest.raises(error):
            make_aiter(version=version).get_hip_quant(QuantType.per_1x32)(**{"x": x, **options})


@pytest.mark.parametrize(("quant", "group"), [(QuantType.per_Token, COLUMNS), (QuantType.per_1x128, 128)])
def test_groups_have_continuous_scales(quant: QuantType, group: int) -> None:
    x = rows()
    for dtype, largest in ((FP8, FP8_MAX), (torch.int8, 127.0)):
        payload, scale = make_aiter().get_hip_quant(quant)(x, quant_dtype=dtype)
        assert scale is not None
        assert torch.equal(scale, x.float().abs().view(ROWS, -1, group).amax(-1) / largest)
        assert payload.dtype is dtype
        assert (payload.float().abs().view(ROWS, -1, group).amax(-1) == largest).all()
    with pytest.raises(ValueError, match="static"):
        make_aiter().get_hip_quant(quant)(x, scale=torch.ones(1))


def test_a_tensor_has_one_scale() -> None:
    quant = make_aiter().get_hip_quant(QuantType.per_Tensor)
    payload, scale = quant(rows(), quant_dtype=FP8)
    assert scale is not None
    assert torch.equal(scale, (rows().float().abs().amax() / FP8_MAX).view(1))
    assert quant(rows(), scale=scale, quant_dtype=FP8)[1] is scale
    assert torch.equal(as_bytes(quant(rows(), scale=scale, quant_dtype=FP8)[0]), as_bytes(payload))
    with pytest.raises(AssertionError, match="num_rows"):
        quant(rows(), num_rows=torch.tensor([1], dtype=torch.int32))
    with pytest.raises(ValueError, match="quant_dtype"):
        quant(rows(), quant_dtype=torch.bfloat16)


def test_a_transposed_scale_keeps_its_shape_and_loses_its_order() -> None:
    quant = make_aiter().get_hip_quant(QuantType.per_1x128)
    plain, transposed = quant(rows(), quant_dtype=FP8)[1], quant(rows(), quant_dtype=FP8, transpose_scale=True)[1]
    assert plain is not None
    assert transposed is not None
    assert transposed.shape == plain.shape
    assert transposed.is_contiguous()
    assert torch.equal(transposed.flatten(), plain.t().flatten())


def test_rows_past_the_count_are_poison() -> None:
    library = make_aiter()
    two = torch.tensor([2], dtype=torch.int32)
    for quant, options in (
        (QuantType.per_Token, {"quant_dtype": FP8}),
        (QuantType.per_1x128, {"quant_dtype": FP8}),
        (QuantType.per_1x32, {"quant_dtype": FP8, "scale_type": E8M0}),
    ):
        payload, scale = library.get_hip_quant(quant)(rows(), **options, num_rows=two)
        assert scale is not None
        assert payload[2:].float().isnan().all()
        assert scale[2:].float().isnan().all()
        assert payload[:2].float().isfinite().all()
        assert library.get_hip_quant(quant)(rows(), **options, num_rows=two, num_rows_factor=2)[0][3].float().isfinite().all()
    with pytest.raises(EmulatedMisuse) as raised:
        library.get_hip_quant(QuantType.per_Token)(rows(), num_rows=two.long())
    assert (raised.value.reason, raised.value.operand) == (Reason.DTYPE, "num_rows")


def test_functions_are_made_once_and_refuse_when_called() -> None:
    library = make_aiter()
    assert library.get_hip_quant(QuantType.per_1x32) is library.get_hip_quant(QuantType(3))
    assert library.get_hip_quant(QuantType.No)(rows(), scale=None)[1] is None
    for refused in (QuantType.per_128x128, QuantType.per_256x128, QuantType.per_1024x128):
        quant = library.get_hip_quant(refused)
        with pytest.raises(NotImplementedError):
            quant(rows())


def test_a_probe_finds_scale_type_where_the_passthrough_may_be_missing() -> None:
    versions: tuple[VersionName, ...] = ("0.1.7", "head", "later")
    found = ["scale_type" in inspect.signature(make_aiter(version=version).get_hip_quant(QuantType.per_1x32)).parameters for version in versions]
    assert found == [False, True, True]
