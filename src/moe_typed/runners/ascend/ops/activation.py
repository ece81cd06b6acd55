"""Activations, with and without quantisation. Plain formulae that torch has (gelu, the clamped step) need no operator."""

from typing import Protocol

import torch
from torch import Tensor

from .codes import DtypeArg, GroupListType, SwigluMode, SwigluQuantMode


class ActivationOps(Protocol):
    """Gate and up [M, 2 h] become [M, h]."""

    def npu_swiglu(self, input: Tensor, dim: int = -1) -> Tensor:  # noqa: A002 - the schema's name
        """Return ``silu(left half) * right half``."""
        ...

    def npu_dequant_swiglu_quant(
        self,
        x: Tensor,
        *,
        weight_scale: Tensor | None = None,
        activation_scale: Tensor | None = None,
        bias: Tensor | None = None,
        quant_scale: Tensor | None = None,
        quant_offset: Tensor | None = None,
        group_index: Tensor | None = None,
        activate_left: bool = False,
        quant_mode: SwigluQuantMode = SwigluQuantMode.STATIC,
        dst_type: DtypeArg | None = None,
        round_mode: int | None = None,
        activate_dim: int | None = None,
        swiglu_mode: SwigluMode = SwigluMode.HALVES,
        clamp_limit: float = 7.0,
        glu_alpha: float = 1.702,
        glu_bias: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """Dequantise int32 (or take bf16, fp16 without scales), activate and quantise: int8 [M, h], scale fp32 [M].

        By default the **right** half is activated and the result is quantised statically, without a scale. ``weight_scale`` fp32 [groups, 2 h],
        ``activation_scale`` fp32 [M]. ``group_index`` int64 holds counts; rows after its sum are undefined, and it needs DYNAMIC.
        """
        ...

    def npu_swiglu_quant(
        self,
        x: Tensor,
        *,
        smooth_scales: Tensor | None = None,
        offsets: Tensor | None = None,
        group_index: Tensor | None = None,
        activate_left: bool = False,
        quant_mode: SwigluQuantMode = SwigluQuantMode.STATIC,
        group_list_type: GroupListType = GroupListType.CUMSUM,
        dst_type: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Activate, smooth and quantise: int8 [M, h], scale fp32 [M]. ``group_index`` is int32; defaults are those of its sibling above."""
        ...

    def npu_clipped_swiglu(
        self,
        x: Tensor,
        *,
        group_index: Tensor | None = None,
        dim: int = -1,
        alpha: float = 1.702,
        limit: float = 7.0,
        bias: float = 1.0,
        interleaved: bool = True,
    ) -> Tensor:
        """Return ``g * sigmoid(alpha * g) * (u + bias)`` of ``g = min(gate, limit)`` and ``u = clamp(up, -limit, limit)``.

        By default gate and up are the even and odd columns, else the halves.
        """
        ...
