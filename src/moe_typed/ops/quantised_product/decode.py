"""Pieces of rows and weights, as they are held, to what a matrix instruction takes. A piece is (height, DEPTH), along the depth."""

import triton
import triton.language as tl

from ..minifloat.triton import decode, decode_e4m3fn, decode_e8m0
from .spec import Code

_DENSE = tl.constexpr(Code.DENSE.value)
_FP8 = tl.constexpr(Code.FP8.value)
_INT8 = tl.constexpr(Code.INT8.value)
_FP4 = tl.constexpr(Code.FP4.value)
_INT4 = tl.constexpr(Code.INT4.value)
_MX_GROUP = tl.constexpr(32)


@triton.jit
def load_piece(pointer: tl.tensor, in_height: tl.tensor, in_depth: tl.tensor, MASKED: tl.constexpr) -> tl.tensor:
    """Return what stands there, and zeros outside."""
    return tl.load(pointer, mask=in_height[:, None] & in_depth[None, :], other=0.0) if MASKED else tl.load(pointer)


@triton.jit
def decode_piece(held: tl.tensor, CODE: tl.constexpr, HEIGHT: tl.constexpr, DEPTH: tl.constexpr) -> tl.tensor:
    """Return the values of codes: those of two a byte (HEIGHT, DEPTH / 2) as float32 or codes int32 (HEIGHT, DEPTH); others as they are, or float32.

    Fp8 comes as uint8 from Triton's interpreter, which cannot convert it.
    """
    if CODE == _FP4 or CODE == _INT4:  # noqa: SIM109  Triton compiles no "in"
        wide = held.to(tl.int32)
        codes = tl.reshape(tl.join(wide & 0xF, wide >> 4), (HEIGHT, DEPTH))
        value = decode(codes, 4, 1, 1, -1) if CODE == _FP4 else codes
    elif held.dtype == tl.uint8:
        value = decode_e4m3fn(held)
    else:
        value = held
    return value


@triton.jit
def scale_piece(
    value: tl.tensor, pointer: tl.tensor, in_height: tl.tensor, in_groups: tl.tensor, HEIGHT: tl.constexpr, DEPTH: tl.constexpr
) -> tl.tensor:
    """Return values times the e8m0 scales of 32 of the depth each, float32; ``pointer`` is at bytes (HEIGHT, DEPTH / 32)."""
    scale = decode_e8m0(tl.load(pointer, mask=in_height[:, None] & in_groups[None, :], other=0).to(tl.int32))
    groups = tl.reshape(value.to(tl.float32), (HEIGHT, DEPTH // _MX_GROUP, _MX_GROUP))
    return tl.reshape(groups * scale[:, :, None], (HEIGHT, DEPTH))
