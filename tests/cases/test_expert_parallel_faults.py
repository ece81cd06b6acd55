"""Faults that users of public engines reported where rows go to other ranks, at toy size: one test a report, as in ``test_boundary_faults``."""

import math
from collections.abc import Callable
from typing import TypeVar, cast

import pytest
import torch
from torch import Tensor

from moe_typed import (
    Bf16ExpertWeights,
    Bf16Rows,
    BoundaryError,
    DeviceCount,
    Experts,
    ExpertStage,
    Fp8Block128ExpertWeights,
    LocalIds,
    LocalSinkIds,
    LogicalIds,
    Payload,
    PhysicalIds,
    Routing,
    Settled,
    SiluAndMul,
    StandardDispatcher,
    bf16_as_is,
    debug,
    from_topk,
)
from moe_typed.dispatchers import CapacityError, MoriNormalDispatcher, PairedArena
from moe_typed.formats import Fp8Block128SlabRows, relayouts
from moe_typed.routing import ExpertMap, ExpertMask, contiguous_residence, fill_nowhere, in_order, localize, localize_by_map, to_sink
from moe_typed.runners import PreparedWeights, prepare_aiter, reference_experts
from moe_typed.stages import (
    AiterSinkInput,
    AiterSlotInput,
    DeepEPLLDispatchOutput,
    DeepEPLLHandle,
    DeepEPv2PlainDispatchOutput,
    DeepEPv2PlainHandle,
    PaddedPrefixSum,
    ReceivedPerExpert,
    SegmentEnds,
)
from moe_typed.table import AnyRunner
from tests.dispatchers.libraries import mori_config
from tests.dispatchers.setups import SETUPS, expected, slots
from tests.dispatchers.support import LOCAL, NARROW, Weights, batch, held_by, near, prepared, weights
from tests.emulation.deep_ep import EmulatedBuffer
from tests.emulation.mori import EmulatedDispatchCombineOp
from tests.emulation.mori_config import EpDispatchCombineKernelType
from tests.emulation.world import World
from tests.ops.support import ints
from tests.runners.aiter.support import make_library

P = TypeVar("P", bound=Payload)

CPU = torch.device("cpu")
EXPERTS = 2 * LOCAL
setups = pytest.mark.parametrize("name", SETUPS)


def ids(*rows: list[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def on_aiter(w: Weights) -> PreparedWeights[AnyRunner, Payload]:
    return cast("Callable[..., PreparedWeights[AnyRunner, Payload]]", prepare_aiter)(w, make_library()[0])


def experts_of(w: Weights) -> tuple[ExpertStage[Payload], ExpertStage[Payload]]:
    """Return the same experts on two runners."""
    return Experts(prepared(w)), Experts(on_aiter(w))


def random_rows(count: int, hidden: int = NARROW) -> Tensor:
    return torch.randn(count, hidden, generator=torch.Generator().manual_seed(count)).to(torch.bfloat16)


# ---- scales ------------------------------------------------------------------------------------------------------------------------


def test_scale_dtype_on_the_wire() -> None:
    """sgl-project/sglang#35388: packed e8m0 scales arrive, and the weights are multiplied under float32 ones."""
    world, w = World(1), weights("fp8 block", LOCAL, SETUPS["deepep ll"].hidden)
    for experts in experts_of(w):
        dispatcher = SETUPS["deepep ll"].dispatcher(world.group(0), "ue8m0")
        with pytest.raises(BoundaryError, match=r"Fp8Block128PackedSlabRows \(fp8-block128-packed-slab\), but \w+ takes Bf16Rows"):
            dispatcher.then(experts)


def test_scale_group_on_the_wire() -> None:
    """sgl-project/sglang#36119: groups of 128 arrive where weights have groups of 32; one dtype of data, and with one group one shape of scales."""
    world = World(1)
    for experts in experts_of(weights("mxfp8", LOCAL, NARROW)):
        for name in ("mori normal", "deepep normal", "deepep v2 plain"):
            with pytest.raises(BoundaryError, match=r"Fp8Block128Rows \(fp8-block128\), but \w+ takes Bf16Rows"):
                SETUPS[name].dispatcher(world.group(0), "fp8").then(experts)


@pytest.mark.parametrize("rows", [1, 2])
def test_scale_layout_of_a_slab(rows: int) -> None:
    """vllm-project/vllm#53338: column-major scales read by row; of one row nothing would be seen."""
    data = torch.ones(1, rows, 256).to(torch.float8_e4m3fn)
    by_row = torch.tensor([[1.0, 2.0], [4.0, 8.0]])[:rows]
    slab = Fp8Block128SlabRows(data.flatten(0, 1), by_row.T.contiguous().T.unsqueeze(0))
    with pytest.raises(BoundaryError, match="Fp8Block128SlabRows"):
        Experts(on_aiter(weights("fp8 block", 1, 256)))(dispatched(slab, [rows]))
    assert torch.equal(relayouts.slab_to_row.run(slab, None).scale, by_row)


def dispatched(payload: P, counts: list[int]) -> DeepEPLLDispatchOutput[P]:
    """Return a slab of one rank."""
    handle = DeepEPLLHandle(None, None)
    handle.discard("nothing is combined here")
    own = Routing(ids([0]), torch.ones(1, 1), PhysicalIds, len(counts), Settled(), True, 1)
    received = ReceivedPerExpert(torch.tensor(counts, dtype=torch.int32))
    return DeepEPLLDispatchOutput(payload, received, payload.rows // len(counts), 1, own, handle)


def test_poison_rows_of_a_slab() -> None:
    """sgl-project/sglang#32385: scales after the live rows are what memory held, and a consumer looks at all of them."""
    w = weights("fp8 block", 2, 256)
    assert isinstance(w, Fp8Block128ExpertWeights)
    found: list[Tensor] = []
    for stale in (math.nan, 0.3, -1.0):
        scale = torch.full((2, 2, 4), stale).transpose(1, 2)
        scale[0, 0] = torch.tensor([0.5, 2.0])
        slab = Fp8Block128SlabRows(torch.ones(8, 256).to(torch.float8_e4m3fn), scale)
        with debug("strict"):
            experts = Experts(prepare_aiter(w, make_library()[0])).accepting(relayouts.slab_to_row)
            found.append(experts(dispatched(slab, [1, 0])).hidden_states[0, 0])
    assert bool(found[0].isfinite().all())
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    with debug("layout"), pytest.raises(BoundaryError, match=r"ReceivedPerExpert\.counts: dtype is int64, expected int32"):
        ReceivedPerExpert(torch.tensor([1, 0]))
    with debug("values"), pytest.raises(BoundaryError, match=r"received: holds a count outside 0\.\.4"):
        dispatched(Bf16Rows(torch.zeros(8, 256, dtype=torch.bfloat16)), [5, 0])


# ---- ids ---------------------------------------------------------------------------------------------------------------------------


def test_sentinel_ids_of_aiter() -> None:
    """vllm-project/vllm-xpu-kernels#571 and vllm-project/vllm#47733: -1 is no index, and one convention is not the other."""
    topk_weights = torch.ones(3, 2)
    routing = Routing(ids([0, -1], [-1, -1], [3, 0]), topk_weights, LocalIds, 4, Settled(), False, 3)
    assert torch.equal(to_sink(routing).topk_ids, ids([0, 4], [4, 4], [3, 0]))
    rows = Bf16Rows(random_rows(3))
    with debug("layout"), pytest.raises(BoundaryError, match="holds space = LocalIds, expected LocalSinkIds"):
        AiterSinkInput(rows, cast("Routing[LocalSinkIds]", routing), torch.bfloat16)
    for wrong in (-1, 5):
        with debug("values"), pytest.raises(BoundaryError, match=f"holds the id {wrong}"):
            Routing(ids([0, wrong]), torch.ones(1, 2), LocalSinkIds, 4, Settled(), False, 1)


def test_id_space_of_aiter() -> None:
    """ROCm/aiter#3995: global ids index the weights of one rank; those that are in its range by chance, too."""
    rows, topk_weights = Bf16Rows(random_rows(1)), torch.ones(1, 2)
    for given in (ids([0, 3]), ids([0, 1])):
        physical = Routing(given, topk_weights, PhysicalIds, 4, Settled(), False, 1)
        with debug("layout"), pytest.raises(BoundaryError, match="holds space = PhysicalIds, expected LocalSinkIds"):
            AiterSinkInput(rows, cast("Routing[LocalSinkIds]", physical), torch.bfloat16)
    local = localize(from_topk(ids([0, 3]), topk_weights, 4), 2, 2)
    assert torch.equal(to_sink(local).topk_ids, ids([2, 1]))
    AiterSinkInput(rows, to_sink(local), torch.bfloat16)


def test_expert_map() -> None:
    """vllm-project/vllm#49758: a mask of zeros and ones given to a kernel that reads slot numbers, and the other way round."""
    numbers, marks = ids([-1, -1, 0, 1])[0], ids([0, 0, 1, 1])[0]
    for build in (lambda: ExpertMask(numbers, PhysicalIds), lambda: ExpertMap(marks, PhysicalIds, 2)):
        with debug("values"), pytest.raises(BoundaryError):
            build()
    residence = contiguous_residence(PhysicalIds, 4, 2, 2, CPU)
    assert torch.equal(residence.map.local, numbers)
    assert torch.equal(residence.mask.mask, marks)
    rows = Bf16Rows(random_rows(4))
    routing = Routing(ids([0], [1], [2], [3]), torch.ones(4, 1), PhysicalIds, 4, Settled(), False, 4)
    with debug("layout"), pytest.raises(BoundaryError, match=r"AiterSlotInput\.mask: is of type ExpertMap, expected ExpertMask"):
        AiterSlotInput(rows, routing, cast("ExpertMask[PhysicalIds]", residence.map), torch.bfloat16)
    w = weights("bf16", 2, NARROW)
    assert isinstance(w, Bf16ExpertWeights)
    found = prepare_aiter(w, make_library()[0]).runner(SiluAndMul()).run(AiterSlotInput(rows, routing, residence.mask, torch.bfloat16))
    local = localize_by_map(routing, residence.map)
    near(found.hidden_states, reference_experts(rows.dequantize(), local.topk_ids, local.topk_weights, w, SiluAndMul()))
    assert not found.hidden_states[:2].any()
    assert bool(found.hidden_states[2:].any(1).all())


# ---- rows --------------------------------------------------------------------------------------------------------------------------


def arrived(live: int | DeviceCount) -> DeepEPv2PlainDispatchOutput[Bf16Rows]:
    """Return what two ranks sent into room for four rows each: three rows, and memory that nobody wrote."""
    rows = torch.full((8, NARROW), math.nan, dtype=torch.bfloat16)
    rows[:3] = random_rows(3)
    local_ids = torch.full((8, 2), 123456, dtype=torch.int32)
    local_ids[:3] = ids([0, -1], [1, 0], [-1, 1])
    handle = DeepEPv2PlainHandle(None, None)
    handle.discard("nothing is combined here")
    routing = Routing(local_ids, torch.full((8, 2), 0.5), LocalIds, 2, Settled(), False, live)
    return DeepEPv2PlainDispatchOutput(Bf16Rows(rows), routing, PaddedPrefixSum(ids([2, 4])[0], 1), handle)


def test_pad_tokens_that_nobody_wrote() -> None:
    """sgl-project/sglang#24850: ids and rows after the counters are garbage, and a runner that scans all slots reads them."""
    with debug("values"), pytest.raises(BoundaryError, match=r"holds the id 123456, but local ids over 2 experts lie in -1\.\.1"):
        arrived(8)
    w = weights("bf16", 2, NARROW)
    real = arrived(DeviceCount(ids([3])[0]))
    wanted = reference_experts(real.payload.dequantize()[:3], real.routing.topk_ids[:3], real.routing.topk_weights[:3], w, SiluAndMul())
    for experts in experts_of(w):
        with debug("strict"):
            near(experts(real).hidden_states[:3], wanted)


@pytest.mark.parametrize("runner", [0, 1], ids=["reference", "aiter"])
def test_pad_tokens_of_a_captured_batch(runner: int) -> None:
    """sgl-project/sglang#30895: a padded batch says how many rows are real, and nothing is built again when the number changes."""
    experts = experts_of(weights("bf16", 4, NARROW))[runner]
    layer = StandardDispatcher(bf16_as_is).then(experts)
    rows, topk_ids, topk_weights = random_rows(4), ids([0, 1], [1, 2], [2, 3], [3, 0]), torch.full((4, 2), 0.5)
    unpadded = layer(Bf16Rows(rows[:3].clone()), from_topk(topk_ids[:3], topk_weights[:3], 4))
    rows[3] = math.nan
    count = DeviceCount(ids([3])[0])
    padded = Routing(topk_ids, topk_weights, LogicalIds, 4, Settled(), False, count)
    for real in (3, 2):
        count.count.fill_(real)
        found = layer(Bf16Rows(rows), padded)
        assert torch.equal(found[:real], unpadded[:real])
        assert not found[real:].any()


@setups
def test_empty_batch_of_one_rank(name: str) -> None:
    """sgl-project/sgl-kernel-npu#738 and sgl-project/sglang#38773: a rank without rows takes part in the exchange, and gets no rows."""
    setup, world = SETUPS[name], World(2)
    w = weights("bf16", EXPERTS, setup.hidden)
    rows = random_rows(1, setup.hidden)

    def body(rank: int) -> Tensor:
        tokens = 1 - rank
        layer = setup.dispatcher(world.group(rank), "bf16").then(experts_of(held_by(w, rank))[1])
        routing = from_topk(ids([1, 3])[:tokens], torch.tensor([[0.25, 0.75]])[:tokens], EXPERTS)
        return layer(Bf16Rows(rows[:tokens]), slots(setup, routing))

    found, nothing = world.run(body)
    near(found, reference_experts(rows.float(), ids([1, 3]), torch.tensor([[0.25, 0.75]]), w, SiluAndMul()))
    assert (nothing.shape, nothing.dtype) == ((0, setup.hidden), torch.bfloat16)


def test_layout_of_an_idle_rank() -> None:
    """sgl-project/sgl-kernel-npu#738: zeros in full shapes."""
    world = World(2)

    def body(rank: int) -> list[list[int]]:
        per_rank, _, per_expert, in_rank, _ = EmulatedBuffer(world.group(rank)).get_dispatch_layout(ids([1, 3])[: 1 - rank].long(), EXPERTS)
        return [ints(per_rank), ints(per_expert), list(in_rank.shape)]

    assert world.run(body) == [[[1, 1], [0, 1, 0, 1], [1, 2]], [[0, 0], [0, 0, 0, 0], [0, 2]]]


def test_divisibility_of_segments() -> None:
    """pytorch/ao#2678: segments that begin at multiples of 4, read as if it were 8; and an expert without rows has none."""
    by_4, by_8 = ids([3, 9, 12])[0], ids([3, 13, 16])[0]  # 3, 5 and 0 rows
    with debug("values"):
        assert ints(SegmentEnds(by_4, 4).experts_of_rows(12)) == [0] * 3 + [-1] + [1] * 5 + [-1] * 3
        assert ints(SegmentEnds(by_8, 8).experts_of_rows(16)) == [0] * 3 + [-1] * 5 + [1] * 5 + [-1] * 3
        with pytest.raises(BoundaryError, match="holds a segment that ends before it begins"):
            SegmentEnds(by_4, 8)


def test_strides_of_the_memory_for_results() -> None:
    """flashinfer-ai/flashinfer#3103: results are written by an order that the caller's memory does not have."""
    rows, routing = Bf16Rows(random_rows(2)), Routing(ids([0], [1]), torch.ones(2, 1), PhysicalIds, 2, Settled(), False, 2)
    mask = contiguous_residence(PhysicalIds, 2, 0, 2, CPU).mask
    for output in (torch.zeros(NARROW, 2, dtype=torch.bfloat16).T, torch.zeros(2, 2 * NARROW, dtype=torch.bfloat16)[:, :NARROW]):
        with debug("layout"), pytest.raises(BoundaryError, match=r"AiterSlotInput\.output: is not contiguous"):
            AiterSlotInput(rows, routing, mask, torch.bfloat16, output)
    with debug("values"), pytest.raises(BoundaryError, match=r"output: is torch\.float16, but the results are torch\.bfloat16"):
        AiterSlotInput(rows, routing, mask, torch.bfloat16, torch.zeros(2, NARROW, dtype=torch.float16))


# ---- capacity ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [1, 2, 3, 4, 5, 6, 7, 8])
def test_capacity(capacity: int) -> None:
    """ROCm/mori#356: a buffer that is too small gives wrong numbers at full speed; here what fits is right, and what does not is refused."""
    w = weights("bf16", EXPERTS, NARROW)
    world = World(2)
    groups = [world.group(rank) for rank in range(2)]

    def body(rank: int) -> None:
        config = mori_config(groups[rank], "bf16", EpDispatchCombineKernelType.IntraNode)
        config.max_num_inp_token_per_rank = capacity
        op = EmulatedDispatchCombineOp(config, group=groups[rank], gfx="gfx950")
        dispatcher = MoriNormalDispatcher(op, bf16_as_is, contiguous_residence(PhysicalIds, EXPERTS, rank * LOCAL, LOCAL, CPU), arena=PairedArena())
        layer = dispatcher.then(Experts(prepared(held_by(w, rank))))
        for tokens in range(9):
            rows, topk_ids, topk_weights = random_rows(tokens), ids([0, 1]).repeat(tokens, 1), torch.full((tokens, 2), 0.5)  # all to one rank
            routing = fill_nowhere(in_order(from_topk(topk_ids, topk_weights, EXPERTS)))
            if tokens > capacity:
                with pytest.raises(CapacityError, match=f"{tokens} rows are more than the {capacity}"):
                    layer(Bf16Rows(rows), routing)
            else:
                near(layer(Bf16Rows(rows), routing), reference_experts(rows.float(), topk_ids, topk_weights, w, SiluAndMul()))

    world.run(body)


@setups
def test_capacity_of_one_rank_for_all(name: str) -> None:
    """ROCm/mori#356: all rows of all ranks go to one rank, and fit."""
    setup, world = SETUPS[name], World(4)
    w = weights("bf16", 4 * LOCAL, setup.hidden)

    def body(rank: int) -> Tensor:
        layer = setup.dispatcher(world.group(rank), "bf16").then(experts_of(held_by(w, rank))[1])
        rows, routing = batch("one rank", rank, 4 * LOCAL, setup.hidden)
        return layer(rows, slots(setup, routing))

    for rank, found in enumerate(world.run(body)):
        near(found, expected(setup, "one rank", rank, 4, "bf16", "bf16"))
