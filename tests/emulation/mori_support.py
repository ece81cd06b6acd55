"""The op of MoRI v1 that its tests make."""

from typing import Literal

import torch

from tests.emulation.comm_support import LOCAL
from tests.emulation.hazards import Mode
from tests.emulation.mori import EmulatedDispatchCombineOp
from tests.emulation.mori_config import EpDispatchCombineConfig
from tests.emulation.world import Group

HIDDEN, TOPK, TOKENS = 64, 3, 6


def config(group: Group, **changes: object) -> EpDispatchCombineConfig:
    base = EpDispatchCombineConfig(
        data_type=torch.bfloat16,
        rank=group.rank(),
        world_size=group.size(),
        hidden_dim=HIDDEN,
        scale_dim=2,
        scale_type_size=4,
        max_token_type_size=4,
        max_num_inp_token_per_rank=TOKENS,
        num_experts_per_rank=LOCAL,
        num_experts_per_token=TOPK,
    )
    for name, value in changes.items():
        setattr(base, name, value)
    return base


def make(group: Group, mode: Mode = "strict", gfx: Literal["gfx942", "gfx950"] = "gfx950", **changes: object) -> EmulatedDispatchCombineOp:
    return EmulatedDispatchCombineOp(config(group, **changes), group=group, mode=mode, gfx=gfx)
