"""What a library returns against its word is refused with what was expected, what came, and what to do."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moe_typed import Bf16Rows, MxFp8Rows, bf16_as_is, from_topk
from moe_typed.dispatchers import (
    LL_BF16,
    LL_FP8,
    LL_FP8_ROWS,
    LL_FP8_UE8M0,
    ArenaError,
    DeepEPNormalDispatcher,
    DeepEPv2ExpandedDispatcher,
    DeepEPv2PlainDispatcher,
    LibraryError,
    LowLatencyWire,
    MooncakeDispatcher,
    MoriNormalDispatcher,
    NixlDispatcher,
    PairedArena,
    RingArena,
)
from moe_typed.dispatchers.wire import from_words, in_words, zero_row
from moe_typed.formats import Fp8Block128Rows, Fp8Block128SlabRows, Payload, quantize_mxfp4, quantize_mxfp8
from moe_typed.routing import fill_nowhere, in_order
from tests.dispatchers.libraries import mori_op, residence_of, spread_of
from tests.dispatchers.support import CAPACITY, LOCAL, NARROW, WIDE, batch
from tests.emulation.hazards import EmulatedMisuse, poison_mask
from tests.emulation.mooncake import EmulatedMooncakeBuffer
from tests.emulation.mori_config import EpDispatchCombineKernelType
from tests.emulation.world import Group, World

ROWS, GROUPS = 6, 2
DATA = torch.zeros((LOCAL, ROWS, 128 * GROUPS), dtype=torch.uint8).view(torch.float8_e4m3fn)
BY_ROW = torch.ones(LOCAL, ROWS, GROUPS)
BY_COLUMN = torch.ones(LOCAL, GROUPS, ROWS).transpose(1, 2)


def one_rank() -> Group:
    return World(1).group(0)


@pytest.mark.parametrize(
    ("wire", "data", "scale", "says"),
    [
        (
            LL_FP8,
            DATA,
            BY_ROW,
            "and (2, 6, 2) with strides (12, 2, 1) came: Mooncake without RDMA needs LL_FP8_ROWS",
        ),
        (LL_FP8, DATA, None, "and no tensor came"),
        (LL_FP8_UE8M0, DATA, BY_ROW.int(), "column-major scales were expected"),
        (LL_FP8_ROWS, DATA, BY_COLUMN, "row-major scales were expected (LL_FP8_ROWS), and (2, 6, 2) with strides (12, 1, 6) came"),
        (LL_FP8_ROWS, DATA, None, "and no tensor came"),
        (LL_BF16, DATA.to(torch.bfloat16), BY_ROW, "bf16 rows were asked for, and came with scales"),
        (LL_BF16, DATA.to(torch.bfloat16)[..., :128], None, "a contiguous slab (local_experts, capacity, hidden) was expected"),
        (LL_BF16, DATA.to(torch.bfloat16).flatten(0, 1), None, "a contiguous slab (local_experts, capacity, hidden) was expected"),
    ],
)
def test_slabs_in_another_layout(wire: LowLatencyWire[Payload], data: Tensor, scale: Tensor | None, says: str) -> None:
    with pytest.raises(LibraryError) as raised:
        wire.arrive(data, scale)
    assert says in str(raised.value)


def test_slabs_in_their_layout_are_views() -> None:
    slab = LL_FP8.arrive(DATA, BY_COLUMN)
    assert isinstance(slab, Fp8Block128SlabRows)
    assert slab.data.data_ptr() == DATA.data_ptr()
    assert slab.scale is BY_COLUMN
    rows = LL_FP8_ROWS.arrive(DATA, BY_ROW)
    assert isinstance(rows, Fp8Block128Rows)
    assert rows.scale.data_ptr() == BY_ROW.data_ptr()
    assert rows.scale.shape == (LOCAL * ROWS, GROUPS)


@pytest.mark.parametrize(("fallback", "says"), [(True, "needs LL_FP8_ROWS"), (False, "LL_FP8 takes column-major ones")])
def test_mooncake_on_the_path_that_was_not_declared(fallback: bool, says: str) -> None:
    group = one_rank()
    buffer, spread = EmulatedMooncakeBuffer(group, fallback=fallback), spread_of(group)
    rows, routing = batch("full", 0, LOCAL, WIDE)
    declared = LL_FP8 if fallback else LL_FP8_ROWS
    with pytest.raises(LibraryError, match=says):
        MooncakeDispatcher(buffer, declared, spread, max_tokens=CAPACITY, active_ranks=None, timeout_us=-1, arena=RingArena()).dispatch(
            rows, in_order(routing)
        )


class LyingNixl:
    """A buffer of as many local experts as it likes, without hooks."""

    rank, group_size = 0, 1

    def __init__(self, experts: int, counts: int) -> None:
        self.experts, self.counts = experts, counts

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        *,
        use_fp8: bool,
        round_scale: bool,
        use_ue8m0: bool,
        return_recv_hook: bool,
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, int, int], None, Callable[[], None] | None]:
        recv = torch.zeros((self.experts, CAPACITY, WIDE), dtype=torch.bfloat16)
        return recv, torch.zeros(self.counts, dtype=torch.int32), (x, x, 0, 0), None, None

    def low_latency_combine(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, handle: tuple[Tensor, Tensor, int, int], *, use_logfmt: bool, return_recv_hook: bool
    ) -> tuple[Tensor, None, Callable[[], None] | None]:
        return torch.zeros((topk_idx.shape[0], WIDE), dtype=torch.bfloat16), None, None


@pytest.mark.parametrize(("experts", "counts"), [(LOCAL + 1, LOCAL + 1), (LOCAL, LOCAL + 1)])
def test_slabs_of_other_experts(experts: int, counts: int) -> None:
    group = one_rank()
    dispatcher = NixlDispatcher(LyingNixl(experts, counts), LL_BF16, spread_of(group), max_tokens=CAPACITY, topk_idx_t=torch.int32, arena=RingArena())
    rows, routing = batch("full", 0, LOCAL, WIDE)
    with pytest.raises(LibraryError, match=rf"slabs of {LOCAL} local experts were expected, and {experts} with counts \({counts},\) came"):
        dispatcher.dispatch(rows, in_order(routing))


def test_a_hook_that_was_asked_for_and_did_not_come() -> None:
    group = one_rank()
    dispatcher = NixlDispatcher(LyingNixl(LOCAL, LOCAL), LL_BF16, spread_of(group), max_tokens=CAPACITY, topk_idx_t=torch.int32, arena=RingArena())
    rows, routing = batch("full", 0, LOCAL, WIDE)
    with pytest.raises(LibraryError, match="a receive hook was asked for"):
        dispatcher.start_dispatch(rows, in_order(routing))


# ---- payloads as words --------------------------------------------------------------------------------------------------------------


def test_scales_of_a_byte_travel_four_to_a_word_and_come_back_as_they_were() -> None:
    rows, _ = batch("full", 0, LOCAL, NARROW)
    for conversion in (quantize_mxfp8, quantize_mxfp4):
        payload = conversion.run(rows)
        carried = in_words(payload)
        assert isinstance(carried, tuple)
        assert carried[1].dtype == torch.int32
        assert carried[1].shape == (rows.rows, NARROW // 32 // 4)
        back = from_words(conversion.target, carried)
        assert torch.equal(back.dequantize(), payload.dequantize())


@pytest.mark.parametrize("carried", [torch.zeros(2, 64, dtype=torch.uint8).view(torch.float8_e4m3fn)])
def test_rows_that_lost_their_scales(carried: Tensor) -> None:
    with pytest.raises(LibraryError, match="MxFp8Rows was sent, and arrived without scales"):
        from_words(MxFp8Rows, carried)
    with pytest.raises(LibraryError, match="Bf16Rows was sent, and arrived with scales"):
        from_words(Bf16Rows, (torch.zeros(2, 64, dtype=torch.bfloat16), torch.ones(2, 2)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float4_e2m1fn_x2, torch.int32, torch.float32])
def test_a_row_of_zero_bytes(dtype: torch.dtype) -> None:
    like = torch.zeros((0, 64 * dtype.itemsize), dtype=torch.uint8).view(dtype)
    row = zero_row(like)
    assert (row.dtype, row.shape) == (dtype, (1, like.shape[1]))
    assert not bool(poison_mask(row).any())
    assert not bool(row.view(torch.uint8).any())


class SilentNormal:
    """A buffer that forgets ids, as it does for a cached layout."""

    rank, group_size = 0, 1

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Tensor, Tensor | None, Tensor, Tensor, object]:
        return topk_idx, None, topk_idx, topk_idx, None

    def dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        *,
        num_tokens_per_rank: Tensor,
        num_tokens_per_rdma_rank: Tensor | None,
        is_token_in_rank: Tensor,
        num_tokens_per_expert: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        expert_alignment: int,
        num_worst_tokens: int,
        config: object,
    ) -> tuple[Tensor | tuple[Tensor, Tensor], None, None, None, None, None]:
        return x, None, None, None, None, None

    def combine(self, x: Tensor, handle: tuple[Tensor, ...], *, config: object) -> tuple[Tensor, None, None]:
        return x, None, None


class SilentHandle:
    """The handle of nothing."""

    psum_num_recv_tokens_per_scaleup_rank = torch.zeros(1, dtype=torch.int32)
    psum_num_recv_tokens_per_expert = torch.zeros(LOCAL, dtype=torch.int32)


class SilentElastic:
    """A buffer that forgets ids and weights."""

    rank_idx, num_ranks = 0, 1

    def dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        *,
        topk_idx: Tensor,
        topk_weights: Tensor,
        num_experts: int,
        num_max_tokens_per_rank: int,
        expert_alignment: int,
        do_cpu_sync: bool,
        do_expand: bool,
        use_tma_aligned_col_major_sf: bool,
    ) -> tuple[Tensor | tuple[Tensor, Tensor], None, None, SilentHandle, None]:
        return x, None, None, SilentHandle(), None

    def combine(self, x: Tensor, handle: SilentHandle) -> tuple[Tensor, None, None]:
        return x, None, None


def test_routes_that_did_not_arrive() -> None:
    rows, routing = batch("full", 0, LOCAL, NARROW)
    routes, spread = in_order(routing), spread_of(one_rank())
    with pytest.raises(LibraryError, match="returned no ids, weights or handle"):
        DeepEPNormalDispatcher(SilentNormal(), bf16_as_is, spread, topk_idx_t=torch.int64).dispatch(rows, routes)
    with pytest.raises(LibraryError, match="returned no ids or weights"):
        DeepEPv2PlainDispatcher(SilentElastic(), bf16_as_is, spread, max_tokens=4, topk_idx_t=torch.int64).dispatch(rows, routes)
    with pytest.raises(LibraryError, match="returned no weight for each slot"):
        DeepEPv2ExpandedDispatcher(SilentElastic(), bf16_as_is, spread, max_tokens=4, topk_idx_t=torch.int64, expert_alignment=1).dispatch(
            rows, routes
        )


def test_a_library_that_fails_in_dispatch_leaves_a_pair_to_be_reset() -> None:
    group = one_rank()
    op = mori_op(group, "bf16", EpDispatchCombineKernelType.IntraNode)
    dispatcher = MoriNormalDispatcher(op, bf16_as_is, residence_of(group), arena=PairedArena())
    rows, routing = batch("full", 0, LOCAL, NARROW)
    routes = fill_nowhere(in_order(routing))
    op.config.max_num_inp_token_per_rank = 99  # the dispatcher lets through what the arena cannot hold
    ids, topk_weights = (part.repeat(CAPACITY, 1) for part in (routing.topk_ids, routing.topk_weights))
    with pytest.raises(EmulatedMisuse):
        dispatcher.dispatch(Bf16Rows(rows.data.repeat(CAPACITY, 1)), fill_nowhere(in_order(from_topk(ids, topk_weights, LOCAL))))
    with pytest.raises(ArenaError, match="reset the dispatcher on every rank"):
        dispatcher.dispatch(rows, routes)
    dispatcher.reset()
    dispatcher.dispatch(rows, routes).handle.discard("the test is over")
