from dataclasses import dataclass

from torch import Tensor

@dataclass(frozen=True)
class Stage2ScatterContext:
    arena_handle: int
    combine_input_offset: int
    slot_stride_bytes: int
    max_tokens_per_rank: int
    world_size: int
    source_token_map: Tensor
