"""The strict level: jaxtyping and beartype judge the same annotations that the generated checks were made from.

Slow (tens of microseconds an object) and not traceable, hence a second opinion and never the check itself. It cannot see what those
libraries have no word for: divisibility (``hidden//128`` floors there), strides, devices, and dims of nested boundaries.
"""

from collections.abc import Callable
from types import FunctionType, UnionType
from typing import Annotated, Final, ParamSpec, TypeVar, Union, cast, get_args, get_origin

from beartype import BeartypeConf, beartype
from jaxtyping import AbstractArray, AbstractDtype, TypeCheckError, jaxtyped  # pyright: ignore[reportUnknownVariableType]  its own annotations are partial
from torch import Tensor

from .errors import BoundaryError
from .fields import Field, TensorSpec, parse_dim

_Q = ParamSpec("_Q")
_R = TypeVar("_R")

_CHECKER = beartype(conf=BeartypeConf(is_color=False, is_pep484_tower=True))
_judged: Final[dict[Callable[..., object], Callable[..., object]]] = {}


def _bare(hint: object, blind: frozenset[str]) -> object:
    """Return a hint without our own metadata, which beartype does not know, and with ``_`` for each dim that reads a blind name."""
    if get_origin(hint) is Annotated:
        return _bare(get_args(hint)[0], blind)
    if get_origin(hint) in (Union, UnionType):
        members = tuple(_bare(member, blind) for member in get_args(hint))
        return cast("object", Union[members])  # noqa: UP007  the members are not known before
    if not blind or not _is_array(hint):
        return hint
    dims = (parse_dim(text) for text in str(getattr(hint, "dim_str")).split())  # noqa: B009  jaxtyping makes these attributes
    text = " ".join("_" if dim.name is None and not blind.isdisjoint(dim.names) else dim.text for dim in dims)
    family: type[AbstractDtype] = getattr(hint, "dtype")  # noqa: B009
    return cast("object", family[Tensor, text])


def _is_array(hint: object) -> bool:
    return isinstance(hint, type) and issubclass(hint, AbstractArray)


def _order(fields: tuple[Field, ...]) -> list[tuple[Field, frozenset[str]]]:
    """Return the fields so that each name is bound before an expression reads it: jaxtyping binds in parameter order.

    With each stand the names that cannot be: bound by a plain integer, or by a field that waits for this one in turn. jaxtyping is blind to these.
    """
    waiting = list(fields)
    bound: set[str] = set()
    ordered: list[tuple[Field, frozenset[str]]] = []
    while waiting:
        ready = next((field for field in waiting if _needs(field) <= bound), waiting[0])
        waiting.remove(ready)
        ordered.append((ready, frozenset(_needs(ready) - bound)))
        bound |= _binds(ready)
    return ordered


def _binds(field: Field) -> set[str]:
    """Return the names that a field binds whenever the object is built; one that may be None binds none for sure."""
    return set() if field.optional else _names(field)


def _names(field: Field) -> set[str]:
    return {dim.name for dim in field.spec.dims if dim.name is not None} if isinstance(field.spec, TensorSpec) else set()


def _needs(field: Field) -> set[str]:
    if not isinstance(field.spec, TensorSpec):
        return set()
    own = _names(field)
    return {name for dim in field.spec.dims if dim.name is None for name in dim.names} - own


def judge(function: Callable[_Q, _R]) -> Callable[_Q, _R]:
    """Return a function whose arguments and result beartype checks against its own annotations; each function is wrapped once."""
    wrapped = _judged.get(function)
    if wrapped is None:
        wrapped = _judged[function] = beartype(conf=BeartypeConf(is_color=False, is_pep484_tower=True, violation_type=BoundaryError))(function)
    return cast("Callable[_Q, _R]", wrapped)


def make_oracle(cls: type, fields: tuple[Field, ...]) -> Callable[[object], None]:
    """Return a function that raises BoundaryError when jaxtyping or beartype refuse an object of ``cls``.

    Classes among the fields are checked by identity of class alone: neither library looks at the arguments of a user's generic.
    """
    judged = _order(fields)
    parameters = ", ".join(field.name for field, _ in judged)
    scope: dict[str, FunctionType] = {}
    exec(f"def judge({parameters}): pass", {}, scope)  # noqa: S102  parameter names come from a class body
    judge = scope["judge"]
    judge.__annotations__ = {field.name: _bare(field.hint, blind) for field, blind in judged}
    judge.__qualname__ = f"{cls.__qualname__}.oracle"
    checked = jaxtyped(judge, typechecker=_CHECKER)

    def oracle(value: object) -> None:
        try:
            checked(**{field.name: getattr(value, field.name) for field, _ in judged})
        except TypeCheckError as error:
            raise BoundaryError(f"jaxtyping and beartype refuse it: {error}", boundary=cls.__qualname__) from None

    return oracle
