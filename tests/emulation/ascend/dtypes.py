"""Dtypes by the numbers of the schemas."""

from typing import Final

import torch

from moe_typed.runners.ascend.ops import DtypeArg, NpuDtype

_TORCH: Final = {
    0: torch.uint8,
    1: torch.int8,
    3: torch.int32,
    4: torch.int64,
    5: torch.float16,
    6: torch.float32,
    15: torch.bfloat16,
    16: torch.quint4x2,
    23: torch.float8_e5m2,
    24: torch.float8_e4m3fn,
    NpuDtype.FLOAT8_E5M2: torch.float8_e5m2,
    NpuDtype.FLOAT8_E4M3FN: torch.float8_e4m3fn,
}
FP4: Final = (NpuDtype.FLOAT4_E2M1FN_X2, NpuDtype.FLOAT4_E1M2FN_X2)
HALVES: Final = (torch.float16, torch.bfloat16)
FLOATS: Final = (torch.float16, torch.bfloat16, torch.float32)


def resolve(argument: DtypeArg) -> torch.dtype | NpuDtype:
    """Return the dtype that a number stands for, or the number's name where torch has no such dtype."""
    if isinstance(argument, torch.dtype):
        return argument
    return _TORCH[argument] if argument in _TORCH else NpuDtype(argument)


def torch_dtype(argument: DtypeArg | None, default: torch.dtype) -> torch.dtype:
    """Return a dtype that torch has. Raises: ValueError for one that it has not."""
    found = default if argument is None else resolve(argument)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch has no {found!r}")
    return found
