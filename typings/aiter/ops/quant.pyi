# Who is given a member of QuantType by name gets the quantiser itself; who has any QuantType gets what all quantisers share. A quantiser without a
# static scale takes None alone for ``scale``: the library raises ValueError otherwise.
from typing import Literal, NoReturn, Protocol, TypeAlias, overload, type_check_only

import torch
from torch import Tensor

from ..utility import dtypes
from ..utility.mx_types import MX_DEFAULT_ROUND_MODE, MxScaleRoundMode
from .enum import QuantType

@type_check_only
class HipQuant(Protocol):
    def __call__(
        self, x: Tensor, /, scale: None = None, quant_dtype: torch.dtype = ..., *, num_rows: None = None, num_rows_factor: int = 1
    ) -> tuple[Tensor, Tensor | None]: ...

@type_check_only
class TorchQuant(Protocol):
    def __call__(self, x: Tensor, /, scale: Tensor | None = None, *, quant_dtype: torch.dtype = ...) -> tuple[Tensor, Tensor | None]: ...

@type_check_only
class NoQuant(Protocol):
    def __call__(self, x: Tensor, /, *args: object, **kwargs: object) -> tuple[Tensor, None]: ...

@type_check_only
class UnsupportedQuant(Protocol):
    def __call__(self, *args: object, **kwargs: object) -> NoReturn: ...

@type_check_only
class PerTensorQuantHip(Protocol):
    def __call__(
        self,
        x: Tensor,
        scale: Tensor | None = None,
        quant_dtype: torch.dtype = dtypes.i8,
        num_rows: None = None,
        num_rows_factor: int = 1,
    ) -> tuple[Tensor, Tensor]: ...

@type_check_only
class PerTokenQuantHip(Protocol):
    def __call__(
        self,
        x: Tensor,
        scale: None = None,
        quant_dtype: torch.dtype = dtypes.i8,
        num_rows: Tensor | None = None,
        num_rows_factor: int = 1,
    ) -> tuple[Tensor, Tensor]: ...

# A partial of per_group_quant_hip: the group is bound by name, hence what comes after it goes by name too.
@type_check_only
class Per1x128QuantHip(Protocol):
    def __call__(
        self,
        x: Tensor,
        scale: None = None,
        quant_dtype: torch.dtype = dtypes.i8,
        *,
        transpose_scale: bool = False,
        num_rows: Tensor | None = None,
        num_rows_factor: int = 1,
        scale_type: torch.dtype = dtypes.fp32,
    ) -> tuple[Tensor, Tensor]: ...

@type_check_only
class Per1x32QuantHip(Protocol):
    def __call__(
        self,
        x: Tensor,
        scale: None = None,
        quant_dtype: torch.dtype = dtypes.fp4x2,
        shuffle: bool = False,
        num_rows: Tensor | None = None,
        num_rows_factor: int = 1,
        scale_type: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]: ...

@type_check_only
class PerTensorQuant(Protocol):
    def __call__(
        self,
        x: Tensor,
        scale: Tensor | None = None,
        scale_dtype: torch.dtype = dtypes.fp32,
        quant_dtype: torch.dtype = dtypes.i8,
        dtypeMax: float | None = None,
    ) -> tuple[Tensor, Tensor]: ...

@type_check_only
class PerTokenQuant(Protocol):
    def __call__(
        self,
        x: Tensor,
        scale: Tensor | None = None,
        x_scale: Tensor | None = None,
        scale_dtype: torch.dtype = dtypes.fp32,
        quant_dtype: torch.dtype = dtypes.i8,
        dtypeMax: float | None = None,
    ) -> tuple[Tensor, Tensor]: ...

@type_check_only
class Per1x32F4Quant(Protocol):
    def __call__(
        self,
        x: Tensor,
        scale: Tensor | None = None,
        quant_dtype: torch.dtype = dtypes.fp4x2,
        shuffle: bool = False,
        pack_dim: Literal[-1, 0] = -1,
        round_mode: MxScaleRoundMode | int = MX_DEFAULT_ROUND_MODE,
    ) -> tuple[Tensor, Tensor]: ...

@type_check_only
class PerBlockQuant(Protocol):
    def __call__(self, x: Tensor, scale: Tensor | None = None, quant_dtype: torch.dtype = dtypes.i8) -> tuple[Tensor, Tensor]: ...

_No: TypeAlias = QuantType[Literal[0]]
_PerTensor: TypeAlias = QuantType[Literal[1]]
_PerToken: TypeAlias = QuantType[Literal[2]]
_Per1x32: TypeAlias = QuantType[Literal[3]]
_Per1x128: TypeAlias = QuantType[Literal[4]]
_WeightBlocks: TypeAlias = QuantType[Literal[5]]  # 128x128: fused_moe itself takes it for 1x128
_LargeBlocks: TypeAlias = QuantType[Literal[6, 7]]

@overload
def get_hip_quant(qType: _No) -> NoQuant: ...
@overload
def get_hip_quant(qType: _PerTensor) -> PerTensorQuantHip: ...
@overload
def get_hip_quant(qType: _PerToken) -> PerTokenQuantHip: ...
@overload
def get_hip_quant(qType: _Per1x32) -> Per1x32QuantHip: ...
@overload
def get_hip_quant(qType: _Per1x128) -> Per1x128QuantHip: ...
@overload
def get_hip_quant(qType: _WeightBlocks | _LargeBlocks) -> UnsupportedQuant: ...
@overload
def get_hip_quant(qType: QuantType) -> HipQuant: ...
@overload
def get_torch_quant(qType: _No) -> NoQuant: ...
@overload
def get_torch_quant(qType: _PerTensor) -> PerTensorQuant: ...
@overload
def get_torch_quant(qType: _PerToken) -> PerTokenQuant: ...
@overload
def get_torch_quant(qType: _Per1x32) -> Per1x32F4Quant: ...
@overload
def get_torch_quant(qType: _Per1x128) -> PerBlockQuant: ...
@overload
def get_torch_quant(qType: _WeightBlocks | _LargeBlocks) -> UnsupportedQuant: ...
@overload
def get_torch_quant(qType: QuantType) -> TorchQuant: ...
def per_tensor_quant_hip(
    x: Tensor, scale: Tensor | None = None, quant_dtype: torch.dtype = dtypes.i8, num_rows: None = None, num_rows_factor: int = 1
) -> tuple[Tensor, Tensor]: ...
def per_token_quant_hip(
    x: Tensor, scale: None = None, quant_dtype: torch.dtype = dtypes.i8, num_rows: Tensor | None = None, num_rows_factor: int = 1
) -> tuple[Tensor, Tensor]: ...
def per_group_quant_hip(
    x: Tensor,
    scale: None = None,
    quant_dtype: torch.dtype = dtypes.i8,
    group_size: Literal[32, 64, 128] = 128,
    transpose_scale: bool = False,
    num_rows: Tensor | None = None,
    num_rows_factor: int = 1,
    scale_type: torch.dtype = dtypes.fp32,
) -> tuple[Tensor, Tensor]: ...
def per_1x32_mx_quant_hip(
    x: Tensor,
    scale: None = None,
    quant_dtype: torch.dtype = dtypes.fp4x2,
    shuffle: bool = False,
    num_rows: Tensor | None = None,
    num_rows_factor: int = 1,
    scale_type: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]: ...
def per_1x32_f4_quant_hip(
    x: Tensor,
    scale: None = None,
    quant_dtype: torch.dtype = dtypes.fp4x2,
    shuffle: bool = False,
    num_rows: Tensor | None = None,
    num_rows_factor: int = 1,
) -> tuple[Tensor, Tensor]: ...
def per_tensor_quant(
    x: Tensor,
    scale: Tensor | None = None,
    scale_dtype: torch.dtype = dtypes.fp32,
    quant_dtype: torch.dtype = dtypes.i8,
    dtypeMax: float | None = None,
) -> tuple[Tensor, Tensor]: ...
def pertoken_quant(
    x: Tensor,
    scale: Tensor | None = None,
    x_scale: Tensor | None = None,
    scale_dtype: torch.dtype = dtypes.fp32,
    quant_dtype: torch.dtype = dtypes.i8,
    dtypeMax: float | None = None,
) -> tuple[Tensor, Tensor]: ...
def per_1x32_f4_quant(
    x: Tensor,
    scale: Tensor | None = None,
    quant_dtype: torch.dtype = dtypes.fp4x2,
    shuffle: bool = False,
    pack_dim: Literal[-1, 0] = -1,
    round_mode: MxScaleRoundMode | int = MX_DEFAULT_ROUND_MODE,
) -> tuple[Tensor, Tensor]: ...
def per_1x32_f8_scale_f8_quant(
    x: Tensor, scale: Tensor | None = None, quant_dtype: torch.dtype = dtypes.fp8, scale_type: torch.dtype = dtypes.fp32, shuffle: bool = False
) -> tuple[Tensor, Tensor]: ...
