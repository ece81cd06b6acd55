"""What else ``EpDispatchCombineOp`` of MoRI v1 has: sizes, positions of sources, and the standard-MoE adaptor, which no build here has."""

from abc import ABC
from typing import Final, Never

import torch
from torch import Tensor

from tests.emulation import mori_config
from tests.emulation.mori_config import EpDispatchCombineConfig, EpDispatchRoutingHandle

_ADAPTOR: Final = "built without ENABLE_STANDARD_MOE_ADAPT"


class PackedMethods(ABC):
    """The methods that move no rows."""

    def __init__(self, config: EpDispatchCombineConfig) -> None:
        self.config = config
        self._handle: EpDispatchRoutingHandle | None = None  # of the last dispatch

    def max_num_tokens_to_recv(self) -> int:
        """Return the rows of the receive arenas."""
        return self.config.max_num_tokens_to_recv()

    def max_num_tokens_to_recv_per_rank(self) -> int:
        """Return how many of them are of one source."""
        return self.config.max_num_tokens_to_recv_per_rank()

    def max_num_tokens_to_send(self) -> int:
        """Return how many rows go out at most."""
        return self.config.max_num_tokens_to_send()

    def max_num_tokens_to_send_per_rank(self) -> int:
        """Return how many of them go to one rank."""
        return self.config.max_num_tokens_to_send_per_rank()

    def get_launch_config(
        self, is_dispatch: bool = True, block_num: int = -1, rdma_block_num: int = -1, warp_per_block: int = -1
    ) -> tuple[int, int, int]:
        """Return blocks, RDMA blocks and warps: what is given, else the config's."""
        config = self.config
        given = ((block_num, config.block_num), (rdma_block_num, config.rdma_block_num), (warp_per_block, config.warp_num_per_block))
        blocks, rdma_blocks, warps = (default if value < 0 else value for value, default in given)
        return blocks, rdma_blocks, warps

    def get_dispatch_src_token_pos(self) -> Tensor:
        """Return where received rows came from, int32 (rows,): ``source rank * stride + token``."""
        if self._handle is None:
            return torch.empty(0, dtype=torch.int32)
        origins = mori_config.origins_of(self._handle, self.config)
        return torch.tensor([source * self.config.source_stride() + token for source, token in origins], dtype=torch.int32)

    def decode_send_flat_idx(self, flat_idx: int) -> tuple[int, int]:
        """Return the rank and the token of an encoded position."""
        return divmod(flat_idx, self.config.source_stride())

    def dispatch_standard_moe(
        self,
        input: Tensor,  # noqa: A002 - the name of the real parameter
        weights: Tensor | None,
        scales: Tensor | None,
        indices: Tensor,
        block_num: int = -1,
        rdma_block_num: int = -1,
        warp_per_block: int = -1,
    ) -> Never:
        """Raise RuntimeError."""
        raise RuntimeError(_ADAPTOR)

    def combine_standard_moe(
        self,
        input: Tensor,  # noqa: A002 - the name of the real parameter
        weights: Tensor | None,
        indices: Tensor,
        block_num: int = -1,
        rdma_block_num: int = -1,
        warp_per_block: int = -1,
        call_reset: bool = False,
    ) -> Never:
        """Raise RuntimeError."""
        raise RuntimeError(_ADAPTOR)

    def convert_dispatch_output(self, dispatch_out_x: Tensor, dispatch_out_topk_idx: Tensor, block_num: int = -1, warp_per_block: int = -1) -> Never:
        """Raise RuntimeError."""
        raise RuntimeError(_ADAPTOR)

    def convert_combine_input(
        self, packed_recv_x: Tensor, packed_recv_src_info: Tensor, packed_recv_layout_range: Tensor, block_num: int = -1, warp_per_block: int = -1
    ) -> Never:
        """Raise RuntimeError."""
        raise RuntimeError(_ADAPTOR)
