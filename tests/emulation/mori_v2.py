"""MoRI v2, ``mori.ops.dispatch_combine_v2``, of one node. The op takes what the real one takes, and keyword-only ``mode`` and ``gfx``."""

from collections.abc import Sequence
from typing import Literal, final, overload

import torch
from torch import Tensor

from tests.emulation import mori_common, mori_config
from tests.emulation.hazards import POISON_BYTE, Mode, Reason, misuse, poison_, raw_bytes
from tests.emulation.mori_common import NOWHERE, Back, Sent, first_of_each, owners, read_argument
from tests.emulation.mori_v2_config import EpDispatchCombineConfigV2, EpDispatchRoutingHandleV2
from tests.emulation.world import Group

DispatchedV2 = tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]


@final
class EmulatedCommunicator:
    """``mori.cco.Communicator`` over a group."""

    def __init__(self, group: Group) -> None:
        self.group = group

    @property
    def is_valid(self) -> bool:
        """Return True."""
        return True

    @property
    def rank(self) -> int:
        """Return the rank."""
        return self.group.rank()

    @property
    def nranks(self) -> int:
        """Return the number of ranks."""
        return self.group.size()

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.group.barrier()

    def destroy(self) -> None:
        """Do nothing."""

    def __enter__(self) -> "EmulatedCommunicator":
        return self

    def __exit__(self, kind: object, error: object, trace: object, /) -> None:
        self.destroy()


def _words(scales: Tensor) -> Tensor:
    """Return the bytes of rows of scales as int32, the last word filled up with what nobody wrote."""
    given = raw_bytes(scales)
    return torch.nn.functional.pad(given, (0, -given.size(1) % 4), value=POISON_BYTE).view(torch.int32)


@final
class EmulatedDispatchCombineOpV2:
    """``EpDispatchCombineOp`` of v2. Results are views of arenas that the next call overwrites; scales come back as opaque int32."""

    def __init__(
        self, cfg: EpDispatchCombineConfigV2, comm: EmulatedCommunicator, *, mode: Mode = "strict", gfx: Literal["gfx942", "gfx950"] = "gfx942"
    ) -> None:
        backend = cfg.kernel_backend or "flydsl"
        if backend not in self.available_backends():
            raise ValueError(f"no kernel backend {backend!r}")
        if backend == "hip" and (cfg.scale_dim or cfg.quant_type != "none" or cfg.max_total_recv_tokens):
            raise ValueError("the hip backend has no scales, no quantization and no cap of received rows")
        self.cfg = cfg
        self.comm = comm
        self._backend = backend
        self._mode: Mode = mode
        self._v1 = cfg.as_v1()
        self._capacity = self._v1.max_num_tokens_to_recv()
        self._fp8 = torch.float8_e4m3fn if gfx == "gfx950" else torch.float8_e4m3fnuz
        self._arenas: dict[str, Tensor] = {}
        self._sources = mori_config.empty_handle(self._v1).disp_tok_id_to_src_tok_id_local  # the arena of reverse maps
        self._is_open = True
        comm.group.exchange("EpDispatchCombineOp v2", None)

    @property
    def capabilities(self) -> frozenset[str]:
        """Return what the backend serves."""
        return frozenset() if self._backend == "hip" else frozenset({"scales", "quant", "max_total_recv_tokens"})

    @classmethod
    def available_backends(cls) -> list[str]:
        """Return the names of backends."""
        return ["flydsl", "hip"]

    def _arena(self, name: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        if not self._is_open:
            raise RuntimeError("the op was closed")
        wanted = rows * columns * dtype.itemsize
        if name not in self._arenas or self._arenas[name].numel() < wanted:
            self._arenas[name] = torch.empty(wanted, dtype=torch.uint8)
        return self._arenas[name][:wanted].view(dtype).view(rows, columns)

    def _sent(self, rows: Tensor, weights: Tensor | None, scales: Tensor | None, ids: Tensor) -> Sent:
        cfg, tokens = self.cfg, rows.size(0)
        if tokens > cfg.max_num_inp_token_per_rank:
            raise ValueError(f"{tokens} tokens are more than {cfg.max_num_inp_token_per_rank}")
        if rows.dtype != cfg.dispatched:
            misuse(self._mode, Reason.DTYPE, f"input is read as {cfg.dispatched}, and is {rows.dtype}")
        read_ids = read_argument(self._mode, "indices", ids, (tokens, cfg.num_experts_per_token), torch.int32)
        if bool((read_ids >= cfg.world_size * cfg.num_experts_per_rank).any()):
            misuse(self._mode, Reason.EXPERT_ID, "an id is not below the number of experts, and its route is dropped")
        read_weights = None if weights is None else read_argument(self._mode, "weights", weights, (tokens, cfg.num_experts_per_token), torch.float32)
        read_scales = None
        if scales is not None and cfg.scale_dim:
            if scales.dtype.itemsize != cfg.scale_type_size:
                misuse(self._mode, Reason.DTYPE, f"scales have {cfg.scale_type_size} bytes by the config, and are {scales.dtype}")
            width = cfg.scale_dim * cfg.scale_type_size // scales.dtype.itemsize
            read_scales = _words(read_argument(self._mode, "scales", scales, (tokens, width), scales.dtype))
        targets = first_of_each(owners(read_ids, cfg.num_experts_per_rank, cfg.world_size, truncates=False))
        return Sent(read_argument(self._mode, "input", rows, (tokens, rows.size(1)), rows.dtype), read_weights, read_scales, read_ids, targets)

    @overload
    def dispatch(
        self,
        input: Tensor,
        weights: Tensor | None,
        scales: Tensor | None,
        indices: Tensor,
        *,
        routing: EpDispatchRoutingHandleV2 | None = None,
        return_routing: Literal[False] = False,
    ) -> DispatchedV2: ...

    @overload
    def dispatch(
        self, input: Tensor, weights: Tensor | None, scales: Tensor | None, indices: Tensor, *, routing: None = None, return_routing: Literal[True]
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, EpDispatchRoutingHandleV2]: ...

    def dispatch(
        self,
        input: Tensor,  # noqa: A002 - the name of the real parameter
        weights: Tensor | None,
        scales: Tensor | None,
        indices: Tensor,
        *,
        routing: EpDispatchRoutingHandleV2 | None = None,
        return_routing: bool = False,
    ) -> DispatchedV2 | tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, EpDispatchRoutingHandleV2]:
        """Send each token once to each rank of its ids, with all its ids and weights."""
        if routing is not None and return_routing:
            raise ValueError("either a routing is replayed or one is returned")
        sent = self._sent(input, weights, scales, indices)
        if routing is not None:
            if routing.cur_rank_num_token != input.size(0):
                raise ValueError(f"the routing handle is of {routing.cur_rank_num_token} tokens, not {input.size(0)}")
            place = mori_config.destinations(routing.inner(), self._v1)
            sent = Sent(sent.rows, sent.weights, sent.scales, sent.ids, torch.where(place < 0, NOWHERE, place // self._capacity))
        met = self.comm.group.exchange("dispatch", sent)
        handle = self._route(met) if routing is None else routing
        origins = mori_config.origins_of(handle.inner(view=self._sources if routing is None else None), self._v1)
        out = self._arena("out", self._capacity, input.size(1), input.dtype)
        out_weights = self._arena("weights", self._capacity, self.cfg.num_experts_per_token, torch.float32)
        out_ids = self._arena("ids", self._capacity, self.cfg.num_experts_per_token, torch.int32)
        out_scales = None if sent.scales is None else self._arena("scales", self._capacity, sent.scales.size(1), torch.int32)
        mori_common.deliver(met, origins, out, out_weights, out_scales, out_ids)
        result = (out, out_weights, out_scales, out_ids, handle.total_recv_token_num)
        return (*result, handle) if return_routing else result

    def _route(self, met: Sequence[Sent]) -> EpDispatchRoutingHandleV2:
        group, rank = self.comm.group, self.comm.rank
        found = mori_common.arrivals(group, met, self._capacity)
        if found.dropped:
            misuse(self._mode, Reason.CAPACITY, f"{found.dropped} rows more than {self._capacity} arrive")
        layout = mori_config.empty_handle(self._v1)
        poison_(self._sources)
        layout.disp_tok_id_to_src_tok_id_local = self._sources
        mori_config.write_handle(layout, self._v1, group.exchange("routing", found.origins), met[rank].targets, self._capacity)
        return EpDispatchRoutingHandleV2(*layout.tensors()[:4], None, layout.cur_rank_num_token, reverse_src_view=self._sources)

    def combine_in_view(self) -> Tensor:
        """Return the staging arena (capacity, hidden) of combine's input, which saves a copy and changes nothing else."""
        return self._arena("combine input", self._capacity, self.cfg.hidden_dim, self.cfg.combined)

    def combine(
        self,
        input: Tensor,  # noqa: A002 - the name of the real parameter
        weights: Tensor | None = None,
        indices: Tensor | None = None,
        *,
        routing: EpDispatchRoutingHandleV2,
    ) -> tuple[Tensor, Tensor | None]:
        """Sum the rows of each token over ranks, plainly. ``weights`` asks for the sum of those that dispatch moved; ``indices`` is not read."""
        count, tokens, topk = int(routing.total_recv_token_num), routing.cur_rank_num_token, self.cfg.num_experts_per_token
        if input.dtype != self.cfg.combined:
            misuse(self._mode, Reason.DTYPE, f"input is read as {self.cfg.combined}, and is {input.dtype}")
        if input.size(0) < count:
            misuse(self._mode, Reason.SHORT_INPUT, f"{count} rows were received and {input.size(0)} are given")
        rows = read_argument(self._mode, "input", input, (input.size(0), input.size(1)), input.dtype)
        moved = None
        if weights is not None:
            moved = self._arena("weights", self._capacity, topk, torch.float32).clone()
        back = Back(mori_common.transported(rows, self.cfg.quant_type, self._fp8), moved)
        met = self.comm.group.exchange("combine", back)
        place = mori_config.destinations(routing.inner(view=self._sources), self._v1)  # the reverse map is not touched
        out = self._arena("combined", tokens, input.size(1), input.dtype)
        out.copy_(mori_common.gather_sum(place, [peer.rows.float() for peer in met], self._capacity).to(input.dtype))
        if moved is None:
            return out, None
        out_weights = self._arena("combined weights", tokens, topk, torch.float32)
        given = [torch.empty(0, topk) if peer.weights is None else peer.weights for peer in met]
        return out, out_weights.copy_(mori_common.gather_sum(place, given, self._capacity))

    def reset(self) -> None:
        """Reset, together with all ranks."""
        self.comm.group.exchange("reset", None)

    def close(self) -> None:
        """Close; later calls raise RuntimeError."""
        self._is_open = False

    def __enter__(self) -> "EmulatedDispatchCombineOpV2":
        return self

    def __exit__(self, kind: object, error: object, trace: object, /) -> None:
        self.close()
