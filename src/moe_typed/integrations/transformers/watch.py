"""What a layer was made of beside tensors: the function between the products, and what it read of its module."""

from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Final, cast, final

import attrs
from torch import nn

from ...runners.activations import Activation

GATE: Final = "_apply_gate"  # what the decorator of transformers gives every class that has none of its own
_PLAIN: Final = (bool, int, float, str, type(None))
_FUNCTIONS: Final = (FunctionType, BuiltinFunctionType)
_FRAMEWORK: Final = frozenset(vars(nn.Module())) - {"training"}


@final
class UnwatchableError(Exception):
    """Say that a function read something whose changes cannot be seen."""


@final
@attrs.frozen(eq=False)
class Fact:
    """An attribute as it was read."""

    owner: nn.Module | None
    name: str
    value: object

    def holds(self, module: nn.Module) -> bool:
        """Say whether the attribute is what it was; ``module``: whose it is where there is no owner."""
        now: object = getattr(self.owner or module, self.name, self)
        return now is self.value or (type(now) in _PLAIN and now == self.value)


@final
@attrs.frozen(eq=False)
class Watch:
    """What must stay as it is for an activation to be the module's.

    ``gate``: the function of its gate, None without one. ``owner``: the id of the module that the activation itself calls, None if it calls none.
    """

    gate: object
    owner: int | None
    facts: tuple[Fact, ...]

    def holds(self, module: nn.Module, *, compiling: bool = False) -> bool:
        """Say whether all is as it was. ``compiling``: look at attributes alone, which dynamo guards."""
        if not compiling and (gate_of(module) is not self.gate or self.owner not in (None, id(module))):
            return False
        for fact in self.facts:  # noqa: SIM110  in every forward, where a generator would cost as much again
            if not fact.holds(module):
                return False
        return True


def gate_of(module: nn.Module) -> object:
    """Return the function of a module's gate, which its class has unless it was given one of its own."""
    return vars(module).get(GATE) or getattr(type(module), GATE, None)


def attribute(module: nn.Module, name: str) -> Iterator[Fact]:
    """Yield an attribute and, where it is a module, what is in it.

    Raises: UnwatchableError for a value of another kind, and for a module that has others inside.
    """
    value: object = getattr(module, name)
    if isinstance(value, nn.Module):
        if next(value.children(), None) is not None:
            raise UnwatchableError
        yield Fact(None, name, value)
        yield from (Fact(value, each, held) for each, held in vars(value).items() if each not in _FRAMEWORK and type(held) in (*_PLAIN, *_FUNCTIONS))
    elif isinstance(value, (*_PLAIN, *_FUNCTIONS, Activation)):
        yield Fact(None, name, value)
    else:
        raise UnwatchableError


def stand_in(module: nn.Module) -> tuple[nn.Module, set[str]]:
    """Return a module that has all that another has, and the names that are read of it from then on."""
    kind, names = type(module), set[str]()

    def read(self: nn.Module, name: str) -> object:
        names.add(name)
        return cast("Callable[[nn.Module, str], object]", kind.__getattribute__)(self, name)

    twin = cast("nn.Module", object.__new__(type(kind.__name__, (kind,), {"__getattribute__": read})))
    object.__getattribute__(twin, "__dict__").update(vars(module))
    return twin, names


def facts_of(module: nn.Module, names: set[str]) -> tuple[Fact, ...]:
    """Return the attributes of those that were read: not methods of the class, and not tensors, which are watched apart.

    Raises: UnwatchableError for a value of another kind.
    """
    found: list[Fact] = []
    for name in sorted(names):
        if name.startswith("__") or name in _FRAMEWORK or name in vars(module).get("_parameters", ()) or name in vars(module).get("_buffers", ()):
            continue
        if isinstance(getattr(module, name, None), MethodType):
            continue
        found += attribute(module, name)
    return tuple(found)
