"""What an experts class does between its two products, read from what it computes.

The function is run once, and the operators of torch that it calls are read as an expression, which is compared with that of each activation of this
project. Equal expressions are one formula; anything else stays the function that it is.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, TypeAlias, cast, final

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from ...formats import GateUp, GateUpOrder, Interleaved, Ungated, UpGate
from ...runners import GatedActivation, GeluAndMul, GeluTanhAndMul, Relu2, SiluAndMul, SwigluClamped, SwigluOai, SwigluStep
from ...runners.activations import Activation

Function: TypeAlias = Callable[[Tensor], Tensor]
Expression: TypeAlias = tuple[object, ...]

_ATEN: Final = torch.ops.aten
# What only takes columns of the input: these are run on the numbers of the columns, so that every way to write "the even ones" is one leaf.
_VIEWS: Final[frozenset[object]] = frozenset(
    (
        _ATEN.slice.Tensor,
        _ATEN.split.Tensor,
        _ATEN.split_with_sizes.default,
        _ATEN.select.int,
        _ATEN.view.default,
        _ATEN.unbind.int,
        _ATEN.alias.default,
    )
)
_ROWS, _INTER = 3, 4
_ORDERS: Final[Mapping[type[GateUpOrder], tuple[tuple[int, ...], tuple[int, ...]]]] = MappingProxyType(
    {
        GateUp: (tuple(range(_INTER)), tuple(range(_INTER, 2 * _INTER))),
        UpGate: (tuple(range(_INTER, 2 * _INTER)), tuple(range(_INTER))),
        Interleaved: (tuple(range(0, 2 * _INTER, 2)), tuple(range(1, 2 * _INTER, 2))),
    }
)


class _Unreadable(Exception):  # noqa: N818  it says that reading ends, and no caller sees it
    """Say that an operator has no place in an expression."""


def recognise(function: Function, *, gated: bool) -> tuple[Activation, type[GateUpOrder]] | None:
    """Return the activation that ``function`` is, and the order of the rows that it takes; None where its formula is not one of ours.

    ``function``: from (rows, 2 * inter), or (rows, inter) without a gate, to (rows, inter). It is called once, on a few float32 rows on the CPU.
    """
    expression = _expression(function, 2 * _INTER if gated else _INTER)
    if expression is None:
        return None
    if not gated:
        relu2 = Relu2()
        return (relu2, Ungated) if expression == _expression(lambda rows: relu2.activate(rows, Ungated), _INTER) else None
    constants = tuple(dict.fromkeys(_constants(expression)))
    for order in _ORDERS:
        for activation in _candidates(constants):
            if expression == _expected(activation, order):
                return activation, order
    return None


def _candidates(constants: tuple[float, ...]) -> Iterator[GatedActivation]:
    """Yield every activation whose parameters are among the constants of an expression."""
    yield from (SiluAndMul(), GeluAndMul(), GeluTanhAndMul())
    limits = [value for value in constants if value > 0]
    for limit in limits:
        yield from (SwigluClamped(limit), SwigluStep(limit), SwigluOai(1.0, limit))
        yield from (SwigluOai(alpha, limit) for alpha in limits)


@functools.lru_cache(maxsize=256)
def _expected(activation: GatedActivation, order: type[GateUpOrder]) -> Expression | None:
    return _expression(lambda rows: activation.activate(rows, order), 2 * _INTER)


def _expression(function: Function, width: int) -> Expression | None:
    rows = torch.zeros(_ROWS, width)
    read = _Read(rows)
    try:
        with torch.no_grad(), _Reader(read):
            result = function(rows)
        return read.expression_of(result)
    except Exception:  # what cannot be read, for whatever reason of its own, is not known
        return None


_Place: TypeAlias = tuple[int, torch.Size, tuple[int, ...]]


def _place(tensor: Tensor) -> _Place:
    """Return where a tensor lies, and how: what it is known by, while all tensors are kept."""
    return tensor.data_ptr(), tensor.shape, tensor.stride()


@final
class _Read:
    """The expressions of the tensors that operators have made of the columns of ``rows``. All raise _Unreadable for what is none."""

    def __init__(self, rows: Tensor) -> None:
        self._kept = [rows]
        self._columns = {_place(rows): torch.arange(rows.shape[1]).expand(rows.shape).contiguous()}
        self._known: dict[_Place, Expression] = {}

    def add(self, operator: OpOverload, args: Sequence[object], options: Mapping[str, object], result: object) -> None:
        """Take what an operator that writes to none of its arguments has returned."""
        made = _tensors(result)
        self._kept += made
        columns = self._columns.get(_place(args[0])) if args and isinstance(args[0], Tensor) else None
        if operator in _VIEWS and columns is not None:
            taken = _tensors(operator(columns, *args[1:], **options))
            self._columns.update(zip(map(_place, made), taken, strict=True))
            return
        if not isinstance(result, Tensor):
            raise _Unreadable  # a number that the function may choose by, or several results
        named = {name: self._operand(value) for name, value in options.items()}
        self._known[_place(result)] = _call(operator, [self._operand(value) for value in args], named)

    def expression_of(self, tensor: Tensor) -> Expression:
        """Return the expression of a tensor."""
        place = _place(tensor)
        if place in self._known:
            return self._known[place]
        numbers = self._columns.get(place)
        if numbers is None or numbers.dim() != 2 or not bool((numbers == numbers[:1]).all()):
            raise _Unreadable
        return ("columns", *(int(number) for number in numbers[0]))

    def _operand(self, value: object) -> Expression:
        if isinstance(value, Tensor):
            return self.expression_of(value)
        if isinstance(value, bool) or value is None or isinstance(value, str):
            return ("fact", value)
        if isinstance(value, (int, float)):
            return ("number", float(value))
        raise _Unreadable


def _tensors(result: object) -> list[Tensor]:
    results = cast("Sequence[object]", result if isinstance(result, (list, tuple)) else (result,))
    return [each for each in results if isinstance(each, Tensor)]


@final
class _Reader(TorchDispatchMode):
    """Let every operator that this thread calls be read. Raises: _Unreadable for one that writes to a tensor: it is no longer what was read of it."""

    def __init__(self, read: _Read) -> None:
        cast("Callable[[], None]", super().__init__)()  # pyright: ignore[reportUnknownMemberType]  torch types it by halves
        self._read = read

    @override
    def __torch_dispatch__(self, func: OpOverload, types: object, args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None) -> object:
        if func._schema.is_mutable:  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]  torch has no other name for it
            raise _Unreadable
        options = kwargs or {}
        result: object = func(*args, **options)
        self._read.add(func, args, options, result)
        return result


def _call(operator: OpOverload, operands: list[Expression], options: Mapping[str, Expression]) -> Expression:
    """Return one operator as an expression: silu written out, powers as products, products and sums in one order."""
    match operator, operands:
        case _ATEN.mul.Tensor, [first, second]:
            return _product(first, second)
        case _ATEN.add.Tensor, [first, second] if not options:
            return ("sum", *sorted((first, second), key=repr))
        case _ATEN.silu.default, [value]:
            return _product(value, ("sigmoid", value))
        case _ATEN.sigmoid.default, [value]:
            return ("sigmoid", value)
        case _ATEN.pow.Tensor_Scalar, [value, ("number", 2.0)]:
            return _product(value, value)
        case _:
            return (str(operator), *operands, *sorted(options.items(), key=repr))


def _product(*factors: Expression) -> Expression:
    flat = [part for factor in factors for part in (factor[1:] if factor[0] == "product" else (factor,))]
    return ("product", *sorted(flat, key=repr))


def _constants(expression: Expression) -> Iterator[float]:
    if expression[0] == "number" and isinstance(expression[1], float):
        yield expression[1]
    for part in expression:
        if isinstance(part, tuple):
            yield from _constants(cast("Expression", part))
