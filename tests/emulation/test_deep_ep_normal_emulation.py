"""Tests of the normal kernels of the DeepEP emulation."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.emulation.comm_support import LOCAL, assert_bits, assert_layer, idle, local_layer, ranks_of, routes, rows, worlds
from tests.emulation.deep_ep import EmulatedBuffer
from tests.emulation.deep_ep_common import Config
from tests.emulation.events import EventOverlap
from tests.emulation.hazards import EmulatedMisuse, Mode, Reason, poison_mask
from tests.emulation.world import Group, World
from tests.ops.support import ints

HIDDEN, TOPK = 64, 3


@dataclass(frozen=True, eq=False)
class Call:
    """A dispatch with its buffer and its results."""

    buffer: EmulatedBuffer
    x: Tensor
    scale: Tensor | None
    ids: Tensor
    weights: Tensor
    counts: list[int]
    handle: tuple[Tensor, ...]
    event: EventOverlap


def dispatch(
    group: Group, x: Tensor | tuple[Tensor, Tensor], ids: Tensor, weights: Tensor, *, worst: int = 0, alignment: int = 1, late: bool = False
) -> Call:
    buffer = EmulatedBuffer(group)
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, LOCAL * group.size())
    assert per_node is None
    received, local_ids, local_weights, counts, handle, event = buffer.dispatch(
        x,
        num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=ids,
        topk_weights=weights,
        expert_alignment=alignment,
        num_worst_tokens=worst,
        config=Config(),
        async_finish=late,
    )
    assert local_ids is not None
    assert local_weights is not None
    data, scale = received if isinstance(received, tuple) else (received, None)
    return Call(buffer, data, scale, local_ids, local_weights, counts, handle, event)


@worlds
@pytest.mark.parametrize("spread", ["all", "idle", "none", "one rank"])
def test_a_layer_of_weighted_experts_is_the_reference_layer(ranks: int, spread: str) -> None:
    world = World(ranks)

    def body(rank: int) -> None:
        x = rows(rank, idle(rank) if spread == "idle" else 6, HIDDEN)
        ids, weights = routes(rank, x.size(0), TOPK, LOCAL * ranks)
        if spread == "none":
            ids.fill_(-1)
        if spread == "one rank":
            ids, weights = routes(rank, x.size(0), TOPK, LOCAL)
        call = dispatch(world.group(rank), x, ids, weights)
        assert call.x.size(0) == call.ids.size(0)
        assert not call.weights[call.ids < 0].any()
        made = local_layer(call.x, call.ids, call.weights, rank * LOCAL).to(torch.bfloat16)
        combined, total, event = call.buffer.combine(made, call.handle, topk_weights=call.weights, config=Config())
        assert event.event is None
        assert total is not None
        assert_layer(combined, x, ids, weights)
        torch.testing.assert_close(total, torch.where(ids >= 0, weights, 0.0))

    world.run(body)


@worlds
def test_identity_experts_give_the_number_of_ranks_times_the_row(ranks: int) -> None:
    world = World(ranks)

    def body(rank: int) -> None:
        x, (ids, weights) = rows(rank, 6, HIDDEN), routes(rank, 6, TOPK, LOCAL * ranks)
        bias = (rows(90, 6, HIDDEN), rows(91, 6, HIDDEN))
        call = dispatch(world.group(rank), x, ids, weights)
        combined, none, _ = call.buffer.combine(call.x, call.handle, config=Config())
        assert none is None
        expected = x.float() * ranks_of(ids, LOCAL).unsqueeze(1)
        assert torch.equal(combined, expected.to(torch.bfloat16))
        with_bias = call.buffer.combine(call.x, call.handle, bias=bias, config=Config())[0]
        torch.testing.assert_close(with_bias, (bias[0].float() + bias[1].float() + expected).to(torch.bfloat16))

    world.run(body)


@worlds
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.int32])
def test_bytes_arrive_by_source_rank_and_token(ranks: int, scale_dtype: torch.dtype) -> None:
    world = World(ranks)
    payloads = [rows(rank, 5, HIDDEN).to(torch.float8_e4m3fn) for rank in range(ranks)]
    scales = [torch.arange(10 * rank, 10 * rank + 10).view(2, 5).t().to(scale_dtype) for rank in range(ranks)]  # column-major
    given = [routes(rank, 5, TOPK, LOCAL * ranks) for rank in range(ranks)]

    def body(rank: int) -> Call:
        return dispatch(world.group(rank), (payloads[rank], scales[rank]), *given[rank], alignment=4)

    for rank, call in enumerate(world.run(body)):
        sent = [
            (source, token) for source in range(ranks) for token in range(5) if bool((given[source][0][token].clamp(min=-1) // LOCAL == rank).any())
        ]
        assert call.x.size(0) == len(sent)
        assert call.scale is not None
        assert call.scale.is_contiguous()
        for row, (source, token) in enumerate(sent):
            assert_bits(call.x[row], payloads[source][token])
            assert_bits(call.scale[row], scales[source][token])
            ids, weights = (tensor[token] for tensor in given[source])
            is_local = ids // LOCAL == rank
            assert ints(call.ids[row]) == ints(torch.where(is_local, ids - rank * LOCAL, -1))
            assert_bits(call.weights[row], torch.where(is_local, weights, 0.0))
        assert ints(call.handle[3]) == [token for _, token in sent]
        routed = [int(torch.stack([ids == rank * LOCAL + index for ids, _ in given]).sum()) for index in range(LOCAL)]
        assert call.counts == [-(-count // 4) * 4 for count in routed]


def test_worst_case_results_end_in_poison() -> None:
    world = World(2)

    def body(rank: int) -> None:
        x, (ids, weights) = rows(rank, 3, HIDDEN), routes(rank, 3, TOPK, LOCAL * 2)
        exact = dispatch(world.group(rank), x, ids, weights)
        worst = dispatch(world.group(rank), x, ids, weights, worst=8)
        count = exact.x.size(0)
        assert worst.counts == []
        assert worst.x.size(0) == 8
        assert_bits(worst.x[:count], exact.x)
        assert poison_mask(worst.x[count:]).all()
        assert poison_mask(worst.weights[count:]).all()
        assert (worst.ids[count:] == -1).all()
        combined = worst.buffer.combine(worst.x, worst.handle, config=Config())[0]
        assert torch.equal(combined, exact.buffer.combine(exact.x, exact.handle, config=Config())[0])

    world.run(body)


@pytest.mark.parametrize("worst", [6, 5])
def test_a_worst_case_can_be_exactly_full_and_no_fuller(worst: int) -> None:
    world = World(2)

    def body(rank: int) -> int:
        ids = torch.tensor([[0, 3]] * 3)  # both ranks
        return dispatch(world.group(rank), rows(rank, 3, HIDDEN), ids, torch.ones(3, 2), worst=worst).x.size(0)

    if worst == 6:
        assert world.run(body) == [6, 6]
        return
    with pytest.raises(EmulatedMisuse) as misuse:
        world.run(body)
    assert misuse.value.reason is Reason.CAPACITY


def test_a_cached_layout_moves_other_rows_in_the_same_way() -> None:
    world = World(2)

    def body(rank: int) -> None:
        x, (ids, weights) = rows(rank, 4, HIDDEN), routes(rank, 4, TOPK, LOCAL * 2)
        call = dispatch(world.group(rank), x, ids, weights)
        again = call.buffer.dispatch(-x, handle=call.handle, config=Config())
        assert again[1:5] == (None, None, None, None)
        assert torch.equal(again[0], -call.x)
        with pytest.raises(AssertionError, match="cached layout"):
            call.buffer.dispatch(x, handle=call.handle, topk_idx=ids, topk_weights=weights, config=Config())  # type: ignore[call-overload]

    world.run(body)


def test_asynchronous_results_are_poison_until_the_event() -> None:
    world = World(2)

    def body(rank: int) -> None:
        x, (ids, weights) = rows(rank, 4, HIDDEN), routes(rank, 4, TOPK, LOCAL * 2)
        call = dispatch(world.group(rank), x, ids, weights, late=True)
        assert poison_mask(call.x).all()
        assert poison_mask(call.ids).all()
        call.event.current_stream_wait()
        assert_bits(call.x, dispatch(world.group(rank), x, ids, weights).x)
        combined, _, event = call.buffer.combine(call.x, call.handle, config=Config(), async_finish=True)
        assert poison_mask(combined).all()
        with event:
            pass
        assert not torch.isnan(combined).any()

    world.run(body)


@pytest.mark.parametrize("mode", ["strict", "faithful"])
def test_a_handle_of_another_dispatch_is_not_seen(mode: Mode) -> None:
    world = World(1)

    def body(rank: int) -> Tensor:
        x = rows(rank, 3, HIDDEN)
        first = dispatch(world.group(rank), x, torch.tensor([[0], [-1], [1]]), torch.ones(3, 1))
        other = dispatch(world.group(rank), x, torch.tensor([[-1], [0], [1]]), torch.ones(3, 1))
        return first.buffer.combine(first.x, other.handle, config=Config())[0] - x

    (difference,) = world.run(body)
    assert [bool(row.any()) for row in difference.unbind()] == [True, True, False]  # of token 0, token 0 as token 1, and token 2


def test_what_the_host_checks_raise() -> None:
    world = World(1)
    x, ids, weights = rows(0, 3, HIDDEN), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)

    def raised(error: type[BaseException], match: str, x: Tensor | tuple[Tensor, Tensor] = x, ids: Tensor = ids, weights: Tensor = weights) -> None:
        with pytest.raises(error, match=match):
            world.run(lambda rank: dispatch(world.group(rank), x, ids, weights))

    raised(RuntimeError, "int64, not torch.int32", ids=ids.int())
    raised(RuntimeError, "topk_weights is float32", weights=weights.double())
    raised(RuntimeError, "one-byte rows", x=(x, torch.ones(3, 1)))
    raised(RuntimeError, "float32 or int32", x=(x.to(torch.float8_e4m3fn), torch.ones(3, 1, dtype=torch.uint8)))
    raised(RuntimeError, "contiguous", x=x.t())

    def unsized(rank: int) -> None:
        call = dispatch(world.group(rank), x, ids, weights)
        with pytest.raises(RuntimeError, match="x has 2 rows and 3 were received"):
            call.buffer.combine(call.x[:2], call.handle, config=Config())
        with pytest.raises(ValueError, match="unpack"):
            call.buffer.combine(call.x, call.handle[:5], config=Config())
        with pytest.raises(AssertionError, match="no config for 1 ranks"):
            call.buffer.combine(call.x, call.handle)
        with pytest.raises(AssertionError, match="no event"):
            call.event.current_stream_wait()
        with pytest.raises(AssertionError, match="explicitly_destroy"):
            call.buffer.destroy()
        with pytest.raises(AssertionError, match="even"):
            EmulatedBuffer.set_num_sms(3)

    world.run(unsized)
    with pytest.raises(ValueError, match="group or comm"):
        EmulatedBuffer(None)


def test_a_layout_that_contradicts_the_routes_is_misuse() -> None:
    world = World(2)
    x, ids, weights = rows(0, 2, HIDDEN), torch.tensor([[0], [1]]), torch.ones(2, 1)

    def body(rank: int, mode: Mode) -> Tensor | tuple[Tensor, Tensor]:
        buffer = EmulatedBuffer(world.group(rank), mode=mode)
        other = torch.tensor([[0], [3]])
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(other, LOCAL * 2)
        return buffer.dispatch(x, None, per_rank, None, in_rank, per_expert, ids, weights)[0]

    with pytest.raises(EmulatedMisuse) as misuse:
        world.run(lambda rank: body(rank, "strict"))
    assert misuse.value.reason is Reason.LAYOUT_DISAGREES
    assert [len(found) for found in world.run(lambda rank: body(rank, "faithful"))] == [2, 2]


def test_a_failing_rank_does_not_hang_a_dispatch() -> None:
    world = World(4)

    def body(rank: int) -> None:
        ids = torch.zeros(2, 1, dtype=torch.int32 if rank == 3 else torch.int64)
        dispatch(world.group(rank), rows(rank, 2, HIDDEN), ids, torch.ones(2, 1))

    with pytest.raises(RuntimeError, match="topk_idx is torch"):
        world.run(body)
