"""Pieces of rows and weights, as they are held, to what a matrix instruction takes. A piece is (height, DEPTH), along the depth.

For bfloat16 products, codes of four bits become pairs of bfloat16 in 32-bit words by a few instructions on whole words: four bytes at a time, one
permutation of bytes a pair brings the low half of a byte into the low half of a word, and the high half into the high.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from triton import knobs

from ..minifloat.triton import decode, decode_e4m3fn, decode_e8m0
from ..quantize.spec import MX_GROUP
from .spec import MIDDLE, Code

_DENSE = tl.constexpr(Code.DENSE.value)
_FP8 = tl.constexpr(Code.FP8.value)
_INT8 = tl.constexpr(Code.INT8.value)
_FP4 = tl.constexpr(Code.FP4.value)
_INT4 = tl.constexpr(Code.INT4.value)
_MX_GROUP = tl.constexpr(MX_GROUP)
_MIDDLE = tl.constexpr(MIDDLE)
PACKS: Final = tl.constexpr(not knobs.runtime.interpret and torch.version.hip is None)  # whether there is PTX

# A word for each of the bytes $4 holds. 0x4300 is 128 in bfloat16, whose last four bits are then a code: 128 + code.
_INT4_PAIRS = tl.constexpr(
    "{ .reg .b32 high; shr.u32 high, $4, 4;"
    + "".join(
        f"prmt.b32 ${byte}, $4, high, 0x{4 + byte}{4 + byte}{byte}{byte}; lop3.b32 ${byte}, ${byte}, 0x000F000F, 0x43004300, 0xEA;"
        for byte in range(4)
    )
    + "}"
)
# Sign, two bits of exponent and one of mantissa go where bfloat16 has them; what is missing is the difference of the biases, a factor of 2^126.
_FP4_PAIRS = tl.constexpr(
    "{ .reg .b32 low, rest; shl.b32 low, $4, 4;"
    + "".join(
        f"prmt.b32 ${byte}, low, $4, 0x{4 + byte}{4 + byte}{byte}{byte}; shr.u32 rest, ${byte}, 6;"
        f"and.b32 rest, rest, 0x01C001C0; lop3.b32 ${byte}, ${byte}, 0x80008000, rest, 0xEA;"
        for byte in range(4)
    )
    + "}"
)
_FOUR_WORDS = tl.constexpr("=&r,=&r,=&r,=&r,r")
_TWICE = tl.constexpr(0x10001)  # a half in both halves of a word
_ONES = tl.constexpr(0x3F803F80)
_MINUS_ZEROS = tl.constexpr(-0x7FFF8000)
_MINUS_128S = tl.constexpr(-0x3CFF3D00)
_TWO_TO_126 = tl.constexpr(0x7E807E80)


@triton.jit
def load_piece(pointer: tl.tensor, in_height: tl.tensor, in_depth: tl.tensor, HEIGHT_MASKED: tl.constexpr, DEPTH_MASKED: tl.constexpr) -> tl.tensor:
    """Return what stands there, and zeros outside."""
    if HEIGHT_MASKED and DEPTH_MASKED:
        piece = tl.load(pointer, mask=in_height[:, None] & in_depth[None, :], other=0.0)
    elif HEIGHT_MASKED:
        piece = tl.load(pointer, mask=in_height[:, None], other=0.0)
    elif DEPTH_MASKED:
        piece = tl.load(pointer, mask=in_depth[None, :], other=0.0)
    else:
        piece = tl.load(pointer)
    return piece


@triton.jit
def decode_int4_pairs(held: tl.tensor, zero: tl.tensor, HEIGHT: tl.constexpr, DEPTH: tl.constexpr) -> tl.tensor:
    """Return code - zero, bfloat16, exactly. ``zero``: int32 below 128, for a row or for all."""
    words = tl.inline_asm_elementwise(_INT4_PAIRS, _FOUR_WORDS, [held], dtype=tl.int32, is_pure=True, pack=4)
    return _unpacked(_multiply_add(words, tl.full((1, 1), _ONES, tl.int32), _MINUS_128S + zero * _TWICE), HEIGHT, DEPTH)


@triton.jit
def decode_fp4_pairs(held: tl.tensor, scale: tl.tensor, HEIGHT: tl.constexpr, DEPTH: tl.constexpr) -> tl.tensor:
    """Return codes times e8m0 scales of 32 of the depth each, bfloat16. ``scale``: bytes (HEIGHT, DEPTH / 32), int32."""
    words = tl.inline_asm_elementwise(_FP4_PAIRS, _FOUR_WORDS, [held], dtype=tl.int32, is_pure=True, pack=4)
    # 0x40 is 2^-127, which is byte 0, and 0x7FC0 is NaN.
    by = tl.where(scale == 255, 0x7FC0, tl.maximum(scale << 7, 0x40)) * _TWICE
    by = tl.reshape(tl.broadcast_to(by[:, :, None], (HEIGHT, DEPTH // _MX_GROUP, _MX_GROUP // 2)), (HEIGHT, DEPTH // 2))
    nothing = tl.full((1, 1), _MINUS_ZEROS, tl.int32)
    words = _multiply_add(words, tl.full((1, 1), _TWO_TO_126, tl.int32), nothing)
    return _unpacked(_multiply_add(words, by, nothing), HEIGHT, DEPTH)


@triton.jit
def _multiply_add(words: tl.tensor, by: tl.tensor, plus: tl.tensor) -> tl.tensor:
    """Return words * by + plus in both halves, which are bfloat16."""
    return tl.inline_asm_elementwise("fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [words, by, plus], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _unpacked(words: tl.tensor, HEIGHT: tl.constexpr, DEPTH: tl.constexpr) -> tl.tensor:
    """Return the halves of words (HEIGHT, DEPTH / 2) in turns, low first. No instruction is left of this: a matrix instruction takes words."""
    low = (words & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True)
    high = (words >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.reshape(tl.join(low, high), (HEIGHT, DEPTH))


@triton.jit
def decode_piece(held: tl.tensor, CODE: tl.constexpr, TO_BF16: tl.constexpr, HEIGHT: tl.constexpr, DEPTH: tl.constexpr) -> tl.tensor:
    """Return the values of codes: those of two a byte (HEIGHT, DEPTH / 2) as float32 or codes int32 (HEIGHT, DEPTH); others as they are, or float32.

    ``TO_BF16``: they are for bfloat16. Fp8 comes as uint8 from Triton's interpreter, which cannot convert it.
    """
    if CODE == _FP4 or CODE == _INT4:  # noqa: SIM109  Triton compiles no "in"
        wide = held.to(tl.int32)
        codes = tl.reshape(tl.join(wide & 0xF, wide >> 4), (HEIGHT, DEPTH))
        value = decode(codes, 4, 1, 1, -1) if CODE == _FP4 else codes
    elif held.dtype == tl.uint8:
        value = decode_e4m3fn(held)
    elif CODE == _FP8 and TO_BF16:
        value = held.to(tl.float32)  # by way of float16; what Triton does from there to bfloat16 at once takes twice the time
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


@triton.jit
def scale_of(scales: tl.tensor, in_n: tl.tensor, E8M0: tl.constexpr) -> tl.tensor:
    """Return the scales that stand there, float32."""
    held = tl.load(scales, mask=in_n, other=0.0)
    return decode_e8m0(held.to(tl.int32)) if E8M0 else held.to(tl.float32)


@triton.jit
def codes_of(
    weights: tl.tensor,
    scales: tl.tensor | None,
    zeros: tl.tensor | None,
    in_n: tl.tensor,
    start: tl.tensor,
    K: tl.constexpr,
    CODE: tl.constexpr,
    PER_BYTE: tl.constexpr,
    WEIGHT_STEP: tl.constexpr,
    IN_REGISTERS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_STEP: tl.constexpr,
    N_MASKED: tl.constexpr,
    TO_BF16: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """Return (BLOCK_N, BLOCK_K) at ``start`` of the depth: codes less their zeros, exactly, in any dtype; IN_REGISTERS: times their e8m0 scales.

    ``weights``, ``scales`` and ``zeros`` point at where the depth begins. BLOCK_K divides GROUP where there are zeros. ``TO_BF16``: for it.
    """
    PAIRS: tl.constexpr = PACKS and TO_BF16 and PER_BYTE == 2
    held = tl.arange(0, BLOCK_K // PER_BYTE)
    at = weights + (held + start // PER_BYTE)[None, :] * WEIGHT_STEP
    piece = load_piece(at, in_n, held < (K - start) // PER_BYTE, N_MASKED, K % BLOCK_K != 0)
    if IN_REGISTERS and scales is not None:
        group = tl.arange(0, BLOCK_K // _MX_GROUP)
        by_at = scales[:, None] + (group + start // _MX_GROUP)[None, :] * SCALE_STEP
        in_groups = group < (K - start) // _MX_GROUP
        if PAIRS:
            by = tl.load(by_at, mask=in_n[:, None] & in_groups[None, :], other=0).to(tl.int32)
            value = decode_fp4_pairs(piece, by, BLOCK_N, BLOCK_K)
        else:
            value = scale_piece(decode_piece(piece, CODE, TO_BF16, BLOCK_N, BLOCK_K), by_at, in_n, in_groups, BLOCK_N, BLOCK_K)
    elif CODE == _INT4:
        if zeros is not None:
            zero = tl.load(zeros + start // GROUP * SCALE_STEP, mask=in_n, other=0).to(tl.int32)[:, None]
        else:
            zero = tl.full((BLOCK_N, 1), _MIDDLE, tl.int32)
        value = decode_int4_pairs(piece, zero, BLOCK_N, BLOCK_K) if PAIRS else decode_piece(piece, CODE, TO_BF16, BLOCK_N, BLOCK_K) - zero
    else:
        value = decode_piece(piece, CODE, TO_BF16, BLOCK_N, BLOCK_K)
    return value
