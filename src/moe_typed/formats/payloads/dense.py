"""Rows without scales, in the dtypes that models compute in."""

from typing import ClassVar, TypeAlias, final

import torch
from jaxtyping import BFloat16, Float16, Float32
from torch import Tensor

from ...boundary import boundary
from ..spec import Format
from .base import DenseRows


@final
@boundary
class Bf16Rows(DenseRows):
    """Rows in bfloat16."""

    format: ClassVar[Format] = Format("bf16", torch.bfloat16)
    data: BFloat16[Tensor, "rows hidden"]


@final
@boundary
class Fp16Rows(DenseRows):
    """Rows in float16."""

    format: ClassVar[Format] = Format("fp16", torch.float16)
    data: Float16[Tensor, "rows hidden"]


@final
@boundary
class Fp32Rows(DenseRows):
    """Rows in float32: for references and for checkpoints that were saved so."""

    format: ClassVar[Format] = Format("fp32", torch.float32)
    data: Float32[Tensor, "rows hidden"]


AnyDenseRows: TypeAlias = Bf16Rows | Fp16Rows | Fp32Rows
