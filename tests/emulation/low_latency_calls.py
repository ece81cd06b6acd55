"""The low-latency calls of DeepEP and NIXL, which check the same things: host checks, hooks and events around ``LowLatency``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, final

import torch
from torch import Tensor

from tests.emulation.events import EventOverlap, finished
from tests.emulation.fp8_cast import GROUP, log_format
from tests.emulation.hazards import Mode, Reason, host_check, late, misuse
from tests.emulation.low_latency import LowLatency

Hook: TypeAlias = Callable[[], None]

HIDDEN_MULTIPLE: Final = 512  # columns, for fp8


@final
@dataclass(frozen=True)
class Limits:
    """What a build of a library takes."""

    topk_idx_t: torch.dtype
    max_topk: int
    hidden_sizes: tuple[int, ...]


@final
@dataclass(frozen=True, eq=False)
class Dispatched:
    """The results of a dispatch."""

    payload: Tensor
    scale: Tensor | None
    count: Tensor
    src_info: Tensor
    layout_range: Tensor
    event: EventOverlap
    hook: Hook | None

    @property
    def recv(self) -> Tensor | tuple[Tensor, Tensor]:
        """Return the payload, with its scales where there are some."""
        return self.payload if self.scale is None else (self.payload, self.scale)


def _add(target: Tensor, value: Tensor) -> Hook:
    def add() -> None:
        target.add_(value.to(target.dtype))

    return add


def _deliver(tensors: Sequence[Tensor], then: Sequence[Hook], *, async_finish: bool, return_recv_hook: bool) -> tuple[EventOverlap, Hook | None]:
    if not async_finish and not return_recv_hook:
        for hook in then:
            hook()
        return EventOverlap(), None
    arrive, pending = late(tensors), list(then)

    def receive() -> None:
        arrive()
        while pending:
            pending.pop()()

    return (EventOverlap(), receive) if return_recv_hook else (finished(receive, tensors), None)


def _check_ids(ids: Tensor, tokens: int, limits: Limits) -> None:
    host_check(ids.dim() == 2 and ids.is_contiguous() and ids.size(0) == tokens, "topk_idx is (tokens, topk), contiguous")
    host_check(ids.dtype == limits.topk_idx_t, f"topk_idx is {limits.topk_idx_t}, not {ids.dtype}")
    host_check(ids.size(1) <= limits.max_topk, f"at most {limits.max_topk} routes")


def _check_vector(vector: Tensor | None, dtype: torch.dtype, size: int) -> None:
    if vector is not None:
        host_check(
            vector.dim() == 1 and vector.is_contiguous() and vector.dtype == dtype and vector.size(0) == size, f"statistics are {dtype} [{size}]"
        )


def dispatch(
    engine: LowLatency,
    limits: Limits,
    active: Sequence[bool],
    x: Tensor,
    topk_idx: Tensor,
    max_tokens: int,
    experts: int,
    received: Tensor | None,
    waited: Tensor | None,
    *,
    use_fp8: bool,
    round_scale: bool,
    use_ue8m0: bool,
    async_finish: bool,
    return_recv_hook: bool,
) -> Dispatched:
    """Check and dispatch. Raises: RuntimeError as the host checks of the libraries."""
    ranks = len(active)
    host_check(x.dim() == 2 and x.is_contiguous() and x.dtype == torch.bfloat16, "x is bfloat16 (tokens, hidden), contiguous")
    host_check(x.size(1) in limits.hidden_sizes, f"hidden is one of {limits.hidden_sizes}, not {x.size(1)}")
    host_check(not use_fp8 or x.size(1) % HIDDEN_MULTIPLE == 0, f"hidden is a multiple of {HIDDEN_MULTIPLE} for fp8")
    _check_ids(topk_idx, x.size(0), limits)
    host_check(x.size(0) <= max_tokens, f"{x.size(0)} tokens are more than {max_tokens}")
    host_check(experts % ranks == 0, f"{experts} experts over {ranks} ranks")
    host_check(ranks * max_tokens % 4 == 0, "ranks * max_tokens is a multiple of 4: scales are aligned for TMA")
    host_check(not use_ue8m0 or round_scale, "use_ue8m0 needs round_scale")
    host_check(not (async_finish and return_recv_hook), "not both async_finish and return_recv_hook")
    _check_vector(received, torch.int32, experts // ranks)
    _check_vector(waited, torch.int64, ranks)
    got = engine.dispatch(x, topk_idx, max_tokens, experts, active, use_fp8=use_fp8, round_scale=round_scale, packed=use_ue8m0)
    then: list[Hook] = []
    if received is not None:
        then.append(_add(received, got.count.clone()))
    if waited is not None:
        then.append(_add(waited, torch.ones(ranks, dtype=torch.int64)))  # some time was waited
    event, hook = _deliver(got.tensors(), then, async_finish=async_finish, return_recv_hook=return_recv_hook)
    return Dispatched(got.payload, got.scale, got.count, got.src_info, got.layout_range, event, hook)


def combine(
    engine: LowLatency,
    limits: Limits,
    mode: Mode,
    active: Sequence[bool],
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    src_info: Tensor,
    layout_range: Tensor,
    max_tokens: int,
    experts: int,
    waited: Tensor | None,
    out: Tensor | None,
    *,
    use_logfmt: bool,
    zero_copy: bool,
    async_finish: bool,
    return_recv_hook: bool,
) -> tuple[Tensor, EventOverlap, Hook | None]:
    """Check and combine. Raises: RuntimeError as the host checks of the libraries."""
    ranks, local, hidden = layout_range.size(1), layout_range.size(0), x.size(-1)
    host_check(src_info.shape == (local, ranks * max_tokens), "the handle belongs to this number of ranks and tokens")
    host_check(x.dim() == 3 and x.dtype == torch.bfloat16, "x is bfloat16 (local experts, ranks * max_tokens, hidden)")
    host_check(x.shape[:2] == src_info.shape, f"x has the rows of the handle {tuple(src_info.shape)}, not {tuple(x.shape[:2])}")
    host_check(hidden % GROUP == 0, f"hidden is a multiple of {GROUP}")
    _check_ids(topk_idx, topk_weights.size(0), limits)
    host_check(topk_weights.is_contiguous() and topk_weights.dtype == torch.float32 and topk_weights.shape == topk_idx.shape, "weights are float32")
    host_check(not (zero_copy and use_logfmt), "not both zero_copy and use_logfmt")
    host_check(not (async_finish and return_recv_hook), "not both async_finish and return_recv_hook")
    host_check(out is None or (out.is_contiguous() and out.dtype == torch.bfloat16 and out.shape == (topk_idx.size(0), hidden)), "out is bfloat16")
    _check_vector(waited, torch.int64, ranks)
    registered = engine.combine_buffer(src_info, hidden) if zero_copy else x
    host_check(zero_copy or x.is_contiguous(), "x is contiguous")
    if zero_copy and x.data_ptr() != registered.data_ptr():
        misuse(mode, Reason.FOREIGN_BUFFER, "zero_copy sends what stands in the registered buffer, whatever x is")
    sent = log_format(registered) if use_logfmt else registered
    combined = engine.combine(sent, topk_idx, topk_weights, src_info, layout_range, experts, active)
    combined = combined if out is None else out.copy_(combined)
    then = [] if waited is None else [_add(waited, torch.ones(ranks, dtype=torch.int64))]
    event, hook = _deliver([combined], then, async_finish=async_finish, return_recv_hook=return_recv_hook)
    return combined, event, hook
