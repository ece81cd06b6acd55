"""The standard variant and flat rows: what crosses, what is kept, and what does not fit together."""

from collections.abc import Callable

import pytest
import torch

from moe_typed import (
    Bf16Rows,
    BoundaryError,
    DeviceCount,
    Fp32Rows,
    LocalIds,
    LocalSinkIds,
    LogicalIds,
    Pending,
    PhysicalIds,
    Routing,
    Settled,
    StandardCombineInput,
    StandardDispatcher,
    StandardDispatchOutput,
    debug,
    fp32_as_is,
    from_topk,
    quantize_mxfp8,
)
from moe_typed.routing import Ids, RoutedScaling
from moe_typed.runners.flat_rows import standard_pre
from moe_typed.runners.posts import standard_post
from moe_typed.stages import FlatRowsInput, StandardCarry, SummedRowsOutput


def routing(rows: int = 2, scaling: RoutedScaling | None = None, live: int | DeviceCount | None = None) -> Routing[LocalIds]:
    ids, weights = torch.zeros(rows, 1, dtype=torch.int32), torch.ones(rows, 1)
    return Routing(ids, weights, LocalIds, 4, scaling or Settled(), True, rows if live is None else live)


def test_dispatch_hands_the_same_rows_on_and_makes_ids_local() -> None:
    rows = Fp32Rows(torch.zeros(2, 4))
    with debug("strict"):
        dispatched = StandardDispatcher(fp32_as_is).dispatch(rows, from_topk(torch.tensor([[0], [-1]], dtype=torch.int32), torch.ones(2, 1), 4))
    assert dispatched.payload is rows
    assert dispatched.routing.space is LocalIds
    assert torch.equal(dispatched.routing.topk_ids, torch.tensor([[0], [-1]], dtype=torch.int32))
    assert dispatched.combine_input is StandardCombineInput


def test_a_dispatcher_says_what_it_sends() -> None:
    dispatcher = StandardDispatcher(quantize_mxfp8)
    assert dispatcher.variant is StandardDispatchOutput
    assert dispatcher.payload is quantize_mxfp8.target


def test_with_payload_changes_the_payload_alone() -> None:
    dispatched = StandardDispatchOutput(Fp32Rows(torch.zeros(2, 4)), routing())
    other = Bf16Rows(torch.zeros(2, 4, dtype=torch.bfloat16))
    again = dispatched.with_payload(other)
    assert again.payload is other
    assert again.routing is dispatched.routing


def test_pre_and_post_carry_the_scaling_past_the_runner() -> None:
    scaling = Pending(2.5)
    with debug("strict"):
        dispatched = StandardDispatchOutput(Fp32Rows(torch.zeros(2, 4)), routing(scaling=scaling))
        runner_input, carry = standard_pre(dispatched)
        assert runner_input.payload is dispatched.payload
        assert runner_input.routing is dispatched.routing
        hidden_states = torch.ones(2, 4)
        combined = standard_post(SummedRowsOutput(hidden_states), carry)
    assert type(carry) is StandardCarry
    assert combined.hidden_states is hidden_states
    assert combined.scaling is scaling
    assert torch.equal(StandardDispatcher(fp32_as_is).combine(combined), torch.full((2, 4), 2.5))


@pytest.mark.parametrize("build", [StandardDispatchOutput, FlatRowsInput])
def test_rows_and_routes_of_different_batches_do_not_fit(build: type[StandardDispatchOutput[Fp32Rows] | FlatRowsInput]) -> None:
    with debug("layout"), pytest.raises(BoundaryError) as caught:
        build(Fp32Rows(torch.zeros(3, 4)), routing(2))
    assert (caught.value.boundary, caught.value.field) == (build.__qualname__, "routing")
    assert caught.value.reason == "has rows = 2 inside, but rows = 3 here"


@pytest.mark.parametrize("build", [StandardDispatchOutput, FlatRowsInput])
def test_rows_and_routes_on_different_devices_do_not_fit(build: type[StandardDispatchOutput[Fp32Rows] | FlatRowsInput]) -> None:
    with debug("layout"), pytest.raises(BoundaryError, match="has device = cpu inside, but device = meta here"):
        build(Fp32Rows(torch.zeros(2, 4, device="meta")), routing(2))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn, torch.int32])
def test_results_come_in_a_dtype_that_models_compute_in(dtype: torch.dtype) -> None:
    with debug("layout"), pytest.raises(BoundaryError, match="expected bfloat16 or float16 or float32"):
        SummedRowsOutput(torch.zeros(2, 4).to(dtype))


@pytest.mark.parametrize("space", [LogicalIds, PhysicalIds, LocalSinkIds])
@pytest.mark.parametrize("build", [StandardDispatchOutput, FlatRowsInput])
def test_ids_of_another_space_are_refused_even_where_they_are_in_range(build: Callable[..., object], space: type[Ids]) -> None:
    ids, weights = torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1)
    other = Routing(ids, weights, space, 4, Settled(), True, 2)
    with debug("layout"), pytest.raises(BoundaryError) as caught:
        build(Fp32Rows(torch.zeros(2, 4)), other)
    assert caught.value.field == "routing"
    assert caught.value.reason == f"holds space = {space.__name__}, expected LocalIds"
    assert caught.value.declared == "Routing[LocalIds, RoutedScaling]"
