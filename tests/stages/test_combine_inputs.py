"""What goes back to the libraries: in which dtype, with how many dims, by whose routing."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moe_typed import LocalIds
from moe_typed.stages import (
    CombineInput,
    DeepEPNormalCombineInput,
    DeepEPv2ExpandedCombineInput,
    DeepEPv2PlainCombineInput,
    MoriCombineInput,
    MoriDispatchOutput,
    SlabCombineInput,
    SlabDispatchOutput,
)
from tests.stages.support import (
    CAPACITY,
    CASES,
    HIDDEN,
    LOCAL,
    PENDING,
    SLABS,
    Owner,
    changed,
    origin,
    random,
    refused,
    routes,
)


def combine_inputs(owner: Owner) -> list[CombineInput]:
    """Return one of each library."""
    made: list[CombineInput] = []
    rows = random(3, HIDDEN).bfloat16()
    for name in CASES:
        dispatched = CASES[name](owner).dispatched
        held, build = vars(dispatched), cls_of(dispatched.combine_input)
        if isinstance(dispatched, SlabDispatchOutput):
            made.append(build(random(LOCAL, CAPACITY, HIDDEN).bfloat16(), held["origin"], held["handle"]))
        elif isinstance(dispatched, MoriDispatchOutput):
            made.append(build(rows, held["origin"], held["handle"]))
        elif dispatched.combine_input is DeepEPNormalCombineInput:
            made.append(build(random(held["routing"].topk_ids.shape[0], HIDDEN).bfloat16(), held["routing"], held["handle"]))
        elif "handle" in held:
            made.append(build(rows, PENDING, held["handle"]))
    return made


def cls_of(cls: type[CombineInput]) -> Callable[..., CombineInput]:
    return cls


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e4m3fn])
def test_libraries_combine_bfloat16_alone(dtype: torch.dtype, owner: Owner) -> None:
    for made in combine_inputs(owner):
        hidden_states: Tensor = vars(made)["hidden_states"]
        error = refused(made, hidden_states=hidden_states.float().to(dtype))
        assert error.reason == f"dtype is {str(dtype).removeprefix('torch.')}, expected bfloat16"


def test_a_slab_comes_home_in_three_dims_and_all_else_in_two(owner: Owner) -> None:
    for made in combine_inputs(owner):
        hidden_states: Tensor = vars(made)["hidden_states"]
        other = hidden_states.flatten(0, 1) if hidden_states.dim() == 3 else hidden_states.unsqueeze(0)
        error = refused(made, hidden_states=other)
        assert error.field == "hidden_states"
        assert error.reason.startswith(f"has {other.dim()} dims, expected {hidden_states.dim()} (")


def test_a_slab_comes_home_contiguous(owner: Owner) -> None:
    made = [value for value in combine_inputs(owner) if issubclass(type(value), SlabCombineInput)]
    assert len(made) == len(SLABS)
    for value in made:
        hidden_states: Tensor = vars(value)["hidden_states"]
        error = refused(value, hidden_states=hidden_states.transpose(0, 1).contiguous().transpose(0, 1))
        assert error.reason.startswith("is not contiguous")


def test_results_of_deepep_are_as_many_as_its_rows(owner: Owner) -> None:
    made = next(value for value in combine_inputs(owner) if isinstance(value, DeepEPNormalCombineInput))
    assert refused(made, hidden_states=made.hidden_states[:-1]).reason == "axis 0 is 2, expected rows = 3"
    assert made.scaling is made.routing.scaling


def test_arenas_and_slabs_come_home_by_the_ranks_own_routing(owner: Owner) -> None:
    """Its rows are not those of the results."""
    for made in combine_inputs(owner):
        if "origin" in vars(made):
            assert issubclass(type(made), MoriCombineInput | SlabCombineInput)
            changed(made, origin=origin(7))
            assert refused(made, origin=routes(LocalIds, 3)).reason.startswith("holds space = LocalIds, expected PhysicalIds")


def test_the_other_two_settle_a_scaling(owner: Owner) -> None:
    made = [value for value in combine_inputs(owner) if isinstance(value, DeepEPv2PlainCombineInput | DeepEPv2ExpandedCombineInput)]
    assert len(made) == 3
    for value in made:
        assert refused(value, scaling=1.0).reason == "is of type float, expected RoutedScaling"
