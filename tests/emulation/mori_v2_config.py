"""The config and the routing handle of MoRI v2."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, final

import torch
from torch import Tensor

from tests.emulation import mori_config

QuantType: TypeAlias = Literal["none", "fp8_direct_cast", "fp8_blockwise"]
Schedule: TypeAlias = tuple[tuple[int | None, int, int, int, int], ...]

QUANT_TYPES: Final = ("none", "fp8_direct_cast", "fp8_blockwise")
MAX_RANKS: Final = 64
TOKEN_BYTES: Final = 16  # a token is a multiple of it


@final
@dataclass
class EpDispatchCombineConfigV2:
    """The config of an op of v2. Raises: ValueError, for what its backends cannot do."""

    rank: int
    world_size: int
    hidden_dim: int
    max_num_inp_token_per_rank: int
    num_experts_per_rank: int
    num_experts_per_token: int
    data_type: torch.dtype = torch.bfloat16
    dispatch_data_type: torch.dtype | None = None
    combine_data_type: torch.dtype | None = None
    scale_dim: int = 0
    scale_type_size: int = 0
    combine_mode: Literal["gather", "scatter"] = "gather"
    quant_type: QuantType = "none"
    dispatch_block_num: int | None = None
    combine_block_num: int | None = None
    warp_num_per_block: int | None = None
    combine_warp_num_per_block: int | None = None
    schedule: Schedule | None = None
    enable_std_moe: bool = False
    max_total_recv_tokens: int = 0
    kernel_backend: Literal["flydsl", "hip"] | None = None

    def __post_init__(self) -> None:
        if (self.dispatch_data_type is None) != (self.combine_data_type is None):
            raise ValueError("dispatch_data_type and combine_data_type: both or neither")
        if self.quant_type not in QUANT_TYPES:
            raise ValueError(f"quant_type is one of {QUANT_TYPES}, not {self.quant_type!r}")
        if self.combine_mode not in ("gather", "scatter"):
            raise ValueError(f"combine_mode is gather or scatter, not {self.combine_mode!r}")
        if self.world_size > MAX_RANKS:
            raise ValueError(f"at most {MAX_RANKS} ranks, not {self.world_size}")
        if self.combined == torch.float4_e2m1fn_x2:
            raise ValueError("combine has no fp4")
        if self.quant_type != "none":
            self.combine_mode = "scatter"
        if self.dispatched != self.combined and (self.combine_mode == "scatter" or self.enable_std_moe):
            raise ValueError("different dtypes of dispatch and combine need gather, no quantization and no standard MoE")
        for dtype in (self.dispatched, self.combined):
            columns = self.hidden_dim // 2 if dtype == torch.float4_e2m1fn_x2 else self.hidden_dim
            if columns * dtype.itemsize % TOKEN_BYTES:
                raise ValueError(f"a token of {columns * dtype.itemsize} bytes is no multiple of {TOKEN_BYTES}")

    @property
    def dispatched(self) -> torch.dtype:
        """Return the dtype that dispatch moves."""
        return self.dispatch_data_type or self.data_type

    @property
    def combined(self) -> torch.dtype:
        """Return the dtype that combine sums."""
        return self.combine_data_type or self.data_type

    def as_v1(self) -> mori_config.EpDispatchCombineConfig:
        """Return the config of v1 with the same sizes."""
        return mori_config.EpDispatchCombineConfig(
            data_type=self.data_type,
            rank=self.rank,
            world_size=self.world_size,
            hidden_dim=self.hidden_dim,
            scale_dim=self.scale_dim,
            scale_type_size=self.scale_type_size,
            max_token_type_size=max(self.dispatched.itemsize, self.combined.itemsize),
            max_num_inp_token_per_rank=self.max_num_inp_token_per_rank,
            num_experts_per_rank=self.num_experts_per_rank,
            num_experts_per_token=self.num_experts_per_token,
            max_total_recv_tokens=self.max_total_recv_tokens,
        )


@final
class EpDispatchRoutingHandleV2:
    """The layout of a dispatch. Its reverse map is copied out of an arena when it is first asked for: too late after the next dispatch."""

    def __init__(
        self,
        disp_dest_tok_id_map: Tensor,
        inter_node_disp_dest_tok_id_map: Tensor,
        inter_node_disp_send_map: Tensor,
        total_recv_token_num: Tensor,
        disp_tok_id_to_src_tok_id_local: Tensor | None = None,
        cur_rank_num_token: int = 0,
        *,
        reverse_src_view: Tensor | None = None,
    ) -> None:
        self.disp_dest_tok_id_map = disp_dest_tok_id_map
        self.inter_node_disp_dest_tok_id_map = inter_node_disp_dest_tok_id_map
        self.inter_node_disp_send_map = inter_node_disp_send_map
        self.total_recv_token_num = total_recv_token_num
        self.cur_rank_num_token = cur_rank_num_token
        self._sources = disp_tok_id_to_src_tok_id_local
        self._view = reverse_src_view

    @property
    def disp_tok_id_to_src_tok_id_local(self) -> Tensor:
        """Return the reverse map, copied when first asked for."""
        if self._sources is None:
            if self._view is None:
                raise RuntimeError("the handle has no reverse map")
            self._sources = self._view.clone()
        return self._sources

    def inner(self, view: Tensor | None = None) -> mori_config.EpDispatchRoutingHandle:
        """Return the layout as the functions of v1 take it; with ``view`` as the reverse map, which is then not copied."""
        sources = self.disp_tok_id_to_src_tok_id_local if view is None else view
        return mori_config.EpDispatchRoutingHandle(
            self.disp_dest_tok_id_map,
            self.inter_node_disp_dest_tok_id_map,
            self.inter_node_disp_send_map,
            self.total_recv_token_num,
            sources,
            self.cur_rank_num_token,
        )

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the tensors, in the order of the parameters."""
        return self.inner().tensors()

    @classmethod
    def from_tensors(cls, tensors: Sequence[Tensor], cur_rank_num_token: int = 0) -> "EpDispatchRoutingHandleV2":
        """Return the handle of five tensors."""
        dest, inter_dest, inter_send, total, sources = tensors
        return cls(dest, inter_dest, inter_send, total, sources, cur_rank_num_token)
