"""What the kernels for compute capability 9.x have in common: how they bring memory, and how many of their programs run at once."""

from typing import Protocol, cast

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Triton 3.8 has new names for both: a piece by the copy engine, and 16 bytes a thread by asynchronous copies.
bring_piece = tma.async_load if "async_load" in tma.__all__ else tma.async_copy_global_to_shared
gather = async_copy.async_load if "async_load" in async_copy.__all__ else async_copy.async_copy_global_to_shared


class _Properties(Protocol):
    multi_processor_count: int


def pieces(matrix: Tensor, rows: int) -> TensorDescriptor:
    """Return a descriptor of pieces of 128 bytes of ``rows`` rows of a contiguous matrix."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * matrix.element_size(), rank=2)
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, 128 // matrix.element_size()], layout)


def multiprocessors(tensor: Tensor) -> int:
    """Return how many multiprocessors the device of a tensor has; on the meta device, that of the current one, which is compiled for."""
    device = None if tensor.is_meta else tensor.device
    return cast("_Properties", torch.cuda.get_device_properties(device)).multi_processor_count  # pyright: ignore[reportUnknownMemberType]
