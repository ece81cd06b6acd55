"""The NPU's deep_ep over in-process ranks."""

import os
from collections.abc import Callable
from typing import final

import attrs
import torch
from torch import Tensor

from moe_typed.runners.ascend.ops import BufferQuantMode, MxScaleAlg
from tests.emulation.hazards import Mode, poisoned
from tests.emulation.world import Group

from .exchange import Returned, Route, Sent, come_back, fill, quantize_sent, send, weighted_sum
from .misuse import Judge, Reason, require
from .mx import E2M1, E4M3, E5M2, pair, quantize

_ENVIRONMENT = "DEEP_NORMAL_MODE_USE_INT8_QUANT"
_MX = {"mx_fp8_e4m3": E4M3, "mx_fp8_e5m2": E5M2, "mx_fp4_e2m1": E2M1}


@final
class AscendEvent:
    """Stand for the end of a kernel."""

    def current_stream_wait(self) -> None:
        """Do nothing: all is done when a call returns."""


@final
@attrs.frozen(eq=False)
class NormalHandle:
    """What combine needs of its dispatch: routes of the rows, and ids and weights of the tokens."""

    routes: tuple[Route, ...]
    topk_idx: Tensor
    topk_weights: Tensor
    experts: int


@final
@attrs.frozen(eq=False)
class LowLatencyHandle:
    """What combine needs of its dispatch."""

    routes: tuple[Route, ...]
    topk_idx: Tensor
    experts: int


@final
class EmulatedAscendBuffer:
    """A Buffer of one rank. ``has_quant_mode``: whether its dispatch has the parameter; one that has not obeys the environment alone."""

    def __init__(self, group: Group, mode: Mode = "strict", *, has_quant_mode: bool = True) -> None:
        self.group = group
        self.judge = Judge(mode)
        self._has_quant_mode = has_quant_mode

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: AscendEvent | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, AscendEvent]:
        """Return tokens per rank, None, tokens per expert, and which token goes to which rank: all int32."""
        require(topk_idx.dtype == torch.int64, f"topk_idx is int64, not {topk_idx.dtype}")
        ranks = self.group.size()
        owner = torch.where(topk_idx >= 0, topk_idx // (num_experts // ranks), -1)
        in_rank = (owner[..., None] == torch.arange(ranks)).any(1).int()
        per_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts).int()
        return in_rank.sum(0).int(), None, per_expert, in_rank, AscendEvent()

    def dispatch(
        self,
        x: Tensor,
        handle: NormalHandle | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: object = None,
        previous_event: AscendEvent | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        quant_mode: BufferQuantMode | None = None,
    ) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor | None, Tensor | None, list[int], NormalHandle, AscendEvent]:
        """Send rows; those that arrive are sorted by local expert, without padding."""
        if handle is not None:
            raise NotImplementedError("Optional communication handle is not supported yet.")
        if quant_mode is not None and not self._has_quant_mode:
            raise TypeError("dispatch() got an unexpected keyword argument 'quant_mode'")
        given = None not in (num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert)
        if not given or num_tokens_per_expert is None or topk_idx is None or topk_weights is None:
            raise AssertionError("the layout of the dispatch is needed")
        require(x.dtype == torch.bfloat16 and topk_idx.dtype == torch.int64, f"x is bf16 and topk_idx int64, not {x.dtype} and {topk_idx.dtype}")
        require(topk_weights.dtype == torch.float32, f"topk_weights is fp32, not {topk_weights.dtype}")
        experts = len(num_tokens_per_expert)
        if not torch.equal(torch.bincount(topk_idx[topk_idx >= 0], minlength=experts).int(), num_tokens_per_expert.int()):
            self.judge.silent(Reason.OTHER_DISPATCH, "the layout is of other ids")
        arrived = send(self.group, "ascend_dispatch", Sent(x, topk_idx, topk_weights, None, ()), experts)
        payload = self._payload(arrived.rows(0), quant_mode)
        kept = NormalHandle(tuple(arrived.routes), topk_idx.clone(), topk_weights.clone(), experts)
        counts = [-(-int(count) // expert_alignment) * expert_alignment for count in arrived.counts()]
        received = (len(arrived.routes), topk_idx.shape[1])
        return payload, poisoned(received, torch.int64), poisoned(received, torch.float32), counts, kept, AscendEvent()

    def _payload(self, rows: Tensor, quant_mode: BufferQuantMode | None) -> Tensor | tuple[Tensor, Tensor]:
        mode = quant_mode
        if mode is None:
            mode = "int8" if os.environ.get(_ENVIRONMENT) == "1" else "bf16"
            if mode == "int8" and self._has_quant_mode:
                self.judge.silent(Reason.PAYLOAD_BY_ENVIRONMENT, f"{_ENVIRONMENT} is 1, and no quant_mode was said")
        if mode == "bf16":
            return rows
        if mode == "int8":
            return quantize_sent(rows)
        elements, scale = quantize(rows.float(), _MX[mode], MxScaleAlg.FLOOR)
        return elements, pair(scale).view(torch.float8_e8m0fnu)

    def combine(
        self,
        x: Tensor,
        handle: NormalHandle,
        topk_weights: Tensor | None = None,
        bias: Tensor | None = None,
        config: object = None,
        previous_event: AscendEvent | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        combine_send_cost_stats: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, AscendEvent]:
        """Bring rows back, weighted by what the handle holds."""
        require(x.dtype == torch.bfloat16, f"x is bf16, not {x.dtype}")
        if bias is not None or (topk_weights is not None and not torch.equal(topk_weights, handle.topk_weights)):
            self.judge.silent(Reason.WEIGHTS_IGNORED, "combine reads the weights of its handle, and no bias")
        found, experts = self._back("ascend_combine", x, handle)
        return weighted_sum(found, experts, handle.topk_weights).to(x.dtype), None, AscendEvent()

    def _back(self, name: str, x: Tensor, handle: NormalHandle | LowLatencyHandle) -> tuple[Tensor, Tensor]:
        routes = handle.routes
        if len(x) < len(routes):
            self.judge.silent(Reason.SHORT_ROWS, f"{len(x)} of {len(routes)} rows")
        rows = fill(x[: len(routes)], len(routes))
        first = self.group.rank() * (handle.experts // self.group.size())
        return come_back(self.group, name, Returned(rows, routes, first), *handle.topk_idx.shape)

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        topk_weights: Tensor | None = None,
    ) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor, LowLatencyHandle, AscendEvent, Callable[[], None]]:
        """Send rows; the first of a bound arrive sorted by local expert."""
        require(x.dtype == torch.bfloat16 and topk_idx.dtype == torch.int64, f"x is bf16 and topk_idx int64, not {x.dtype} and {topk_idx.dtype}")
        require(len(x) <= num_max_dispatch_tokens_per_rank, f"at most {num_max_dispatch_tokens_per_rank} rows, not {len(x)}")
        arrived = send(self.group, "ascend_low_latency_dispatch", Sent(x, topk_idx, topk_weights, None, ()), num_experts)
        bound = num_max_dispatch_tokens_per_rank * self.group.size() * min(arrived.experts, topk_idx.shape[1])
        rows = arrived.rows(0)
        payload: Tensor | tuple[Tensor, Tensor] = fill(rows, bound)
        if use_fp8 and use_ue8m0:
            elements, scale = quantize(rows.float(), E4M3, MxScaleAlg.FLOOR)
            payload = fill(elements, bound), fill(scale, bound).view(torch.float8_e8m0fnu).flatten()
        elif use_fp8:
            values, scales = quantize_sent(rows)
            payload = fill(values, bound), fill(scales, bound)
        handle = LowLatencyHandle(tuple(arrived.routes), topk_idx.clone(), num_experts)
        return payload, arrived.counts().int(), handle, AscendEvent(), _nothing

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: LowLatencyHandle,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
    ) -> tuple[Tensor, AscendEvent, Callable[[], None]]:
        """Bring rows back, weighted by ``topk_weights``."""
        require(x.dtype == torch.bfloat16 and x.dim() == 2, f"x is bf16 with two axes, not {x.dtype} with {x.dim()}")
        require(topk_weights.dtype == torch.float32, f"topk_weights is fp32, not {topk_weights.dtype}")
        if not torch.equal(topk_idx, handle.topk_idx):
            self.judge.silent(Reason.OTHER_DISPATCH, "the ids are not those that were dispatched")
        found, experts = self._back("ascend_low_latency_combine", x, handle)
        total = weighted_sum(found, experts, topk_weights).to(x.dtype)
        return total if out is None else out.copy_(total), AscendEvent(), _nothing


def _nothing() -> None:
    """Stand for the hook of a call that did not wait for one."""
