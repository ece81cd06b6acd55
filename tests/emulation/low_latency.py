"""What the low-latency exchanges of DeepEP, Mooncake and NIXL have in common: one row for each (token, expert), in slabs by local expert.

Not seen, as in the real libraries: rows that were weighted already, and the handle of another dispatch that is still alive.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor

from tests.emulation.fp8_cast import GROUP, cast_fp8, pack_ue8m0
from tests.emulation.hazards import Mode, Reason, Ring, copy_bits_, misuse, poisoned
from tests.emulation.world import EmulatedHang, Group

OUTSTANDING: Final = 2  # arenas that take turns: the results of two dispatches are alive
HIDDEN_SIZES: Final = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)  # what the kernels are compiled for

_COUNT_BITS: Final = 32


@final
@dataclass(frozen=True, eq=False)
class Sent:
    """What one rank brings to a dispatch."""

    payload: Tensor
    scale: Tensor | None
    ids: Tensor
    max_tokens: int
    experts: int
    active: Sequence[bool]


@final
@dataclass(frozen=True, eq=False)
class Received:
    """Slabs: payload (local experts, ranks * max_tokens, hidden), scale of the same rows, counts, and where each row came from."""

    payload: Tensor
    scale: Tensor | None
    count: Tensor
    src_info: Tensor
    layout_range: Tensor

    def tensors(self) -> list[Tensor]:
        """Return all of it."""
        return [self.payload, *([] if self.scale is None else [self.scale]), self.count, self.src_info, self.layout_range]


@final
class LowLatency:
    """The exchanges of one rank. ``zero_padded`` is the fallback of Mooncake: fresh zeros and row-major scales instead of reused arenas."""

    def __init__(self, group: Group, mode: Mode, *, zero_padded: bool = False) -> None:
        self._group = group
        self._mode: Mode = mode
        self._zero_padded = zero_padded
        self._ring = Ring(OUTSTANDING)
        self._calls: list[tuple[Tensor, int]] = []
        self._registered: Tensor | None = None

    def _memory(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if self._zero_padded:
            return torch.zeros(tuple(shape), dtype=torch.uint8).view(dtype) if dtype.itemsize == 1 else torch.zeros(tuple(shape), dtype=dtype)
        return self._ring.take(name, shape, dtype)

    def dispatch(
        self, x: Tensor, ids: Tensor, max_tokens: int, experts: int, active: Sequence[bool], *, use_fp8: bool, round_scale: bool, packed: bool
    ) -> Received:
        """Send bf16 rows to the experts of their ids; negative ids go nowhere. ``active`` has one entry for each rank that shapes speak of."""
        if bool((ids >= experts).any()):
            misuse(self._mode, Reason.EXPERT_ID, f"an id is not below {experts}")
        payload, scale = cast_fp8(x, round_scale=round_scale) if use_fp8 else (x.clone(), None)
        scale = pack_ue8m0(scale) if scale is not None and packed else scale
        met = self._group.meet("low-latency dispatch", Sent(payload, scale, ids.clone(), max_tokens, experts, list(active)))
        if len({(sent.max_tokens, sent.experts) for sent in met.values()}) > 1:
            misuse(self._mode, Reason.UNEQUAL_ACROSS_RANKS, "the largest number of tokens or the number of experts")
            raise EmulatedHang("ranks disagree about where rows are in each other's buffers")
        return self._unpack(met, active, max_tokens, experts)

    def _unpack(self, met: dict[int, Sent], active: Sequence[bool], max_tokens: int, experts: int) -> Received:
        rank, ranks = self._group.rank(), len(active)
        local, rows = experts // ranks, ranks * max_tokens
        mine = met[rank]
        self._ring.advance()
        payload = self._memory("payload", (local, rows, mine.payload.size(1)), mine.payload.dtype)
        scale = None if mine.scale is None else self._scale_memory(local, rows, mine.scale)
        src_info = torch.full((local, rows), -1, dtype=torch.int32) if self._zero_padded else poisoned((local, rows), torch.int32)
        layout_range = torch.zeros((local, ranks), dtype=torch.int64)
        count = torch.zeros(local, dtype=torch.int32)
        self._calls = [*self._calls[-7:], (src_info, self._ring.calls)]
        heard = [source for source in met if source < ranks and active[source] and met[source].active[rank]]
        for expert in range(local):
            begin = 0
            for source in (heard[index] for index in self._group.permutation(len(heard))):
                sent = met[source]
                tokens = (sent.ids == rank * local + expert).nonzero()[:, 0]
                tokens = tokens[self._group.permutation(len(tokens))]
                if begin + len(tokens) > rows:
                    misuse(self._mode, Reason.CAPACITY, f"expert {expert} is sent more than {rows} rows")
                    tokens = tokens[: rows - begin]
                end = begin + len(tokens)
                copy_bits_(payload[expert, begin:end], sent.payload.view(torch.uint8)[tokens].view(sent.payload.dtype))
                if scale is not None and sent.scale is not None:
                    scale[expert, begin:end] = sent.scale[tokens]
                src_info[expert, begin:end] = tokens.to(torch.int32)
                layout_range[expert, source] = begin << _COUNT_BITS | len(tokens)
                begin = end
            count[expert] = begin
        return Received(payload, scale, count, src_info, layout_range)

    def _scale_memory(self, local: int, rows: int, like: Tensor) -> Tensor:
        columns = like.size(1)
        if self._zero_padded:
            return torch.zeros((local, rows, columns), dtype=like.dtype)
        return self._ring.take("scale", (local, columns, rows), like.dtype).transpose(1, 2)  # strides (columns * rows, 1, rows)

    def combine_buffer(self, rows: Tensor, hidden: int) -> Tensor:
        """Return the registered send buffer for rows like ``src_info`` (local, rows): bf16, not contiguous, for a message has room for scales."""
        shape = (*rows.shape, hidden + 2 * (hidden // GROUP))
        if self._registered is None or self._registered.shape != shape:
            self._registered = poisoned(shape, torch.bfloat16)
        return self._registered[..., :hidden]

    def check_alive(self, src_info: Tensor) -> None:
        """Refuse, in strict mode, a handle whose dispatch is more than two dispatches old."""
        for known, call in self._calls:
            if known.data_ptr() == src_info.data_ptr() and not self._ring.is_alive(call):
                misuse(self._mode, Reason.STALE_HANDLE, f"{self._ring.calls - call} dispatches came after it, and {OUTSTANDING} results are alive")

    def combine(
        self, x: Tensor, ids: Tensor, weights: Tensor, src_info: Tensor, layout_range: Tensor, experts: int, active: Sequence[bool]
    ) -> Tensor:
        """Return the weighted sum of the experts' rows (tokens, hidden), bf16: over the routes with an id that is not negative, in float32.

        Rows go back by ``layout_range`` and ``src_info``; a row that did not come is NaN; inactive ranks are skipped, and nothing is renormalised.
        """
        self.check_alive(src_info)
        rank, local = self._group.rank(), layout_range.size(0)
        messages: list[tuple[int, int, int, Tensor]] = []  # to which rank, of which expert, for which token
        for expert in range(local):
            for source in range(layout_range.size(1)):
                packed = int(layout_range[expert, source])
                begin, count = packed >> _COUNT_BITS, packed & (1 << _COUNT_BITS) - 1
                for row in range(begin, min(begin + count, x.size(1))):
                    messages.append((source, rank * local + expert, int(src_info[expert, row]), x[expert, row].clone()))
        met = self._group.meet("low-latency combine", messages)
        home = {(expert, token): row for sent in met.values() for target, expert, token, row in sent if target == rank}
        combined = torch.zeros((ids.size(0), x.size(2)), dtype=torch.float32)
        for token in range(ids.size(0)):
            for slot in range(ids.size(1)):
                wanted = int(ids[token, slot])
                if wanted < 0 or (wanted < experts and not active[wanted // local]):
                    continue
                answer = home.get((wanted, token))
                combined[token] += torch.nan if answer is None else weights[token, slot] * answer.float()
        return combined.to(torch.bfloat16)
