"""What kind of class ``@boundary`` makes, in every debug mode, and which classes it refuses to make."""

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Annotated, ClassVar, Generic, TypeVar

import attrs
import numpy as np
import pytest
import torch
from attrs.exceptions import FrozenInstanceError
from jaxtyping import BFloat16, Float32, Shaped
from torch import Tensor

from moe_typed import BoundaryError, DebugLevel, debug
from moe_typed.boundary import BoundaryDefinitionError, Layout, boundaries, boundary, fields_of

T_co = TypeVar("T_co", covariant=True)


@boundary
class Base:
    kind: ClassVar[str] = "base"
    data: Float32[Tensor, "rows hidden"]
    scale: Float32[Tensor, " rows"]


@boundary
class Derived(Base):
    bias: Float32[Tensor, " hidden"] | None = None
    name: str = "none"
    factor: float = 1.0


@boundary
class Boxed(Generic[T_co]):
    value: T_co
    label: str = "box"


@pytest.fixture(params=list(DebugLevel), ids=lambda level: str(level.name))
def level(request: pytest.FixtureRequest) -> Iterator[DebugLevel]:
    level = DebugLevel(request.param)
    with debug(level):
        yield level


def values(rows: int = 2, hidden: int = 3) -> tuple[Tensor, Tensor]:
    return torch.arange(rows * hidden, dtype=torch.float32).view(rows, hidden), torch.ones(rows)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("name", ["data", "scale", "bias", "new"])
def test_nothing_can_be_assigned_or_deleted(name: str) -> None:
    made = Derived(*values())
    before = dict(vars(made))
    with pytest.raises(FrozenInstanceError):
        setattr(made, name, torch.zeros(1))
    with pytest.raises(FrozenInstanceError):
        delattr(made, name)
    assert vars(made) == before


@pytest.mark.usefixtures("level")
def test_equality_and_hash_are_those_of_the_object() -> None:
    data, scale = values()
    one, other = Base(data, scale), Base(data, scale)
    assert one == one
    assert one != other
    assert {one: 1, other: 2}[one] == 1


@pytest.mark.usefixtures("level")
def test_repr_is_the_layout() -> None:
    assert repr(Derived(*values())) == (
        "Derived(data=float32[2, 3] stride=(3, 1) cpu, scale=float32[2] stride=(1,) cpu, bias=None, name='none', factor=1.0)"
    )


def shallow(made: Derived) -> Derived:
    return copy.copy(made)


def deep(made: Derived) -> Derived:
    return copy.deepcopy(made)


def pickled(made: Derived) -> Derived:
    again: object = pickle.loads(pickle.dumps(made))
    assert isinstance(again, Derived)
    return again


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("make_again", [shallow, deep, pickled])
def test_copies_hold_the_same_values_and_stay_frozen(make_again: Callable[[Derived], Derived]) -> None:
    made = Derived(*values(), name="x")
    again = make_again(made)
    assert type(again) is Derived
    assert torch.equal(again.data, made.data)
    assert (again.bias, again.name, again.factor) == (None, "x", 1.0)
    with pytest.raises(FrozenInstanceError):
        setattr(again, "name", "y")  # noqa: B010  a checker refuses the statement


def test_evolve_makes_another_object_and_checks_it() -> None:
    made = Derived(*values())
    with debug("layout"):
        again = attrs.evolve(made, bias=torch.zeros(3))
        assert again.data is made.data
        with pytest.raises(BoundaryError, match="axis 0 is 4, expected hidden = 3"):
            attrs.evolve(made, bias=torch.zeros(4))
    assert made.bias is None


@pytest.mark.usefixtures("level")
def test_a_subscripted_class_constructs() -> None:
    made = Boxed[int](3)
    assert type(made) is Boxed
    assert (made.value, made.label) == (3, "box")


@pytest.mark.usefixtures("level")
def test_fields_come_base_first_and_take_keywords() -> None:
    data, scale = values()
    bias = torch.zeros(3)
    made = Derived(data, scale, bias, "n", 2.0)
    assert [field.name for field in fields_of(Derived)] == ["data", "scale", "bias", "name", "factor"]
    assert vars(made) == vars(Derived(factor=2.0, name="n", bias=bias, scale=scale, data=data))
    assert (made.kind, isinstance(made, Base)) == ("base", True)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("count", [0, 1, 6])
def test_a_wrong_number_of_arguments_is_a_type_error_that_names_the_class(count: int) -> None:
    def construct(build: Callable[..., object]) -> object:
        return build(*range(count))

    with pytest.raises(TypeError, match=r"Derived\.__init__"):
        construct(Derived)


def test_the_inherited_fields_are_checked_with_the_own_ones() -> None:
    data, _ = values()
    with debug("layout"), pytest.raises(BoundaryError) as caught:
        Derived(data, torch.ones(3), torch.zeros(3))
    assert (caught.value.boundary, caught.value.field) == ("Derived", "scale")


def test_boundaries_lists_classes_in_the_order_of_declaration() -> None:
    mine = [cls for cls in boundaries() if cls.__module__ == __name__]
    assert mine[:3] == [Base, Derived, Boxed]


# ---- classes that cannot be boundaries ---------------------------------------------------------------------------------------------


def with_factory() -> None:
    @boundary
    class Bad:
        x: list[int] = attrs.Factory(lambda: [0])


def with_mutable_default() -> None:
    @boundary
    class Bad:
        x: list[int] = []  # noqa: RUF012


def with_converter() -> None:
    @boundary
    class Bad:
        x: int = attrs.field(converter=int)


def with_validator() -> None:
    @boundary
    class Bad:
        x: int = attrs.field(validator=attrs.validators.instance_of(int))


def with_init_false() -> None:
    @boundary
    class Bad:
        x: int = attrs.field(default=1, init=False)


def with_keyword_only() -> None:
    @boundary
    class Bad:
        x: int = attrs.field(kw_only=True)


def with_private_name() -> None:
    @boundary
    class Bad:
        _x: int


def with_post_init() -> None:
    @boundary
    class Bad:
        x: int

        def __attrs_post_init__(self) -> None:
            raise AssertionError


def with_union_of_tensors() -> None:
    @boundary
    class Bad:
        x: Float32[Tensor, " n"] | BFloat16[Tensor, " n"]


def with_any_dtype() -> None:
    @boundary
    class Bad:
        x: Shaped[Tensor, " n"]


def with_numpy() -> None:
    @boundary
    class Bad:
        x: Float32[np.ndarray, " n"]


def with_layout_of_no_tensor() -> None:
    @boundary
    class Bad:
        x: Annotated[int, Layout(contiguous=True)]


def with_short_stride() -> None:
    @boundary
    class Bad:
        x: Annotated[Float32[Tensor, "a b"], Layout(stride="1")]


def with_ellipsis() -> None:
    @boundary
    class Bad:
        x: Float32[Tensor, "..."]


def with_star() -> None:
    @boundary
    class Bad:
        x: Float32[Tensor, "*batch n"]


def with_power() -> None:
    @boundary
    class Bad:
        x: Float32[Tensor, "n n**2"]


def with_call() -> None:
    @boundary
    class Bad:
        x: Float32[Tensor, "n abs(n)"]


def with_true_division() -> None:
    @boundary
    class Bad:
        x: Float32[Tensor, "n n/2"]


def with_bool() -> None:
    @boundary
    class Bad:
        x: Float32[Tensor, "True"]


def with_anonymous_name() -> None:
    @boundary
    class Bad:
        x: Float32[Tensor, "_rows"]


def with_dim_called_device() -> None:
    @boundary
    class Bad:
        x: Float32[Tensor, " device"]


def with_unbound_name() -> None:
    @boundary
    class Bad:
        x: Float32[Tensor, " n"]
        y: Float32[Tensor, "2*m"]


def with_unbound_stride() -> None:
    @boundary
    class Bad:
        x: Annotated[Float32[Tensor, "a b"], Layout(stride="c 1")]


@pytest.mark.parametrize(
    ("declare", "place", "reason"),
    [
        (with_factory, "Bad.x", "a default must be a plain value, not a factory"),
        (with_mutable_default, "Bad.x", "a default must be a plain value, not a factory"),
        (with_converter, "Bad.x", "takes no converter and no validator"),
        (with_validator, "Bad.x", "takes no converter and no validator"),
        (with_init_false, "Bad.x", "is a positional argument of the same name"),
        (with_keyword_only, "Bad.x", "is a positional argument of the same name"),
        (with_private_name, "Bad._x", "is a positional argument of the same name"),
        (with_post_init, "Bad", "a boundary runs no __attrs_post_init__; check_values is the place for checks"),
        (with_union_of_tensors, "Bad.x", "a union of a tensor annotation with others binds no dims; name the dtypes in one annotation"),
        (with_any_dtype, "Bad.x", "torch has none of the dtypes"),
        (with_numpy, "Bad.x", "only shapes of torch.Tensor can be checked"),
        (with_layout_of_no_tensor, "Bad.x", "Layout stands on what is not one tensor annotation"),
        (with_short_stride, "Bad.x", "layout stride '1' has not as many entries as shape 'a b'"),
        (with_ellipsis, "Bad.x", "dim '...' may hold names, integers and + - * // alone"),
        (with_star, "Bad.x", "dim '*batch'"),
        (with_power, "Bad.x", "dim 'n**2' may hold names, integers and + - * // alone"),
        (with_call, "Bad.x", "dim 'abs(n)' may hold names, integers and + - * // alone"),
        (with_true_division, "Bad.x", "dim 'n/2' may hold names, integers and + - * // alone"),
        (with_bool, "Bad.x", "dim 'True' may hold names, integers and + - * // alone"),
        (with_anonymous_name, "Bad.x", "a name may not be 'device', nor begin with an underscore"),
        (with_dim_called_device, "Bad.x", "a name may not be 'device', nor begin with an underscore"),
        (with_unbound_name, "Bad.y", "no field binds the dim 'm'"),
        (with_unbound_stride, "Bad.x", "no field binds the dim 'c'"),
    ],
    ids=lambda value: value.__name__.removeprefix("with_") if callable(value) else "",
)
def test_a_class_that_cannot_be_checked_is_refused_and_forgotten(declare: Callable[[], None], place: str, reason: str) -> None:
    known = boundaries()
    with debug("layout"), pytest.raises(BoundaryDefinitionError) as caught:
        declare()
    assert place in str(caught.value)
    assert reason in str(caught.value)
    assert boundaries() == known
    with debug("layout"):  # still works for all the others
        Base(*values())
