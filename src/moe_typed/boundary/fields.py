"""Read the annotations of a boundary class into specs that the code generator understands."""

import ast
import enum
import types
from collections.abc import Iterator, Sequence
from typing import Annotated, TypeAlias, TypeVar, Union, cast, final, get_args, get_origin, get_type_hints

import attrs
import torch
from jaxtyping import AbstractArray

from .annotations import Dim, Layout, Rename
from .describe import describe_annotation
from .errors import BoundaryDefinitionError

DEVICE = "device"  # what a nested boundary reports beside its dims, hence not the name of a dim
_ALLOWED_NODES = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.Name, ast.Load, ast.Constant, ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.USub)


@final
@attrs.frozen
class DimExpr:
    """One dim of a shape or one entry of a stride.

    ``text`` as written; ``tree`` is None for ``_``; ``name`` is set when the dim is a bare name.
    """

    text: str
    tree: ast.expr | None
    name: str | None

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names that the expression reads."""
        if self.tree is None:
            return ()
        return tuple(node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name))

    def divisions(self) -> Iterator[tuple[ast.expr, ast.expr]]:
        """Yield (dividend, divisor) of each division that must leave no remainder."""
        if self.tree is None:
            return
        for node in ast.walk(self.tree):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv) and not isinstance(node.left, ast.UnaryOp):
                yield node.left, node.right


@final
@attrs.frozen
class TensorSpec:
    """A tensor field."""

    dtypes: tuple[torch.dtype, ...]
    dims: tuple[DimExpr, ...]
    layout: Layout | None
    stride: tuple[DimExpr, ...]


@final
@attrs.frozen
class Held:
    """A type argument that a generic class holds in a field, as ``Routing[LocalIds]`` holds ``LocalIds`` in ``space``.

    The field of such a ``cls`` must be one of ``bounds``: a class below them, or, if ``instance``, an object of them.
    """

    cls: type
    field: str
    bounds: tuple[type, ...]
    instance: bool


@final
@attrs.frozen
class ClassSpec:
    """A field whose value must be an instance of one of some classes; boundaries among them bring their dims along."""

    classes: tuple[type, ...]
    rename: dict[str, str]
    dim: str | None
    nested: bool
    held: tuple[Held, ...]


@final
@attrs.frozen
class TypeObjectSpec:
    """A field that holds a class, ``type[LocalIds]``."""

    bounds: tuple[type, ...]


@final
@attrs.frozen
class OtherSpec:
    """Any other annotation: beartype decides."""

    hint: object


Spec: TypeAlias = TensorSpec | ClassSpec | TypeObjectSpec | OtherSpec


@final
@attrs.frozen
class Field:
    """One field of a boundary: its name, what was declared, and the spec to check."""

    name: str
    declared: str
    hint: object
    optional: bool
    spec: Spec


def parse_dim(text: str) -> DimExpr:
    """Parse one dim. Raises: BoundaryDefinitionError for anything but ``_``, names, integers and ``+ - * //``."""
    if text == "_":
        return DimExpr(text, None, None)
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError:
        raise BoundaryDefinitionError(f"dim {text!r} is not an expression over names and integers") from None
    for node in ast.walk(tree):
        if not isinstance(node, _ALLOWED_NODES) or (isinstance(node, ast.Constant) and type(node.value) is not int):
            raise BoundaryDefinitionError(f"dim {text!r} may hold names, integers and + - * // alone")
        if isinstance(node, ast.Name) and (node.id == DEVICE or node.id.startswith("_")):
            raise BoundaryDefinitionError(f"dim {text!r}: a name may not be {DEVICE!r}, nor begin with an underscore")
    return DimExpr(text, tree.body, tree.body.id if isinstance(tree.body, ast.Name) else None)


def _parse_dims(text: str) -> tuple[DimExpr, ...]:
    return tuple(parse_dim(part) for part in text.split())


def _torch_dtypes(names: object) -> tuple[torch.dtype, ...]:
    if not isinstance(names, (tuple, list)):  # Shaped, which takes any dtype
        return ()
    found = (getattr(torch, str(name), None) for name in cast("Sequence[object]", names))
    return tuple(dtype for dtype in found if isinstance(dtype, torch.dtype))


def _union_members(hint: object) -> tuple[object, ...]:
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(member for part in get_args(hint) for member in _union_members(part))
    if isinstance(hint, TypeVar):
        if hint.__constraints__:
            return tuple(hint.__constraints__)
        return _union_members(hint.__bound__ if hint.__bound__ is not None else object)
    return (hint,)


def _is_tensor_annotation(hint: object) -> bool:
    return isinstance(hint, type) and issubclass(hint, AbstractArray)


def _plain(cls: type) -> bool:
    """Say whether instances of a class can never be boundaries."""
    return cls.__module__ in ("builtins", "torch", "collections", "collections.abc") or issubclass(cls, (enum.Enum, torch.dtype, torch.device))


def _classes(hint: object) -> tuple[type, ...]:
    """Return the classes of a hint; nothing where it is not made of classes alone."""
    classes = tuple(get_origin(member) or member for member in _union_members(hint))
    return tuple(cls for cls in classes if isinstance(cls, type)) if all(isinstance(cls, type) for cls in classes) else ()


def _read_held(member: object) -> Iterator[Held]:
    """Yield what the arguments of a generic alias say beyond the bounds of its parameters."""
    origin = get_origin(member)
    if not isinstance(origin, type) or _plain(origin):
        return
    parameters: tuple[object, ...] = getattr(origin, "__parameters__", ())
    arguments = dict(zip(parameters, get_args(member), strict=False))
    for name, hint in get_type_hints(origin).items():
        parameter = get_args(hint)[0] if get_origin(hint) is type else hint
        if isinstance(parameter, TypeVar) and parameter in arguments:
            bounds = _classes(arguments[parameter])
            if bounds and bounds != _classes(parameter):
                yield Held(origin, name, bounds, hint is parameter)


def _read_tensor(hint: object, layout: Layout | None) -> TensorSpec:
    dim_text: str = getattr(hint, "dim_str")  # noqa: B009  jaxtyping makes these attributes on the class it returns
    names: object = getattr(hint, "dtypes")  # noqa: B009
    if getattr(hint, "array_type") is not torch.Tensor:  # noqa: B009
        raise BoundaryDefinitionError("only shapes of torch.Tensor can be checked")
    dtypes = _torch_dtypes(names)
    if not dtypes:
        raise BoundaryDefinitionError(f"torch has none of the dtypes {names}")
    dims = _parse_dims(dim_text)
    stride = _parse_dims(layout.stride) if layout is not None and layout.stride is not None else ()
    if stride and len(stride) != len(dims):
        raise BoundaryDefinitionError(f"layout stride {layout and layout.stride!r} has not as many entries as shape {dim_text!r}")
    return TensorSpec(dtypes, dims, layout, stride)


def _read_field(name: str, hint: object) -> Field:
    declared = describe_annotation(hint)
    metadata: tuple[object, ...] = ()
    inner = hint
    if get_origin(inner) is Annotated:
        inner, *rest = get_args(inner)
        metadata = tuple(rest)
    members = _union_members(inner)
    optional = type(None) in members
    members = tuple(member for member in members if member is not type(None))
    if len(members) == 1 and get_origin(members[0]) is Annotated:  # Annotated[...] | None
        wrapped, *rest = get_args(members[0])
        members, metadata = (wrapped,), tuple(rest)
    layouts = [item for item in metadata if isinstance(item, Layout)]
    if len(members) == 1 and _is_tensor_annotation(members[0]):
        return Field(name, declared, hint, optional, _read_tensor(members[0], layouts[0] if layouts else None))
    if layouts:
        raise BoundaryDefinitionError("Layout stands on what is not one tensor annotation")
    if any(map(_is_tensor_annotation, members)):
        raise BoundaryDefinitionError("a union of a tensor annotation with others binds no dims; name the dtypes in one annotation")
    if len(members) == 1 and get_origin(members[0]) is type:
        bounds = _union_members(get_args(members[0])[0])
        if all(isinstance(bound, type) for bound in bounds):
            return Field(name, declared, hint, optional, TypeObjectSpec(tuple(bound for bound in bounds if isinstance(bound, type))))
    classes = tuple(origin if isinstance(origin := get_origin(member), type) and not _plain(origin) else member for member in members)
    if all(isinstance(cls, type) for cls in classes):
        checked = tuple(cls for cls in classes if isinstance(cls, type))
        rename = {old: new for item in metadata if isinstance(item, Rename) for old, new in item.names.items()}
        dim = next((item.name for item in metadata if isinstance(item, Dim)), None)
        held = tuple(held for member in members for held in _read_held(member))
        return Field(name, declared, hint, optional, ClassSpec(checked, rename, dim, not all(_plain(cls) for cls in checked), held))
    return Field(name, declared, hint, optional, OtherSpec(hint))


def read_fields(cls: type) -> tuple[Field, ...]:
    """Return the fields of an attrs class in order.

    Raises: BoundaryDefinitionError naming the class and the field for an annotation that cannot be checked.
    """
    hints = get_type_hints(cls, include_extras=True)
    fields: list[Field] = []
    for attribute in attrs.fields(cls):
        try:
            fields.append(_read_field(attribute.name, hints[attribute.name]))
        except BoundaryDefinitionError as error:
            raise BoundaryDefinitionError(f"{cls.__qualname__}.{attribute.name}: {error}") from None
    return tuple(fields)
