"""MoRI v1, ``mori.ops``: ``EpDispatchCombineOp`` with its config, enums and routing handle.

The op takes what the real one takes, and keyword-only ``group`` (the symmetric heap of the process), ``mode`` and ``gfx``.
"""

from typing import Final, Literal, TypeAlias, final, overload

import torch
from torch import Tensor

from tests.emulation import mori_common, mori_config
from tests.emulation.hazards import EmulatedTrap, Mode, Reason, late, misuse, poison_, poisoned, python_check
from tests.emulation.mori_common import NOWHERE, Back, Sent, read_argument, require_dtype
from tests.emulation.mori_config import QUANT_TYPES, EpDispatchCombineConfig, EpDispatchCombineKernelType, EpDispatchRoutingHandle
from tests.emulation.mori_packed import PackedMethods
from tests.emulation.mori_send import check_handle, count_local, send, targets_of
from tests.emulation.world import Group

Kernel: TypeAlias = EpDispatchCombineKernelType
Dispatched: TypeAlias = tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]

_ASSERTING: Final = (Kernel.InterNodeV1, Kernel.IntraNodeLL, Kernel.AsyncLL)  # kernels that notice too many arriving rows
_REPLAYING: Final = (Kernel.IntraNode, Kernel.InterNodeV1)


@final
class EmulatedDispatchCombineOp(PackedMethods):
    """``mori.ops.EpDispatchCombineOp``. Results are views of arenas that the next call overwrites."""

    def __init__(self, config: EpDispatchCombineConfig, *, group: Group, mode: Mode = "strict", gfx: Literal["gfx942", "gfx950"] = "gfx942") -> None:
        if config.quant_type not in QUANT_TYPES:
            raise ValueError(f"quant_type is one of {QUANT_TYPES}, not {config.quant_type!r}")
        if config.quant_type == "fp4_blockwise" and gfx != "gfx950":
            raise ValueError("fp4_blockwise needs gfx950")
        if (config.rank, config.world_size) != (group.rank(), group.size()):
            raise ValueError(f"the config is of rank {config.rank} of {config.world_size}, the group of {group.rank()} of {group.size()}")
        if config.num_experts_per_token > mori_common.MAX_TOPK:
            raise EmulatedTrap(f"at most {mori_common.MAX_TOPK} routes of a token")
        super().__init__(config)
        self.local_expert_count = poisoned((config.num_experts_per_rank,), torch.int32)
        self._group = group
        self._mode: Mode = mode
        self._fp8 = torch.float8_e4m3fn if gfx == "gfx950" else torch.float8_e4m3fnuz
        self._capacity = config.max_num_tokens_to_recv()
        self._arenas: dict[str, Tensor] = {}
        self._total = torch.zeros(1, dtype=torch.int32)
        self._ids = torch.empty((0, config.num_experts_per_token), dtype=torch.int32)
        self._arrive_dispatch = self._arrive_combine = late(())
        self._dispatch_sent = self._combine_sent = False
        group.exchange("EpDispatchCombineOp", None)

    def _arena(self, name: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Return the view (rows, columns) of the arena ``name``, which has the size of the widest row that was ever asked for."""
        wanted = rows * columns * dtype.itemsize
        if name not in self._arenas or self._arenas[name].numel() < wanted:
            self._arenas[name] = torch.empty(wanted, dtype=torch.uint8)
        return self._arenas[name][:wanted].view(dtype).view(rows, columns)

    # ---- dispatch ------------------------------------------------------------------------------------------------------------------

    @overload
    def dispatch(
        self,
        input: Tensor,
        weights: Tensor | None,
        scales: Tensor | None,
        indices: Tensor,
        block_num: int = -1,
        rdma_block_num: int = -1,
        warp_per_block: int = -1,
        call_local_expert_count: bool = False,
        *,
        routing: EpDispatchRoutingHandle | None = None,
        return_routing: Literal[False] = False,
    ) -> Dispatched: ...

    @overload
    def dispatch(
        self,
        input: Tensor,
        weights: Tensor | None,
        scales: Tensor | None,
        indices: Tensor,
        block_num: int = -1,
        rdma_block_num: int = -1,
        warp_per_block: int = -1,
        call_local_expert_count: bool = False,
        *,
        routing: None = None,
        return_routing: Literal[True],
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, EpDispatchRoutingHandle]: ...

    def dispatch(
        self,
        input: Tensor,  # noqa: A002 - the name of the real parameter
        weights: Tensor | None,
        scales: Tensor | None,
        indices: Tensor,
        block_num: int = -1,
        rdma_block_num: int = -1,
        warp_per_block: int = -1,
        call_local_expert_count: bool = False,
        *,
        routing: EpDispatchRoutingHandle | None = None,
        return_routing: bool = False,
    ) -> Dispatched | tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, EpDispatchRoutingHandle]:
        """Send each token once to each rank of its ids, with all its ids and weights."""
        config = self.config
        if routing is not None and return_routing:
            raise ValueError("either a routing is replayed or one is returned")
        if (routing is not None or return_routing) and config.kernel_type not in _REPLAYING:
            raise NotImplementedError(f"{config.kernel_type.name} has no routing handle")
        sent = send(config, self._mode, input, weights, scales, indices)
        handle = mori_config.empty_handle(config) if routing is None else routing
        if routing is not None:
            check_handle(routing, sent.rows.size(0))
            place = mori_config.destinations(routing, config)
            targets = torch.where(place < 0, NOWHERE, torch.div(place, self._capacity, rounding_mode="floor"))
            sent = Sent(sent.rows, sent.weights, sent.scales, sent.ids, targets)
        met = self._group.exchange("dispatch", sent)
        origins = self._arrive(met, handle) if routing is None else mori_config.origins_of(routing, config)
        out = self._arena("out", self._capacity, input.size(1), input.dtype)
        out_weights = self._arena("weights", self._capacity, config.num_experts_per_token, torch.float32)
        out_ids = self._arena("ids", self._capacity, config.num_experts_per_token, torch.int32)
        width = None if sent.scales is None else sent.scales.size(1)
        out_scales = None if width is None or scales is None else self._arena("scales", self._capacity, width, scales.dtype)
        mori_common.deliver(met, origins, out, out_weights, out_scales, out_ids)
        self._total.fill_(len(origins))
        total = self._total if routing is None else routing.total_recv_token_num
        self._handle, self._ids, self._dispatch_sent = handle, sent.ids, True
        if call_local_expert_count and config.kernel_type != Kernel.AsyncLL:
            self.local_expert_count.copy_(count_local(config, out_ids[: len(origins)]))
        if config.kernel_type == Kernel.AsyncLL:
            self._arrive_dispatch = late([tensor for tensor in (out, out_weights, out_scales, out_ids, total) if tensor is not None])
        if return_routing:
            own = EpDispatchRoutingHandle.from_tensors([tensor.clone() for tensor in handle.tensors()], handle.cur_rank_num_token)
            return out, out_weights, out_scales, out_ids, own.total_recv_token_num, own
        return out, out_weights, out_scales, out_ids, total

    def _arrive(self, met: list[Sent], handle: EpDispatchRoutingHandle) -> list[tuple[int, int]]:
        """Choose an order of arrival and write the routing of this rank into the handle."""
        config, rank = self.config, self.config.rank
        found = mori_common.arrivals(self._group, met, self._capacity)
        if found.dropped:
            if config.kernel_type in _ASSERTING:
                raise EmulatedTrap(f"{found.dropped} rows more than {self._capacity} arrive")
            misuse(
                self._mode, Reason.CAPACITY, f"{found.dropped} rows more than {self._capacity} arrive, which {config.kernel_type.name} does not check"
            )
        everywhere = self._group.exchange("routing", found.origins)
        mori_config.write_handle(handle, config, everywhere, met[rank].targets, self._capacity)
        return found.origins

    # ---- combine -------------------------------------------------------------------------------------------------------------------

    def get_registered_combine_input_buffer(self, dtype: torch.dtype, hidden_dim: int = -1) -> Tensor:
        """Return the registered arena (capacity, hidden) that combine reads when it reads no other tensor."""
        return self._arena("combine input", self._capacity, self.config.hidden_dim if hidden_dim < 0 else hidden_dim, dtype)

    def combine(
        self,
        input: Tensor,  # noqa: A002 - the name of the real parameter
        weights: Tensor | None,
        indices: Tensor,
        block_num: int = -1,
        rdma_block_num: int = -1,
        warp_per_block: int = -1,
        use_external_inp_buf: int = -1,
        call_reset: bool = False,
        *,
        routing: EpDispatchRoutingHandle | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Sum the rows of each token over ranks, plainly. ``indices`` are the ids that this rank dispatched."""
        config, kernel = self.config, self.config.kernel_type
        if routing is not None and kernel not in _REPLAYING:
            raise NotImplementedError(f"{kernel.name} has no routing handle")
        handle = routing or self._handle
        python_check(handle is not None, "combine follows a dispatch")
        assert handle is not None
        tokens, topk, capacity = handle.cur_rank_num_token, config.num_experts_per_token, self._capacity
        if indices.size(0) != tokens:
            raise ValueError(f"indices has {indices.size(0)} rows and {tokens} tokens were dispatched: pass the original ids, not the received ones")
        require_dtype(input.dtype, mori_common.COMBINE_DTYPES)
        external = config.use_external_inp_buf if use_external_inp_buf < 0 else bool(use_external_inp_buf)
        if config.quant_type.endswith("blockwise") and (input.dtype != torch.bfloat16 or not external):
            raise ValueError(f"{config.quant_type} is of bfloat16 that is copied in")
        rows = self._combine_input(input, external, int(handle.total_recv_token_num))
        total_weights = None
        if weights is not None and weights.size(0):
            total_weights = read_argument(self._mode, "weights", weights, (weights.size(0), topk), torch.float32)
        ids = read_argument(self._mode, "indices", indices, (tokens, topk), torch.int32)
        place = self._places(handle, ids)
        met = self._group.exchange("combine", Back(mori_common.transported(rows, config.quant_type, self._fp8), total_weights))
        out = poison_(self._arena("combined", config.max_num_inp_token_per_rank, input.size(1), input.dtype))
        out[:tokens] = mori_common.gather_sum(place, [back.rows.float() for back in met], capacity).to(input.dtype)
        out_weights = None
        if total_weights is not None:
            out_weights = poison_(self._arena("combined weights", config.max_num_inp_token_per_rank, topk, torch.float32))
            out_weights[:tokens] = mori_common.gather_sum(
                place, [torch.empty(0, topk) if back.weights is None else back.weights for back in met], capacity
            )
        if routing is None:
            self._total.zero_()
        self._combine_sent = True
        if kernel == Kernel.AsyncLL:
            self._arrive_combine = late([out] if out_weights is None else [out, out_weights])
        return out, out_weights

    def _combine_input(self, rows: Tensor, external: bool, count: int) -> Tensor:
        """Return the rows that combine reads (capacity, hidden)."""
        if not external:
            registered = self.get_registered_combine_input_buffer(rows.dtype, rows.size(1))
            if rows.data_ptr() != registered.data_ptr():
                misuse(self._mode, Reason.FOREIGN_BUFFER, "use_external_inp_buf is off, and the input is not the registered buffer")
            return registered.clone()
        if rows.size(0) < count:
            misuse(self._mode, Reason.SHORT_INPUT, f"{count} rows were received and {rows.size(0)} are given")
        return read_argument(self._mode, "input", rows, (rows.size(0), rows.size(1)), rows.dtype)

    def _places(self, handle: EpDispatchRoutingHandle, ids: Tensor) -> Tensor:
        """Return where each token's rows are (tokens, topk), or NOWHERE; past all rows where the ids name a rank that the token did not go to."""
        place = mori_config.destinations(handle, self.config)
        if handle is self._handle and not torch.equal(ids, self._ids):
            misuse(self._mode, Reason.OTHER_IDS, "indices has the right number of rows and other ids than were dispatched")
            targets = targets_of(self.config, self._mode, ids)
            went = torch.where(place < 0, NOWHERE, torch.div(place, self._capacity, rounding_mode="floor"))
            lost = self.config.world_size * self._capacity
            place = torch.where(targets == went, place, torch.where(targets == NOWHERE, NOWHERE, lost).to(torch.int32))
        return place

    def reset(self) -> None:
        """Reset counters, together with all ranks."""
        self._group.exchange("reset", None)
        self._total.zero_()

    # ---- AsyncLL: send and receive -------------------------------------------------------------------------------------------------

    def _check_async(self, *, sent: bool) -> None:
        if self.config.kernel_type != Kernel.AsyncLL:
            raise ValueError(f"{self.config.kernel_type.name} does not receive by itself; AsyncLL does")
        python_check(sent, "receive follows send")

    def dispatch_send(
        self,
        input: Tensor,  # noqa: A002 - the name of the real parameter
        weights: Tensor | None,
        scales: Tensor | None,
        indices: Tensor,
        block_num: int = -1,
        warp_per_block: int = -1,
        call_local_expert_count: bool = False,
    ) -> Dispatched:
        """Dispatch; ``call_local_expert_count`` is lost, as in the real one: give it to ``dispatch_recv``."""
        return self.dispatch(input, weights, scales, indices, block_num, -1, warp_per_block)

    def dispatch_recv(self, block_num: int = -1, warp_per_block: int = -1, call_local_expert_count: bool = False) -> None:
        """Let what the last dispatch returned become valid."""
        self._check_async(sent=self._dispatch_sent)
        self._dispatch_sent = False
        self._arrive_dispatch()
        if call_local_expert_count:
            ids = self._arena("ids", self._capacity, self.config.num_experts_per_token, torch.int32)
            self.local_expert_count.copy_(count_local(self.config, ids[: int(self._total)]))

    def combine_send(
        self,
        input: Tensor,  # noqa: A002 - the name of the real parameter
        weights: Tensor | None,
        indices: Tensor,
        block_num: int = -1,
        warp_per_block: int = -1,
    ) -> tuple[Tensor, Tensor | None]:
        """Combine."""
        return self.combine(input, weights, indices, block_num, -1, warp_per_block)

    def combine_recv(self, block_num: int = -1, warp_per_block: int = -1) -> None:
        """Let what the last combine returned become valid."""
        self._check_async(sent=self._combine_sent)
        self._combine_sent = False
        self._arrive_combine()
