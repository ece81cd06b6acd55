"""Operators of sgl_kernel_npu, which is a package of its own."""

from typing import Protocol

import torch
from torch import Tensor

from .codes import GroupListType, GroupQuantListType, ZeroLedGroupListType


class AscendExtensionOps(Protocol):
    """Activations over the halves of [M, 2 h], for rows sorted by expert, and a norm. Rows after the group list's total are undefined.

    Source: the repository sgl-project/sgl-kernel-npu of August 2026.
    """

    def swiglu_quant(
        self,
        x: Tensor,
        group_list: Tensor,
        group_list_type: ZeroLedGroupListType,
        need_quant: bool = True,
        do_limit: bool = False,
        limit: float = 7.0,
    ) -> tuple[Tensor, Tensor]:
        """Return ``silu(left) * right`` as int8 rounded **half up**, and its scale fp32 [M], undefined unless quantised.

        ``do_limit`` clamps after silu: ``min(silu(left), limit) * clamp(right, -limit, limit)``.
        """
        ...

    def swiglu_oai_quant(
        self,
        x: Tensor,
        alpha: float,
        limit: float,
        need_quant: bool = True,
        group_list: Tensor | None = None,
        group_list_type: GroupListType | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return ``g * sigmoid(alpha * g) * (u + 1)`` of the clamped halves as int8, and its scale fp32 [M]. CUMSUM is inclusive here."""
        ...

    def swiglu_oai_triton(self, hidden_states: Tensor, dim: int, gemm1_alpha: float, gemm1_clamp_limit: float) -> Tensor:
        """Return the same formula of **interleaved** columns, even ones gates; ``dim`` is 2 h."""
        ...

    def situ(
        self,
        hidden_states: Tensor,
        group_list: Tensor,
        group_list_type: ZeroLedGroupListType,
        *,
        need_quant: bool,
        beta: float = 4.0,
        linear_beta: float | None = 25.0,
    ) -> tuple[Tensor, Tensor | None]:
        """Return ``beta * tanh(a / beta) * sigmoid(a) * (lb * tanh(b / lb) or b)`` as int8 rounded half up, and its scale fp32 [M]."""
        ...

    def situ_mxfp8_quant(
        self,
        hidden_states: Tensor,
        group_list: Tensor,
        group_list_type: ZeroLedGroupListType = ZeroLedGroupListType.COUNT,
        beta: float = 4.0,
        linear_beta: float = 25.0,
    ) -> tuple[Tensor, Tensor]:
        """Return the same as e4m3 with e8m0 scales [M, h / 64, 2]."""
        ...

    def l1_norm(self, input: Tensor) -> Tensor:  # noqa: A002 - the library's name
        """Return each row [T, K] divided by its sum."""
        ...

    def swiglu_group_quant(
        self,
        x: Tensor,
        topk_weight: Tensor | None,
        group_index: Tensor | None,
        dst_type: torch.dtype | None = ...,
        quant_mode: int = 1,
        group_size: int = 128,
        round_scale: bool = False,
        ue8m0_scale: bool = False,
        output_origin: bool = False,
        group_list_type: GroupQuantListType = GroupQuantListType.COUNT,
        clamp_value: float = 0.0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return clamped SwiGLU as e4m3 with e8m0 scales [M, h / 64, 2] (``quant_mode`` 2), of ``group_index`` int64 counts, which it numbers 0."""
        ...
