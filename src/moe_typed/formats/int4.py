"""Int4 as the Ascend NPU packs it: eight two's-complement nibbles an int32, the first in the lowest bits.

Element 8 * c + i is in bits 4 * i to 4 * i + 3 of word c: so ``npu_convert_weight_to_int4pack`` and ``npu_dynamic_quant`` write it. Two neighbours
a byte, the first in the low half, is the same stream of bits: four such bytes are one word of a little-endian machine.
"""

from typing import Final

import torch
from torch import Tensor

PER_WORD: Final = 8
_BITS: Final = 4
_MASK: Final = 0xF
_SIGN: Final = 8  # a nibble above 7 stands for itself less 16


def unpack_words(words: Tensor) -> Tensor:
    """Return the values -8 to 7 of int32 words (..., n), as int32 (..., 8 * n)."""
    shifts = _BITS * torch.arange(PER_WORD, dtype=torch.int32, device=words.device)
    return signed((words.unsqueeze(-1) >> shifts) & _MASK).flatten(-2)


def pack_words(values: Tensor) -> Tensor:
    """Return integer values -8 to 7 (..., 8 * n) as int32 words (..., n). Raises: ValueError where the last dim is no multiple of eight."""
    if values.shape[-1] % PER_WORD:
        raise ValueError(f"{values.shape[-1]} values do not fill whole words of {PER_WORD}")
    nibbles = (values.to(torch.int32) & _MASK).reshape(*values.shape[:-1], values.shape[-1] // PER_WORD, PER_WORD)
    word = nibbles[..., 0].clone()
    for place in range(1, PER_WORD):
        word |= nibbles[..., place] << (_BITS * place)
    return word


def unpack_bytes(packed: Tensor, dim: int) -> Tensor:
    """Return the values -8 to 7 of int8, two neighbours along ``dim`` a byte, the first in the low half, as int8 with twice that dim."""
    low, high = packed & _MASK, (packed >> _BITS) & _MASK
    axis = dim if dim >= 0 else packed.dim() + dim
    return signed(torch.stack((low, high), axis + 1)).flatten(axis, axis + 1)


def pack_bytes(values: Tensor, dim: int) -> Tensor:
    """Return integer values -8 to 7 as int8, two neighbours along ``dim`` a byte: the inverse of ``unpack_bytes``."""
    axis = dim if dim >= 0 else values.dim() + dim
    pairs = values.to(torch.int8).reshape(*values.shape[:axis], values.shape[axis] // 2, 2, *values.shape[axis + 1 :])
    return (pairs.select(axis + 1, 0) & _MASK) | (pairs.select(axis + 1, 1) << _BITS)


def signed(nibbles: Tensor) -> Tensor:
    """Return codes 0 to 15 as the two's-complement values -8 to 7 that they are; same dtype."""
    return nibbles - 2 * _SIGN * (nibbles >= _SIGN).to(nibbles.dtype)
