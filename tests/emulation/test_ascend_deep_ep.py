"""The NPU's deep_ep over in-process ranks, in both modes: rows without padding, weights from the handle, payloads by parameter or environment."""

import pytest
import torch
from torch import Tensor

from moe_typed.runners.ascend.ops import BufferQuantMode
from tests.emulation.ascend.deep_ep import EmulatedAscendBuffer, NormalHandle
from tests.emulation.ascend.misuse import EmulatedMisuse, EmulatedRefusal, Reason
from tests.emulation.ascend_reference import integers, numbers, quantized, random, random_routes
from tests.emulation.hazards import Mode, poison_mask
from tests.emulation.world import World

RANKS, E, T, K, H = 2, 6, 5, 3, 64
LOCAL = E // RANKS
ENVIRONMENT = "DEEP_NORMAL_MODE_USE_INT8_QUANT"


def rows_of(rank: int) -> Tensor:
    return random(10 + rank, T, H, dtype=torch.bfloat16)


def ids_of(rank: int) -> Tensor:
    """Return ids of which one is nobody's."""
    ids = random_routes(20 + rank, T, K, E).long()
    ids[rank, 1] = -1
    return ids


def weights_of(rank: int) -> Tensor:
    return random(30 + rank, T, K).softmax(-1)


def expected(rank: int) -> list[tuple[int, int, int, int]]:
    return [
        (expert, source, token, slot)
        for expert in range(LOCAL)
        for source in range(RANKS)
        for token in range(T)
        for slot in range(K)
        if int(ids_of(source)[token, slot]) == rank * LOCAL + expert
    ]


def dispatch(
    buffer: EmulatedAscendBuffer, rank: int, quant_mode: BufferQuantMode | None = None
) -> tuple[Tensor | tuple[Tensor, Tensor], list[int], NormalHandle]:
    ids = ids_of(rank)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, E)
    x, received_ids, received_weights, counts, handle, event = buffer.dispatch(
        rows_of(rank),
        num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=ids,
        topk_weights=weights_of(rank),
        quant_mode=quant_mode,
    )
    event.current_stream_wait()
    assert received_ids is not None
    assert received_weights is not None
    assert poison_mask(received_ids).all()
    assert poison_mask(received_weights).all()
    return x, counts, handle


def scaled(rows: Tensor, rank: int) -> Tensor:
    """Multiply the rows by their experts' numbers plus one."""
    experts = torch.tensor([rank * LOCAL + expert for expert, *_ in expected(rank)])
    result = rows.clone()
    result[: len(experts)] *= (experts + 1)[:, None]
    return result


def combined(rank: int) -> list[list[float]]:
    """Return the tokens that come back, expert by expert."""
    ids, weights, x = ids_of(rank), weights_of(rank), rows_of(rank)
    factors = [sum(float(weights[t, j]) * (int(ids[t, j]) + 1) for j in range(K) if int(ids[t, j]) >= 0) for t in range(T)]
    return [[factors[token] * value for value in numbers(x[token])] for token in range(T)]


def test_the_layout() -> None:
    ids = ids_of(0)
    per_rank, per_node, per_expert, in_rank, _ = EmulatedAscendBuffer(World(RANKS).group(0)).get_dispatch_layout(ids, E)
    assert per_node is None
    owners = [{int(value) // LOCAL for value in row if int(value) >= 0} for row in ids]
    assert [integers(row) for row in in_rank] == [[int(rank in row) for rank in range(RANKS)] for row in owners]
    assert integers(per_rank) == [sum(rank in row for row in owners) for rank in range(RANKS)]
    assert integers(per_expert) == [integers(ids).count(expert) for expert in range(E)]
    assert {per_rank.dtype, per_expert.dtype, in_rank.dtype} == {torch.int32}


def test_normal_rows_arrive_by_expert_and_come_back_weighted() -> None:
    world = World(RANKS)

    def body(rank: int) -> None:
        buffer = EmulatedAscendBuffer(world.group(rank))
        x, counts, handle = dispatch(buffer, rank)
        assert isinstance(x, Tensor)
        routes = expected(rank)
        assert x.shape == (len(routes), H)
        assert counts == [sum(route[0] == expert for route in routes) for expert in range(LOCAL)]
        for place, (_, source, token, _) in enumerate(routes):
            assert torch.equal(x[place], rows_of(source)[token])
        out, weights, _ = buffer.combine(scaled(x, rank), handle)
        assert weights is None
        for token, wanted in enumerate(combined(rank)):
            assert numbers(out[token]) == pytest.approx(wanted, rel=2e-2, abs=2e-2)

    world.run(body)


@pytest.mark.parametrize("mode", ["int8", "mx_fp8_e4m3"])
def test_payloads_by_parameter(mode: BufferQuantMode) -> None:
    world = World(RANKS)

    def body(rank: int) -> None:
        payload = dispatch(EmulatedAscendBuffer(world.group(rank)), rank, mode)[0]
        assert isinstance(payload, tuple)
        values, scales = payload
        for place, (_, source, token, _) in enumerate(expected(rank)):
            row = rows_of(source)[token]
            if mode == "int8":
                wanted, wanted_scale = quantized(numbers(row), 127)
                assert sum(abs(a - b) for a, b in zip(integers(values[place]), wanted, strict=True)) <= 1
                assert float(scales[place]) == pytest.approx(wanted_scale, rel=1e-5)
            else:
                power = [2.0 ** (byte - 127) for byte in integers(scales.view(torch.uint8)[place])]
                found = [float(values[place, column]) * power[column // 32] for column in range(H)]
                assert found == pytest.approx(numbers(row), abs=max(map(abs, numbers(row))) / 7)

    world.run(body)


@pytest.mark.parametrize("has_quant_mode", [True, False])
@pytest.mark.parametrize("mode", ["strict", "faithful"])
def test_payloads_by_environment(has_quant_mode: bool, mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library without the parameter has nothing else; with it, the environment still counts where nothing is said."""
    monkeypatch.setenv(ENVIRONMENT, "1")
    world = World(RANKS)

    def body(rank: int) -> bool:
        return isinstance(dispatch(EmulatedAscendBuffer(world.group(rank), mode, has_quant_mode=has_quant_mode), rank)[0], tuple)

    if has_quant_mode and mode == "strict":
        with pytest.raises(EmulatedMisuse) as caught:
            world.run(body)
        assert caught.value.reason is Reason.PAYLOAD_BY_ENVIRONMENT
    else:
        assert world.run(body) == [True] * RANKS
    with pytest.raises(TypeError, match="quant_mode"):
        dispatch(EmulatedAscendBuffer(World(1).group(0), has_quant_mode=False), 0, "bf16")


def test_combine_reads_its_handle_alone() -> None:
    world = World(RANKS)

    def body(mode: Mode, rank: int) -> Tensor:
        buffer = EmulatedAscendBuffer(world.group(rank), mode)
        x, _, handle = dispatch(buffer, rank)
        assert isinstance(x, Tensor)
        return buffer.combine(scaled(x, rank), handle, torch.zeros(T, K))[0]

    out = world.run(lambda rank: body("faithful", rank))
    assert numbers(out[0][2]) == pytest.approx(combined(0)[2], rel=2e-2, abs=2e-2)
    with pytest.raises(EmulatedMisuse) as caught:
        world.run(lambda rank: body("strict", rank))
    assert caught.value.reason is Reason.WEIGHTS_IGNORED


@pytest.mark.parametrize("payload", ["bf16", "int8", "mx"])
def test_low_latency_rows_are_the_first_of_a_bound(payload: str) -> None:
    world, most = World(RANKS), 8

    def body(rank: int) -> None:
        buffer = EmulatedAscendBuffer(world.group(rank))
        x, counts, handle, _, hook = buffer.low_latency_dispatch(
            rows_of(rank), ids_of(rank), most, E, use_fp8=payload != "bf16", use_ue8m0=payload == "mx"
        )
        hook()
        routes, bound = expected(rank), most * RANKS * min(LOCAL, K)
        assert integers(counts) == [sum(route[0] == expert for route in routes) for expert in range(LOCAL)]
        values = x if isinstance(x, Tensor) else x[0]
        assert values.shape == (bound, H)
        assert poison_mask(values[len(routes) :]).all()
        if payload == "int8":
            assert not isinstance(x, Tensor)
            assert x[1].shape == (bound,)
            for place, (_, source, token, _) in enumerate(routes):
                assert numbers(values[place] * x[1][place]) == pytest.approx(numbers(rows_of(source)[token]), abs=float(x[1][place]) * 0.51)
        elif payload == "mx":
            assert not isinstance(x, Tensor)
            assert (x[1].dtype, x[1].shape) == (torch.float8_e8m0fnu, (bound * H // 32,))
        else:
            out, _, _ = buffer.low_latency_combine(scaled(values, rank), ids_of(rank), weights_of(rank), handle)
            for token, wanted in enumerate(combined(rank)):
                assert numbers(out[token]) == pytest.approx(wanted, rel=2e-2, abs=2e-2)

    world.run(body)


def test_what_is_refused_and_what_is_misused() -> None:
    buffer = EmulatedAscendBuffer(World(1).group(0))
    x, ids, weights = rows_of(0), random_routes(0, T, K, E).long(), weights_of(0)
    with pytest.raises(EmulatedRefusal, match="int64"):
        buffer.low_latency_dispatch(x, ids.int(), 8, E)
    with pytest.raises(EmulatedRefusal, match="at most 4"):
        buffer.low_latency_dispatch(x, ids, 4, E)
    with pytest.raises(EmulatedRefusal, match="bf16"):
        buffer.low_latency_dispatch(x.half(), ids, 8, E)
    rows, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, 8, E, use_fp8=False)
    assert isinstance(rows, Tensor)
    for reason, given, other in ((Reason.OTHER_DISPATCH, rows, ids.flip(1)), (Reason.SHORT_ROWS, rows[:2], ids)):
        with pytest.raises(EmulatedMisuse) as caught:
            buffer.low_latency_combine(given, other, weights, handle)
        assert caught.value.reason is reason
    with pytest.raises(EmulatedRefusal, match="fp32"):
        buffer.low_latency_combine(rows, ids, weights.bfloat16(), handle)
    _, _, kept = dispatch(buffer, 0)
    with pytest.raises(NotImplementedError):
        buffer.dispatch(x, kept)
    with pytest.raises(AssertionError):
        buffer.dispatch(x, topk_idx=ids, topk_weights=weights)
