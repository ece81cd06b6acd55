"""What an experts class does between its two products, read from what it computes.

The function is traced into torch's own operators, and their expression is compared with that of each activation of this project. Equal expressions
are one formula; anything else stays the function that it is.
"""

import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Final, TypeAlias, cast

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from ...formats import GateUp, GateUpOrder, Interleaved, Ungated, UpGate
from ...runners import GatedActivation, GeluAndMul, GeluTanhAndMul, Relu2, SiluAndMul, SwigluClamped, SwigluOai, SwigluStep
from ...runners.activations import Activation

Function: TypeAlias = Callable[[Tensor], Tensor]
Expression: TypeAlias = tuple[object, ...]

_ATEN: Final = torch.ops.aten
# What only takes columns of the input: these are run on the numbers of the columns, so that every way to write "the even ones" is one leaf.
_VIEWS: Final[frozenset[object]] = frozenset(
    (
        operator.getitem,
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
    example = torch.zeros(_ROWS, width)
    try:
        with torch.no_grad():
            graph = make_fx(_plain(function))(example).graph
        return _read(graph, width)
    except Exception:  # what cannot be traced, for whatever reason of its own, is not known
        return None


def _plain(function: Function) -> Function:
    """Return a method as a function: the tracer counts the arguments of a method wrongly."""

    def call(rows: Tensor) -> Tensor:
        return function(rows)

    return call


def _read(graph: fx.Graph, width: int) -> Expression:
    """Return the expression of a graph's output."""
    columns: dict[fx.Node, object] = {}
    known: dict[fx.Node, Expression] = {}
    for node in graph.nodes:
        match node.op:
            case "placeholder":
                columns[node] = torch.arange(width).expand(_ROWS, width).contiguous()
            case "call_function" if node.target in _VIEWS and all(source in columns for source in node.all_input_nodes):
                columns[node] = _on_columns(node, columns)
            case "call_function":
                known[node] = _call(node, columns, known)
            case "output":
                (result,) = node.all_input_nodes
                return _operand(result, columns, known)
            case _:
                raise _Unreadable
    raise _Unreadable


def _on_columns(node: fx.Node, columns: Mapping[fx.Node, object]) -> object:
    if not callable(node.target) or node.kwargs:
        raise _Unreadable
    return node.target(*(columns[value] if isinstance(value, fx.Node) else value for value in node.args))


def _operand(value: object, columns: Mapping[fx.Node, object], known: Mapping[fx.Node, Expression]) -> Expression:
    if isinstance(value, fx.Node):
        if value in known:
            return known[value]
        numbers = columns[value]
        if not isinstance(numbers, Tensor) or numbers.dim() != 2 or not bool((numbers == numbers[:1]).all()):
            raise _Unreadable
        return ("columns", *(int(number) for number in numbers[0]))
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return ("fact", value)
    if isinstance(value, (int, float)):
        return ("number", float(value))
    raise _Unreadable


def _call(node: fx.Node, columns: Mapping[fx.Node, object], known: Mapping[fx.Node, Expression]) -> Expression:
    """Return one operator as an expression: silu written out, powers as products, products and sums in one order."""
    operands = [_operand(value, columns, known) for value in node.args]
    options = {name: _operand(value, columns, known) for name, value in node.kwargs.items()}
    match node.target, operands:
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
            return (str(node.target), *operands, *sorted(options.items(), key=repr))


def _product(*factors: Expression) -> Expression:
    flat = [part for factor in factors for part in (factor[1:] if factor[0] == "product" else (factor,))]
    return ("product", *sorted(flat, key=repr))


def _constants(expression: Expression) -> Iterator[float]:
    if expression[0] == "number" and isinstance(expression[1], float):
        yield expression[1]
    for part in expression:
        if isinstance(part, tuple):
            yield from _constants(cast("Expression", part))
