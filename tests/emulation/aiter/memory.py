"""Memory as kernels see it: an address, and a dtype and shape that nobody asked the tensor for."""

import math
from collections.abc import Collection

import torch
from torch import Tensor

from .misuse import Judge, Reason

_POISON_WORD = 0x7F  # words of it are huge ints; as float32 they are 3.4e38
_POISON_SCALE = 0xFF  # the NaN of e8m0
_ONE_BYTE_SCALES = (torch.float8_e8m0fnu, torch.uint8)


def raw_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of the tensor's memory from its first element on, up to the end of its storage."""
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return storage[tensor.storage_offset() * tensor.element_size() :]


def reread(tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return a copy of the tensor's memory as a contiguous array; what lies past the storage is poison."""
    size = math.prod(shape) * dtype.itemsize
    poison = _POISON_SCALE if dtype.itemsize == 1 else _POISON_WORD
    seen = raw_bytes(tensor)[:size]
    padding = torch.full((size - seen.numel(),), poison, dtype=torch.uint8)
    return torch.cat((seen, padding)).view(dtype).view(shape)


def read(judge: Judge, operand: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], also: Collection[tuple[int, ...]] = ()) -> Tensor:
    """Return what a kernel reads that expects this dtype and shape. ``also``: shapes of the same memory that callers may pass.

    e8m0 may come as uint8. Raises EmulatedMisuse in strict mode where the tensor is something else.
    """
    one_byte = dtype in _ONE_BYTE_SCALES and tensor.dtype in _ONE_BYTE_SCALES
    if tensor.dtype is not dtype and not one_byte:
        judge.silent(Reason.DTYPE, operand, f"Expected {dtype}, got {tensor.dtype}.")
    if tuple(tensor.shape) != shape and tuple(tensor.shape) not in also:
        judge.silent(Reason.SHAPE, operand, f"Expected {shape}, got {tuple(tensor.shape)}.")
    if not tensor.is_contiguous():
        judge.silent(Reason.STRIDES, operand, f"Expected a contiguous tensor, got strides {tensor.stride()}.")
    return reread(tensor, dtype, shape)


def poison_rows(tensor: Tensor, first: int) -> None:
    """Poison the rows from ``first`` on in place: NaN in what has one, 0x7F in the bytes of e2m1 and integers."""
    dtype = tensor.dtype
    if dtype in (torch.float32, torch.bfloat16, torch.float16):
        tensor[first:] = torch.nan
    else:
        nan = {torch.float8_e8m0fnu: 0xFF, torch.float8_e4m3fnuz: 0x80}
        tensor.view(torch.uint8)[first:] = nan.get(dtype, 0x7F)
