"""The enums, the config and the routing handle of MoRI v1."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Literal, TypeAlias, final

import torch
from torch import Tensor
from typing_extensions import override

from tests.emulation.hazards import poisoned
from tests.emulation.mori_common import NOWHERE

QuantType: TypeAlias = Literal["none", "fp8_direct_cast", "fp8_blockwise", "fp4_blockwise"]

QUANT_TYPES: Final = ("none", "fp8_direct_cast", "fp8_blockwise", "fp4_blockwise")


class PybindEnum:
    """What pybind11 makes of a C++ enum: no ``enum.Enum``, equal to members of its own type alone."""

    _names: ClassVar[tuple[str, ...]]

    def __init__(self, value: int) -> None:
        self._value = value

    @property
    def value(self) -> int:
        """Return the number."""
        return self._value

    @property
    def name(self) -> str:
        """Return the name."""
        return self._names[self._value]

    def __int__(self) -> int:
        return self._value

    def __index__(self) -> int:
        return self._value

    @override
    def __hash__(self) -> int:
        return self._value

    @override
    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.value == self._value

    @override
    def __repr__(self) -> str:
        return f"<{type(self).__name__}.{self.name}: {self._value}>"


@final
class EpDispatchCombineKernelType(PybindEnum):
    """Name a kernel."""

    _names = ("IntraNode", "InterNode", "InterNodeV1", "InterNodeV1LL", "AsyncLL", "IntraNodeLL")
    IntraNode: ClassVar["EpDispatchCombineKernelType"]
    InterNode: ClassVar["EpDispatchCombineKernelType"]
    InterNodeV1: ClassVar["EpDispatchCombineKernelType"]
    InterNodeV1LL: ClassVar["EpDispatchCombineKernelType"]
    AsyncLL: ClassVar["EpDispatchCombineKernelType"]
    IntraNodeLL: ClassVar["EpDispatchCombineKernelType"]


@final
class EpDispatchCombineQuantType(PybindEnum):
    """Name a transport of combine."""

    _names = ("None_", "Fp8DirectCast", "Fp8BlockwiseQuant", "Fp4BlockwiseQuant")
    None_: ClassVar["EpDispatchCombineQuantType"]
    Fp8DirectCast: ClassVar["EpDispatchCombineQuantType"]
    Fp8BlockwiseQuant: ClassVar["EpDispatchCombineQuantType"]
    Fp4BlockwiseQuant: ClassVar["EpDispatchCombineQuantType"]


KERNELS: Final = tuple(EpDispatchCombineKernelType(value) for value in range(6))
for _kernel in KERNELS:
    setattr(EpDispatchCombineKernelType, _kernel.name, _kernel)
for _value in range(4):
    _quant = EpDispatchCombineQuantType(_value)
    setattr(EpDispatchCombineQuantType, _quant.name, _quant)


@final
@dataclass
class EpDispatchCombineConfig:
    """The config of an op of v1; most of it sizes buffers, and little is checked."""

    data_type: torch.dtype
    rank: int
    world_size: int
    hidden_dim: int
    scale_dim: int
    scale_type_size: int
    max_token_type_size: int
    max_num_inp_token_per_rank: int
    num_experts_per_rank: int
    num_experts_per_token: int
    warp_num_per_block: int = 8
    block_num: int = 80
    max_total_recv_tokens: int = 0
    use_external_inp_buf: bool = True
    kernel_type: EpDispatchCombineKernelType = EpDispatchCombineKernelType.IntraNode
    gpu_per_node: int = 8
    rdma_block_num: int = 0
    num_qp_per_pe: int = 1
    quant_type: QuantType = "none"

    def max_num_tokens_to_recv_per_rank(self) -> int:
        """Return how many rows each source may send."""
        if self.max_total_recv_tokens == 0:
            return self.max_num_inp_token_per_rank
        return min(-(-self.max_total_recv_tokens // self.world_size), self.max_num_inp_token_per_rank)

    def max_num_tokens_to_recv(self) -> int:
        """Return how many rows the receive arenas hold."""
        return self.world_size * self.max_num_tokens_to_recv_per_rank()

    def max_num_tokens_to_send_per_rank(self) -> int:
        """Return how many rows go to a rank at most."""
        return self.max_num_inp_token_per_rank

    def max_num_tokens_to_send(self) -> int:
        """Return how many rows go out at most."""
        return self.world_size * self.max_num_inp_token_per_rank

    def source_stride(self) -> int:
        """Return by how much the encoded positions of two source ranks differ."""
        legacy = self.kernel_type == EpDispatchCombineKernelType.InterNode
        return self.max_num_inp_token_per_rank if legacy else self.max_num_tokens_to_send()


@final
@dataclass
class EpDispatchRoutingHandle:
    """The layout of a dispatch, int32 on the device.

    Here, entry ``token * topk + slot`` of ``disp_dest_tok_id_map`` is ``rank * capacity + row`` or -1, and entry ``row`` of
    ``disp_tok_id_to_src_tok_id_local`` is ``source rank * (world_size * max_num_inp_token_per_rank) + token``.
    """

    disp_dest_tok_id_map: Tensor
    inter_node_disp_dest_tok_id_map: Tensor
    inter_node_disp_send_map: Tensor
    total_recv_token_num: Tensor
    disp_tok_id_to_src_tok_id_local: Tensor
    cur_rank_num_token: int = 0

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the tensors, in the order of the fields."""
        return (
            self.disp_dest_tok_id_map,
            self.inter_node_disp_dest_tok_id_map,
            self.inter_node_disp_send_map,
            self.total_recv_token_num,
            self.disp_tok_id_to_src_tok_id_local,
        )

    @classmethod
    def from_tensors(cls, tensors: Sequence[Tensor], cur_rank_num_token: int = 0) -> "EpDispatchRoutingHandle":
        """Return the handle of five tensors."""
        dest, inter_dest, inter_send, total, source = tensors
        return cls(dest, inter_dest, inter_send, total, source, cur_rank_num_token)


def empty_handle(config: EpDispatchCombineConfig) -> EpDispatchRoutingHandle:
    """Return a handle of nothing, with tensors of the right sizes."""
    nodes = -(-config.world_size // config.gpu_per_node)
    tokens = config.max_num_inp_token_per_rank
    rows = config.world_size * tokens * config.num_experts_per_rank
    return EpDispatchRoutingHandle(
        poisoned((rows,), torch.int32),
        poisoned((nodes * tokens * config.num_experts_per_token,), torch.int32),
        poisoned((nodes * tokens,), torch.int32),
        torch.zeros(1, dtype=torch.int32),
        poisoned((rows,), torch.int32),
    )


def write_handle(
    handle: EpDispatchRoutingHandle, config: EpDispatchCombineConfig, origins: Sequence[Sequence[tuple[int, int]]], targets: Tensor, capacity: int
) -> None:
    """Write a layout. ``origins``: by receiving rank, where its rows came from. ``targets`` (tokens, topk): the ranks of this rank's tokens."""
    rank, topk = config.rank, config.num_experts_per_token
    for row, (source, token) in enumerate(origins[rank]):
        handle.disp_tok_id_to_src_tok_id_local[row] = source * config.source_stride() + token
    rows = [{token: row for row, (source, token) in enumerate(arrived) if source == rank} for arrived in origins]
    for token in range(targets.size(0)):
        for slot in range(topk):
            target = int(targets[token, slot])
            row = NOWHERE if target == NOWHERE else rows[target].get(token, NOWHERE)
            handle.disp_dest_tok_id_map[token * topk + slot] = NOWHERE if row == NOWHERE else target * capacity + row
    handle.total_recv_token_num.fill_(len(origins[rank]))
    handle.cur_rank_num_token = targets.size(0)


def destinations(handle: EpDispatchRoutingHandle, config: EpDispatchCombineConfig) -> Tensor:
    """Return where rows of tokens went (tokens, topk): ``rank * capacity + row``, or -1."""
    topk = config.num_experts_per_token
    return handle.disp_dest_tok_id_map[: handle.cur_rank_num_token * topk].view(-1, topk)


def origins_of(handle: EpDispatchRoutingHandle, config: EpDispatchCombineConfig) -> list[tuple[int, int]]:
    """Return where the received rows came from: (source rank, token)."""
    live = handle.disp_tok_id_to_src_tok_id_local[: int(handle.total_recv_token_num)]
    return [divmod(int(place), config.source_stride()) for place in live.unbind()]
