"""What the layout level refuses, and every part of what it says."""

import pickle
from abc import ABC
from collections.abc import Callable, Iterator
from typing import Annotated, Generic, Never, TypeVar, cast

import pytest
import torch
from jaxtyping import BFloat16, Float32, Int32
from torch import Tensor

from moe_typed import BoundaryError, DeviceCount, Fp8Block128ExpertWeights, Fp8Block128Rows, GateUp, LogicalIds, MxFp8Rows, Routing, Settled, debug
from moe_typed.boundary import E8M0, Dim, Floating, Layout, Rename, boundary

FP8, SCALE = torch.float8_e4m3fn, torch.float8_e8m0fnu


def refused(build: Callable[..., object], *values: object) -> BoundaryError:
    """Return the error of a construction, whatever checkers say of its arguments."""
    with debug("layout"), pytest.raises(BoundaryError) as caught:
        build(*values)
    return caught.value


def accepted(build: Callable[..., object], *values: object) -> object:
    with debug("layout"):
        return build(*values)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


class Kind(ABC):
    pass


class OtherKind(ABC):
    pass


K_co = TypeVar("K_co", bound=Kind, covariant=True)


class First(Kind):
    pass


class Second(Kind):
    pass


class Third(Kind):
    pass


@boundary
class Blocked:
    data: Float32[Tensor, "rows hidden"]
    scale: Float32[Tensor, "rows hidden//128"]


@boundary
class Halves:
    w13: Float32[Tensor, "2*inter"]
    w2: Float32[Tensor, " inter"]
    scale: Float32[Tensor, "2*(inter//128)"]


@boundary
class Ceiling:
    data: Float32[Tensor, " hidden"]
    scale: Float32[Tensor, "-(-hidden//128)"]


@boundary
class Columns:
    """Column-major scales, rows apart by one entry."""

    data: Float32[Tensor, "rows hidden"]
    scale: Annotated[Float32[Tensor, "rows groups"], Layout(stride="1 rows")]


@boundary
class Padded:
    scale: Annotated[Float32[Tensor, "rows groups"], Layout(stride="_ 1")]


@boundary
class Contiguous:
    data: Annotated[Float32[Tensor, "rows hidden"], Layout(contiguous=True)]


@boundary
class Aligned:
    data: Annotated[Float32[Tensor, " n"], Layout(align=16)]


@boundary
class Wanted:
    rows: Annotated[int, Dim("rows")]
    data: Float32[Tensor, " rows"]
    bias: Float32[Tensor, " rows"] | None = None


@boundary
class Plain(Generic[K_co]):
    flag: bool
    number: int
    ratio: float
    names: tuple[str, ...]
    either: type[First | OtherKind]
    kind: type[K_co]
    counts: list[int] | None = None


@boundary
class Names:
    """Fields and dims with the names that a code generator might use itself."""

    s: Float32[Tensor, "dims key"]
    dims: Float32[Tensor, "dims"]
    dev: Float32[Tensor, "size"]
    key: int
    size: int
    d: int
    fail: int
    len: int
    str: int
    type: int
    isinstance: int
    deep: int = 0


@boundary
class Inner:
    x: Float32[Tensor, "rows hidden"]


@boundary
class Outer:
    """Where rows mean the same in both, hidden of the second is another size."""

    first: Inner
    second: Annotated[Inner, Rename({"hidden": "width"})]
    scale: Float32[Tensor, "rows width//2"]


@boundary
class MaybeInner:
    inner: Inner | None
    x: Float32[Tensor, "rows"]


def plain(**changes: object) -> tuple[object, ...]:
    right: dict[str, object] = {"flag": True, "number": 1, "ratio": 0.5, "names": ("a",), "either": First, "kind": First, "counts": [1]}
    return tuple((right | changes).values())


# ---- the message, part by part -----------------------------------------------------------------------------------------------------


def test_a_message_says_what_was_declared_what_came_and_what_came_with_it() -> None:
    data, scale = torch.zeros(4, 256, dtype=FP8), torch.zeros(4, 8, dtype=SCALE)
    error = refused(Fp8Block128Rows, data, scale)
    assert error.boundary == "Fp8Block128Rows"
    assert error.field == "scale"
    assert error.reason == "dtype is float8_e8m0fnu, expected float32"
    assert error.declared == "Float32[Tensor, 'rows hidden//128'] with Layout(contiguous)"
    assert error.got == "float8_e8m0fnu[4, 8] stride=(8, 1) cpu"
    assert dict(error.bindings) == {"data": "float8_e4m3fn[4, 256] stride=(256, 1) cpu"}
    assert error.hint == "these values do satisfy MxFp8Rows"
    assert str(error).splitlines() == [
        "Fp8Block128Rows.scale: dtype is float8_e8m0fnu, expected float32",
        "  declared  scale: Float32[Tensor, 'rows hidden//128'] with Layout(contiguous)",
        "  got       float8_e8m0fnu[4, 8] stride=(8, 1) cpu",
        "  with      data=float8_e4m3fn[4, 256] stride=(256, 1) cpu",
        "  hint      these values do satisfy MxFp8Rows",
    ]


def test_an_error_is_a_type_error_that_survives_the_way_to_another_process() -> None:
    error = refused(Blocked, torch.zeros(2, 256), torch.zeros(2, 3))
    again: object = pickle.loads(pickle.dumps(error))
    assert isinstance(again, BoundaryError)
    assert isinstance(again, TypeError)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_no_hint_where_no_sibling_has_this_layout() -> None:
    assert refused(Fp8Block128Rows, torch.zeros(4, 256, dtype=FP8), torch.zeros(4, 3, dtype=SCALE)).hint == ""
    assert refused(Blocked, torch.zeros(1, 128), torch.zeros(1, 2)).hint == ""


def test_the_hint_for_a_layout_says_how_to_get_it() -> None:
    assert refused(Contiguous, torch.zeros(3, 2).T).hint == "copy it with .contiguous(), or take the format whose layout this is"


class Untouchable(Tensor):
    """A tensor that raises when its values are asked for."""


def touched(*_: object, **__: object) -> Never:
    raise AssertionError("a value was read")


for method in ("__repr__", "__str__", "__format__", "__bool__", "__float__", "__int__", "item", "tolist", "numpy", "cpu"):
    setattr(Untouchable, method, touched)


def untouchable(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype).as_subclass(Untouchable)


@boundary
class Listed:
    tensors: list[Tensor]
    table: dict[str, Tensor]
    n: int


def test_no_message_and_no_repr_reads_a_value() -> None:
    error = refused(Blocked, untouchable(4, 256), untouchable(4, 3))
    assert error.got == "float32[4, 3] stride=(3, 1) cpu"
    error = refused(Fp8Block128Rows, untouchable(4, 256, dtype=FP8), untouchable(4, 8, dtype=SCALE))
    assert error.hint == "these values do satisfy MxFp8Rows"
    assert repr(Blocked(untouchable(4, 256), untouchable(4, 2))) == (
        "Blocked(data=float32[4, 256] stride=(256, 1) cpu, scale=float32[4, 2] stride=(2, 1) cpu)"
    )
    error = refused(Listed, [untouchable(2)], {"a": untouchable(1)}, "n")
    assert error.bindings["tensors"] == "list(float32[2] stride=(1,) cpu)"
    assert error.bindings["table"] == "dict(tuple('a', float32[1] stride=(1,) cpu))"


def test_a_long_repr_is_cut() -> None:
    assert len(refused(Wanted, 2, "x" * 500).got) == 120


# ---- what is refused ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "values", "field", "reason"),
    [
        pytest.param(Blocked, (torch.zeros(2, 256), "x"), "scale", "is of type str, expected Float32[Tensor, 'rows hidden//128']", id="no tensor"),
        pytest.param(Blocked, (torch.zeros(2, 256), None), "scale", "is of type NoneType, expected Float32[Tensor, 'rows hidden//128']", id="none"),
        pytest.param(Blocked, (torch.zeros(2, 256).double(), torch.zeros(2, 2)), "data", "dtype is float64, expected float32", id="dtype"),
        pytest.param(Blocked, (torch.zeros(256), torch.zeros(2, 2)), "data", "has 1 dims, expected 2 (rows hidden)", id="rank"),
        pytest.param(Blocked, (torch.zeros(2, 256), torch.zeros(3, 2)), "scale", "axis 0 is 3, expected rows = 2", id="axis"),
        pytest.param(Blocked, (torch.zeros(2, 256), torch.zeros(2, 3)), "scale", "axis 1 is 3, expected hidden//128 = 2", id="symbolic axis"),
        pytest.param(Blocked, (torch.zeros(2, 200), torch.zeros(2, 1)), "scale", "hidden = 200 is not a multiple of 128", id="divisibility"),
        pytest.param(
            Halves,
            (torch.zeros(384), torch.zeros(192), torch.zeros(3)),
            "scale",
            "inter = 192 is not a multiple of 128",
            id="each half must divide, not both together",
        ),
        pytest.param(Halves, (torch.zeros(257), torch.zeros(128), torch.zeros(2)), "w13", "axis 0 is 257, expected 2*inter = 256", id="early use"),
        pytest.param(Ceiling, (torch.zeros(200), torch.zeros(1)), "scale", "axis 0 is 1, expected -(-hidden//128) = 2", id="ceiling"),
        pytest.param(Contiguous, (torch.zeros(3, 2).T,), "data", "is not contiguous: stride (1, 2) for shape [2, 3]", id="contiguity"),
        pytest.param(Columns, (torch.zeros(3, 8), torch.zeros(3, 2)), "scale", "stride of axis 0 is 2, expected 1", id="stride 0"),
        pytest.param(
            Columns,
            (torch.zeros(3, 8), torch.empty_strided((3, 2), (1, 4))),
            "scale",
            "stride of axis 1 is 4, expected rows = 3",
            id="stride 1",
        ),
        pytest.param(Aligned, (torch.zeros(9)[1:],), "data", "starts at an address that is not a multiple of 16 bytes", id="alignment"),
        pytest.param(Blocked, (torch.zeros(2, 128), meta(2, 1)), "scale", "is on meta, but the fields before it are on cpu", id="device"),
        pytest.param(Wanted, (3, torch.zeros(2)), "data", "axis 0 is 2, expected rows = 3", id="an int binds a dim"),
        pytest.param(Wanted, (True, torch.zeros(1)), "rows", "is of type bool, expected int with Dim(name='rows')", id="bool for a dim"),
        pytest.param(Wanted, (2, torch.zeros(2), torch.zeros(3)), "bias", "axis 0 is 3, expected rows = 2", id="optional"),
        pytest.param(
            Outer,
            (Inner(torch.zeros(2, 3)), Inner(torch.zeros(4, 6)), torch.zeros(2, 3)),
            "second",
            "has rows = 4 inside, but rows = 2 here",
            id="nested",
        ),
        pytest.param(
            Outer,
            (Inner(torch.zeros(2, 3)), Inner(torch.zeros(2, 6)), torch.zeros(2, 4)),
            "scale",
            "axis 1 is 4, expected width//2 = 3",
            id="renamed",
        ),
        pytest.param(
            Outer,
            (Inner(torch.zeros(2, 3)), Inner(torch.zeros(2, 7)), torch.zeros(2, 3)),
            "scale",
            "width = 7 is not a multiple of 2",
            id="renamed, divisibility",
        ),
        pytest.param(
            Outer,
            (Inner(meta(2, 3)), Inner(torch.zeros(2, 6)), torch.zeros(2, 3)),
            "second",
            "has device = cpu inside, but device = meta here",
            id="nested device",
        ),
        pytest.param(
            Outer,
            (Inner(meta(2, 3)), Inner(meta(2, 6)), torch.zeros(2, 3)),
            "scale",
            "is on cpu, but the fields before it are on meta",
            id="outer device",
        ),
        pytest.param(
            Outer, (torch.zeros(2, 3), Inner(torch.zeros(2, 6)), torch.zeros(2, 3)), "first", "is of type Tensor, expected Inner", id="no boundary"
        ),
        pytest.param(MaybeInner, (Inner(torch.zeros(2, 3)), torch.zeros(3)), "x", "axis 0 is 3, expected rows = 2", id="optional nested"),
        pytest.param(Plain, plain(number=True), "number", "is of type bool, expected int", id="bool for int"),
        pytest.param(Plain, plain(ratio=True), "ratio", "is of type bool, expected float", id="bool for float"),
        pytest.param(Plain, plain(flag=1), "flag", "is of type int, expected bool", id="int for bool"),
        pytest.param(Plain, plain(names=(1,)), "names", "is of type tuple, expected tuple[str, ...]", id="beartype"),
        pytest.param(Plain, plain(counts=["1"]), "counts", "is of type list, expected list[int] | None", id="beartype, optional"),
        pytest.param(Plain, plain(kind=Kind()), "kind", "is of type Kind, expected type[Kind]", id="an instance for a class"),
        pytest.param(Plain, plain(kind=OtherKind), "kind", "is OtherKind, expected type[Kind]", id="a class for another"),
        pytest.param(Plain, plain(either=Kind), "either", "is Kind, expected type[First | OtherKind]", id="a class for two others"),
    ],
)
def test_refused(build: Callable[..., object], values: tuple[object, ...], field: str, reason: str) -> None:
    error = refused(build, *values)
    assert (error.boundary, error.field, error.reason) == (build.__qualname__, field, reason)
    assert build(*values) is not None  # and without debug nothing is looked at


@pytest.mark.parametrize(
    ("build", "values"),
    [
        pytest.param(Blocked, (torch.zeros(0, 256), torch.zeros(0, 2)), id="no rows"),
        pytest.param(Blocked, (meta(2, 256), meta(2, 2)), id="meta"),
        pytest.param(Ceiling, (torch.zeros(200), torch.zeros(2)), id="ceiling"),
        pytest.param(Columns, (torch.zeros(3, 8), torch.empty_strided((3, 2), (1, 3))), id="column-major"),
        pytest.param(Columns, (torch.zeros(1, 8), torch.empty_strided((1, 2), (7, 1))), id="one row: its stride is free"),
        pytest.param(Columns, (torch.zeros(3, 8), torch.empty_strided((3, 1), (1, 9))), id="one group: its stride is free"),
        pytest.param(Columns, (torch.zeros(0, 8), torch.empty_strided((0, 2), (5, 5))), id="empty: strides are free"),
        pytest.param(Padded, (torch.zeros(4, 8)[:, :2],), id="a stride that takes any"),
        pytest.param(Contiguous, (torch.empty_strided((1, 4), (9, 1)),), id="contiguous but for a dim of one"),
        pytest.param(Aligned, (torch.zeros(9),), id="aligned"),
        pytest.param(Wanted, (2, torch.zeros(2), None), id="optional absent"),
        pytest.param(MaybeInner, (None, torch.zeros(3)), id="optional nested absent"),
        pytest.param(Outer, (Inner(torch.zeros(2, 3)), Inner(torch.zeros(2, 6)), torch.zeros(2, 3)), id="renamed"),
        pytest.param(Plain, plain(), id="plain"),
        pytest.param(Plain, plain(ratio=2), id="an int is a float to checkers too"),
        pytest.param(Plain, plain(counts=None, either=OtherKind), id="none, and the other class"),
        pytest.param(Names, (torch.zeros(2, 3), torch.zeros(2), torch.zeros(5), *range(9)), id="names that generated code uses"),
    ],
)
def test_accepted(build: Callable[..., object], values: tuple[object, ...]) -> None:
    accepted(build, *values)


def test_names_that_generated_code_uses_are_still_checked() -> None:
    assert refused(Names, torch.zeros(2, 3), torch.zeros(4), torch.zeros(5), *range(8)).reason == "axis 0 is 4, expected dims = 2"
    assert Names(torch.zeros(2, 3), torch.zeros(2), torch.zeros(5), *range(8)).d == 2


def test_a_dim_that_only_an_absent_field_binds_is_said_to_be_missing() -> None:
    error = refused(Optionals, None, torch.zeros(4))
    assert error.reason == "needs the dim n, which no field that is present binds"
    accepted(Optionals, torch.zeros(2), torch.zeros(4))
    assert refused(Optionals, torch.zeros(3), torch.zeros(4)).reason == "axis 0 is 4, expected 2*n = 6"


@boundary
class Optionals:
    a: Float32[Tensor, " n"] | None
    b: Float32[Tensor, "2*n"]


@boundary
class OptionalDim:
    n: Annotated[int, Dim("n")] | None
    x: Float32[Tensor, " n"] | None


@boundary
class HoldsOptionalDim:
    inner: OptionalDim
    y: Float32[Tensor, " n"]


def test_an_absent_int_binds_nothing() -> None:
    accepted(HoldsOptionalDim, OptionalDim(None, None), torch.zeros(3))
    accepted(HoldsOptionalDim, OptionalDim(None, torch.zeros(3)), torch.zeros(3))
    assert refused(HoldsOptionalDim, OptionalDim(4, None), torch.zeros(3)).reason == "axis 0 is 3, expected n = 4"


@boundary
class Quotient:
    x: Float32[Tensor, "n g"]
    y: Float32[Tensor, "n//g"]


def test_a_divisor_of_zero_is_an_error_of_the_boundary() -> None:
    accepted(Quotient, torch.zeros(6, 3), torch.zeros(2))
    assert refused(Quotient, torch.zeros(6, 0), torch.zeros(2)).reason == "n = 6 is not a multiple of 0"


@boundary
class SeveralDtypes:
    x: Floating[Tensor, " n"]
    y: E8M0[Tensor, " n"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_one_name_may_stand_for_several_dtypes(dtype: torch.dtype) -> None:
    scale = torch.zeros(2, dtype=torch.uint8).view(SCALE)
    accepted(SeveralDtypes, torch.zeros(2, dtype=dtype), scale)
    for other in (torch.float64, FP8, SCALE):
        reason = refused(SeveralDtypes, torch.empty(2, dtype=other), scale).reason
        assert reason == f"dtype is {str(other).removeprefix('torch.')}, expected bfloat16 or float16 or float32"


def test_the_weights_of_an_expert_whose_halves_do_not_divide_are_refused() -> None:
    def weights(inter: int, blocks: int) -> tuple[object, ...]:
        return (
            torch.empty(2, 2 * inter, 128, dtype=FP8),
            torch.empty(2, 128, inter, dtype=FP8),
            torch.ones(2, blocks, 1),
            torch.ones(2, 1, inter // 128),
            GateUp,
        )

    accepted(Fp8Block128ExpertWeights, *weights(256, 4))
    error = refused(Fp8Block128ExpertWeights, *weights(192, 3))  # 2 * 192 = 384 does divide by 128
    assert (error.field, error.reason) == ("w13_scale", "inter = 192 is not a multiple of 128")


def test_a_count_on_another_device_than_the_ids_is_refused() -> None:
    ids, weights = torch.zeros(2, 1, dtype=torch.int32), torch.zeros(2, 1)
    count = DeviceCount(torch.empty(1, dtype=torch.int32, device="meta"))
    error = refused(Routing, ids, weights, LogicalIds, 4, Settled(), True, count)
    assert (error.field, error.reason) == ("topk_ids", "is on cpu, but the fields before it are on meta")


@pytest.fixture
def late_kind() -> Iterator[type[Inner]]:
    """A class declared after the checks that name its base were generated."""
    with debug("layout"):

        @boundary
        class Late(Inner):
            pass

        yield Late


def test_a_class_declared_after_its_base_was_checked_is_accepted(late_kind: Callable[[Tensor], object]) -> None:
    late = late_kind(torch.zeros(2, 3))
    accepted(MaybeInner, late, torch.zeros(2))
    assert refused(MaybeInner, late, torch.zeros(3)).reason == "axis 0 is 3, expected rows = 2"


@boundary
class Narrow:
    x: BFloat16[Tensor, "rows 4"]
    n: Int32[Tensor, ""]


def test_a_number_and_a_scalar() -> None:
    accepted(Narrow, meta(2, 4, dtype=torch.bfloat16), meta(dtype=torch.int32))
    assert refused(Narrow, meta(2, 5, dtype=torch.bfloat16), meta(dtype=torch.int32)).reason == "axis 1 is 5, expected 4"
    assert refused(Narrow, meta(2, 4, dtype=torch.bfloat16), meta(1, dtype=torch.int32)).reason == "has 1 dims, expected 0 ()"


def test_formats_that_share_a_dtype_are_told_apart_by_their_groups() -> None:
    data = torch.zeros(4, 128, dtype=FP8)
    assert refused(MxFp8Rows, data, torch.zeros(4, 1)).hint == "these values do satisfy Fp8Block128Rows and Fp8Block128ColumnRows"
    assert refused(MxFp8Rows, data, torch.zeros(4, 1, dtype=SCALE)).reason == "axis 1 is 1, expected hidden//32 = 4"


def test_a_nested_object_that_was_built_wrong_while_debug_was_off_is_refused_for_its_own_fault() -> None:
    error = refused(MaybeInner, Inner(torch.zeros(3)), torch.zeros(3))
    assert (error.boundary, error.field, error.reason) == ("Inner", "x", "has 1 dims, expected 2 (rows hidden)")
    wrong = cast("Callable[[object], object]", Inner)(None)
    assert refused(MaybeInner, wrong, torch.zeros(3)).reason == "is of type NoneType, expected Float32[Tensor, 'rows hidden']"


@boundary
class Holder(Generic[K_co]):
    kind: type[K_co]


@boundary
class Box(Generic[K_co]):
    content: K_co


@boundary
class Demands:
    """Type arguments that a generic class holds in its fields are checked like fields of one's own."""

    holder: Holder[First] | None
    box: Box[First | Second] | Holder[Second]


@pytest.mark.parametrize(
    ("holder", "box", "field", "reason"),
    [
        (Holder(Second), Box(First()), "holder", "holds kind = Second, expected First"),
        (Holder(First), Box(Third()), "box", "holds content = Third, expected First or Second"),
        (Holder(First), Holder(First), "box", "holds kind = First, expected Second"),
        (cast("Callable[..., object]", Holder)(3), Box(First()), "holder", "holds kind = no class, expected First"),
    ],
)
def test_the_arguments_of_a_nested_generic_are_checked(holder: object, box: object, field: str, reason: str) -> None:
    error = refused(Demands, holder, box)
    assert (error.field, error.reason) == (field, reason)


@pytest.mark.parametrize("box", [Box(First()), Box(Second()), Holder(Second)])
@pytest.mark.parametrize("holder", [Holder(First), None])
def test_the_right_arguments_are_accepted(holder: object, box: object) -> None:
    accepted(Demands, holder, box)
