"""The e8m0 codec against float64, over every byte and every exponent of float32."""

import math

import pytest
import torch

from moe_typed.formats import e8m0


def decoded(*codes: int) -> list[float]:
    scale = torch.tensor(codes, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    return [float(value) for value in e8m0.decode(scale)]


def encoded(*values: float) -> list[int]:
    return [int(code) for code in e8m0.encode_up(torch.tensor(values, dtype=torch.float32)).view(torch.uint8)]


@pytest.mark.parametrize("code", range(255))
def test_every_byte_but_the_last_is_a_power_of_two(code: int) -> None:
    assert decoded(code) == [math.ldexp(1.0, code - 127)]


def test_the_last_byte_is_nan_and_no_byte_is_infinite_or_zero() -> None:
    assert math.isnan(decoded(255)[0])
    everything = decoded(*range(255))
    assert all(math.isfinite(value) and value > 0 for value in everything)
    assert decoded(0, 127, 134) == [2.0**-127, 1.0, 128.0]


def test_decode_keeps_the_shape_and_takes_strides() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    strided = e8m0.decode(codes.view(torch.float8_e8m0fnu).T)
    straight = e8m0.decode(codes.T.contiguous().view(torch.float8_e8m0fnu))
    assert torch.equal(strided.nan_to_num(-1), straight.nan_to_num(-1))
    assert e8m0.decode(codes[:0].view(torch.float8_e8m0fnu)).shape == (0, 16)


@pytest.mark.parametrize("exponent", range(-149, 128))
def test_the_smallest_power_of_two_that_is_not_below(exponent: int) -> None:
    power = math.ldexp(1.0, exponent)
    tensor = torch.tensor(power, dtype=torch.float32)
    above = float(torch.nextafter(tensor, torch.tensor(math.inf)))
    below = float(torch.nextafter(tensor, torch.tensor(0.0)))
    for value in (power, above, below, float(torch.tensor(1.5 * power, dtype=torch.float32))):
        (code,) = encoded(value)
        fraction, ceiling = math.frexp(value)  # value = fraction * 2^ceiling, fraction in [0.5, 1)
        want = max(ceiling - (fraction == 0.5), -127)
        assert code == (255 if want > 127 else want + 127 if value else 0)
        assert code == 255 or decoded(code)[0] >= value


def test_what_e8m0_cannot_hold_is_nan() -> None:
    assert encoded(math.inf, -math.inf, math.nan, -math.nan, -1.0, -1e-45, 1.01 * 2.0**127) == [255] * 7


def test_both_zeros_are_the_smallest_power() -> None:
    assert encoded(0.0, -0.0, 1e-45, 2.0**-127, 2.0**-126, 1.0, 2.0**127) == [0, 0, 0, 0, 1, 127, 254]


def test_encode_is_the_inverse_of_decode() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    values = e8m0.decode(codes.view(torch.float8_e8m0fnu))
    assert torch.equal(e8m0.encode_up(values).view(torch.uint8), codes)
    assert torch.equal(e8m0.encode_up(values.T).view(torch.uint8), codes.T)


def test_powers_of_two_are_recognised() -> None:
    values = torch.tensor([0.25, 0.5, 1.0, 2.0**-127, 2.0**127, 0.3, 3.0, 0.0, -1.0, 2.0**-128, math.inf, math.nan])
    assert torch.equal(e8m0.is_power_of_two(values), torch.arange(12) < 5)
