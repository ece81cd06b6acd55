"""A spread of experts over ranks is held against the group of the library's object."""

from collections.abc import Callable

import pytest
import torch

from moe_typed import bf16_as_is
from moe_typed.dispatchers import (
    LL_BF16,
    DeepEPLowLatencyDispatcher,
    DeepEPNormalDispatcher,
    DeepEPv2MaskedDispatcher,
    ExpertSpread,
    MooncakeDispatcher,
    NixlDispatcher,
    RingArena,
)
from tests.dispatchers.libraries import elastic_buffer, low_latency_buffer, nixl_buffer
from tests.dispatchers.support import CAPACITY, LOCAL
from tests.emulation.deep_ep import EmulatedBuffer
from tests.emulation.mooncake import EmulatedMooncakeBuffer
from tests.emulation.world import Group, World


def normal(group: Group, spread: ExpertSpread) -> object:
    return DeepEPNormalDispatcher(EmulatedBuffer(group), bf16_as_is, spread, topk_idx_t=torch.int64)


def elastic(group: Group, spread: ExpertSpread) -> object:
    buffer = elastic_buffer(group)
    return DeepEPv2MaskedDispatcher(buffer, bf16_as_is, spread, max_tokens=CAPACITY, topk_idx_t=torch.int64, expert_alignment=1)


def low_latency(group: Group, spread: ExpertSpread) -> object:
    buffer = low_latency_buffer(group)
    return DeepEPLowLatencyDispatcher(buffer, LL_BF16, spread, max_tokens=CAPACITY, topk_idx_t=torch.int64, arena=RingArena())


def nixl(group: Group, spread: ExpertSpread) -> object:
    return NixlDispatcher(nixl_buffer(group), LL_BF16, spread, max_tokens=CAPACITY, topk_idx_t=torch.int32, arena=RingArena())


def mooncake(group: Group, spread: ExpertSpread) -> object:
    buffer = EmulatedMooncakeBuffer(group)
    return MooncakeDispatcher(buffer, LL_BF16, spread, max_tokens=CAPACITY, active_ranks=None, timeout_us=-1, arena=RingArena())


@pytest.mark.parametrize("make", [normal, elastic, low_latency, nixl, mooncake])
def test_a_spread_is_over_the_group_of_the_buffer(make: Callable[[Group, ExpertSpread], object]) -> None:
    """Slots would be looked for on other ranks than those that the library sends them to."""
    group = World(1).group(0)
    make(group, ExpertSpread(0, 1, LOCAL))
    told = "is rank 0$" if make is nixl else "is rank 0 of 1$"
    with pytest.raises(ValueError, match=rf"the spread is of rank 1 of 2, but the object of .* {told}"):
        make(group, ExpertSpread(1, 2, 2 * LOCAL))
    if make is nixl:  # which does not tell over how many ranks experts are spread
        make(group, ExpertSpread(0, 2, 2 * LOCAL))
        return
    with pytest.raises(ValueError, match=rf"the spread is of rank 0 of 2, but the object of .* {told}"):
        make(group, ExpertSpread(0, 2, 2 * LOCAL))
