"""The operators of sgl_kernel_npu."""

from typing import final

import torch
from torch import Tensor

from moe_typed.runners.ascend.ops import GroupListType, GroupQuantListType, MxScaleAlg, ZeroLedGroupListType
from tests.emulation.hazards import POISON_BYTE, Mode, poisoned

from .activation import clamped_swiglu
from .groups import Provenance, spans
from .misuse import Device, Judge, Reason, require
from .mx import E4M3, pair, quantize
from .numerics import INT8_MAX, round_half_up, to_int8

_LEAST_SCALE = 1e-30  # of situ
_POISON = int.from_bytes(bytes([POISON_BYTE] * 4), "little")  # an int32 after the end of a list
_MX_QUANT = 2


@final
class EmulatedAscendExtensionOps:
    """The extension's operators on the CPU."""

    def __init__(self, mode: Mode = "strict", device: Device = Device.A3) -> None:
        self.judge = Judge(mode, device)
        self.lists = Provenance()

    def swiglu_quant(
        self,
        x: Tensor,
        group_list: Tensor,
        group_list_type: ZeroLedGroupListType,
        need_quant: bool = True,
        do_limit: bool = False,
        limit: float = 7.0,
    ) -> tuple[Tensor, Tensor]:
        """Activate halves; quantise half up, without a guard for rows of zeros."""
        total = self._total(x, group_list, group_list_type)
        left, right = x[:total].float().chunk(2, -1)
        gate = torch.nn.functional.silu(left)
        values = gate.clamp(max=limit) * right.clamp(-limit, limit) if do_limit else gate * right
        if not need_quant:
            return _plain(values, x), poisoned((len(x),), torch.float32)
        scale = values.abs().amax(-1) / INT8_MAX
        return _quantized(to_int8(round_half_up(values / scale[:, None])), scale, x)

    def swiglu_oai_quant(
        self,
        x: Tensor,
        alpha: float,
        limit: float,
        need_quant: bool = True,
        group_list: Tensor | None = None,
        group_list_type: GroupListType | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Activate halves by the clamped formula; the quotient goes through x's dtype and is cut off. CUMSUM is inclusive."""
        total = len(x)
        if group_list is not None:
            if group_list_type is None or group_list_type == GroupListType.PAIRS:
                raise ValueError(f"group_list_type must be 0 or 1, got {group_list_type}")
            total = max(span.stop for span in spans(self.judge, self.lists, group_list.long(), group_list_type, len(group_list), len(x)))
        gate, up = x[:total].float().chunk(2, -1)
        values = clamped_swiglu(gate, up, alpha, limit, 1.0)
        if not need_quant:
            return _plain(values, x), poisoned((len(x),), torch.float32)
        scale = values.abs().amax(-1) / INT8_MAX
        return _quantized(to_int8((values / scale[:, None]).to(x.dtype).float().trunc()), scale, x)

    def swiglu_oai_triton(self, hidden_states: Tensor, dim: int, gemm1_alpha: float, gemm1_clamp_limit: float) -> Tensor:
        """Activate interleaved columns by the clamped formula."""
        values = hidden_states.view(-1, dim).float()
        return clamped_swiglu(values[:, 0::2], values[:, 1::2], gemm1_alpha, gemm1_clamp_limit, 1.0).to(hidden_states.dtype)

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
        """Activate halves by SiTU; quantise half up."""
        x = hidden_states
        values = _situ(x[: self._total(x, group_list, group_list_type)], beta, linear_beta)
        if not need_quant:
            return _plain(values, x), poisoned((len(x),), torch.float32)
        scale = (values.abs().amax(-1) / INT8_MAX).clamp(min=_LEAST_SCALE)
        return _quantized(to_int8(round_half_up(values / scale[:, None])), scale, x)

    def situ_mxfp8_quant(
        self,
        hidden_states: Tensor,
        group_list: Tensor,
        group_list_type: ZeroLedGroupListType = ZeroLedGroupListType.COUNT,
        beta: float = 4.0,
        linear_beta: float = 25.0,
    ) -> tuple[Tensor, Tensor]:
        """Activate halves by SiTU; quantise blocks of 32."""
        require(self.judge.device is Device.A5, f"this kernel is built for A5 alone, not for {self.judge.device.value}")
        total = self._total(hidden_states, group_list, group_list_type)
        return _mx(_situ(hidden_states[:total], beta, linear_beta), hidden_states)

    def l1_norm(self, input: Tensor) -> Tensor:  # noqa: A002 - the library's name
        """Divide rows by their sums."""
        return input / input.sum(-1, keepdim=True)

    def swiglu_group_quant(
        self,
        x: Tensor,
        topk_weight: Tensor | None,
        group_index: Tensor | None,
        dst_type: torch.dtype | None = None,
        quant_mode: int = 1,
        group_size: int = 128,
        round_scale: bool = False,
        ue8m0_scale: bool = False,
        output_origin: bool = False,
        group_list_type: GroupQuantListType = GroupQuantListType.COUNT,
        clamp_value: float = 0.0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Activate halves, clamped before silu; quantise blocks of 32. The list is of counts, numbered 0."""
        if quant_mode != _MX_QUANT or topk_weight is not None or output_origin:
            raise NotImplementedError("only quant_mode 2 without weights is emulated")
        require(self.judge.device is Device.A5, f"this kernel is built for A5 alone, not for {self.judge.device.value}")
        require(group_list_type == GroupQuantListType.COUNT, f"group_list_type is 0, not {group_list_type}")
        total = len(x)
        if group_index is not None:
            ranges = spans(self.judge, self.lists, group_index, GroupListType.COUNT, len(group_index), len(x))
            total = max(span.stop for span in ranges)
        gate, up = x[:total].float().chunk(2, -1)
        if clamp_value > 0:
            gate, up = gate.clamp(max=clamp_value), up.clamp(-clamp_value, clamp_value)
        return *_mx(torch.nn.functional.silu(gate) * up, x), torch.empty(0)

    def _total(self, x: Tensor, group_list: Tensor, kind: ZeroLedGroupListType) -> int:
        """Return how many rows a kernel computes; with cumulative counts it reads the element after the list's last one."""
        if kind not in (ZeroLedGroupListType.CUMSUM_FROM_ZERO, ZeroLedGroupListType.COUNT):
            raise ValueError(f"group_list_type must be 0 or 1, but got {kind}")
        if group_list.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"group_list dtype must be torch.int32 or torch.int64, but got {group_list.dtype}")
        if kind == ZeroLedGroupListType.COUNT:
            return max(
                (span.stop for span in spans(self.judge, self.lists, group_list.long(), GroupListType.COUNT, len(group_list), len(x))), default=0
            )
        memory = torch.empty(0, dtype=group_list.dtype).set_(group_list.untyped_storage())
        end = group_list.storage_offset() + len(group_list)
        if end >= len(memory):
            self.judge.silent(Reason.GROUP_LIST_END, f"a list of {len(group_list)}")
        return min(int(memory[end]) if end < len(memory) else _POISON, len(x))


def _situ(x: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    gate, up = x.float().chunk(2, -1)
    linear = up if linear_beta is None else linear_beta * torch.tanh(up / linear_beta)
    return beta * torch.tanh(gate / beta) * gate.sigmoid() * linear


def _plain(values: Tensor, x: Tensor) -> Tensor:
    result = poisoned((len(x), x.shape[1] // 2), x.dtype)
    result[: len(values)] = values.to(x.dtype)
    return result


def _quantized(values: Tensor, scale: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    result, scales = poisoned((len(x), x.shape[1] // 2), torch.int8), poisoned((len(x),), torch.float32)
    result[: len(values)], scales[: len(scale)] = values, scale
    return result, scales


def _mx(values: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    half = x.shape[1] // 2
    result, scales = poisoned((len(x), half), torch.float8_e4m3fn), poisoned((len(x), -(-half // 64), 2), torch.uint8)
    elements, bytes_ = quantize(values, E4M3, MxScaleAlg.FLOOR)
    result.view(torch.uint8)[: len(values)] = elements.view(torch.uint8)
    scales[: len(values)] = pair(bytes_)
    return result, scales.view(torch.float8_e8m0fnu)
