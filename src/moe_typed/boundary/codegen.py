"""Generate the straight-line checks of a boundary class.

Straight-line code costs about a microsecond for four tensors and traces under ``torch.compile(fullgraph=True)``; a memo of jaxtyping's costs
thirty times that and does not trace. Two passes: bare names and integers of every field bind first, so that ``2*inter`` may stand before the
field that binds ``inter``; expressions and strides follow. Fields that may be None come last in each pass.

A class without nested boundaries keeps its dims in local variables. One with nested boundaries keeps them in a dict that starts with theirs.
Field ``x`` is the local ``v_x`` and dim ``n`` the local ``D_n``, so that no field or dim can hide a name that generated code uses. Sizes
stand in f-strings, which dynamo traces where they are symbolic; it does not trace ``str`` of them.
"""

import ast
from collections.abc import Callable, Iterable
from typing import final

from typing_extensions import override

from .errors import BoundaryDefinitionError
from .fields import DEVICE, ClassSpec, DimExpr, Field, OtherSpec, TensorSpec, TypeObjectSpec


def _local(field: Field) -> str:
    """Return the local variable that holds a field's value in generated code."""
    return f"v_{field.name}"


@final
class CheckWriter:
    """Write the source of one class's ``check`` and ``dims`` functions, and the constants they need."""

    def __init__(self, cls: type, fields: tuple[Field, ...], known: Iterable[type], constant: Callable[[object], str]) -> None:
        self._cls = cls
        self._known = tuple(known)
        self._fields = sorted(fields, key=lambda field: field.optional)
        self._all = fields
        self._constant = constant
        self._nested = any(isinstance(field.spec, ClassSpec) and field.spec.nested for field in fields)
        self._alone = not self._nested and sum(isinstance(field.spec, TensorSpec) for field in fields) == 1  # no device to compare with
        self._lines: list[str] = []
        self._late: list[str] = []
        self._definite: set[str] = set()
        self._possible: set[str] = set()
        self._values = "(" + "".join(f"{_local(field)}, " for field in fields) + ")"
        self._me = constant(cls)

    def write(self, name: str) -> str:
        """Return the source of ``def <name>(self, <fields>)``, which raises through ``fail``, and of ``<name>_dims(self)``."""
        for field in self._fields:
            if isinstance(field.spec, ClassSpec) and field.spec.nested:
                self._class_field(field, field.spec)
        if self._nested and any(isinstance(field.spec, TensorSpec) for field in self._fields):
            self._lines.append(f"dev = dims.get({DEVICE!r})")
        for field in self._fields:
            match field.spec:
                case TensorSpec():
                    self._tensor_names(field, field.spec)
                case ClassSpec() if not field.spec.nested:
                    self._class_field(field, field.spec)
                case TypeObjectSpec():
                    bounds = self._constant(field.spec.bounds)
                    test = f"isinstance({_local(field)}, type) and issubclass({_local(field)}, {bounds})"
                    came = f"({_local(field)}.__name__ if isinstance({_local(field)}, type) else 'of type ' + type({_local(field)}).__name__)"
                    self._require(field, f"not ({test})", f"'is ' + {came} + {f', expected {field.declared}'!r}")
                case OtherSpec():
                    hint = self._constant(field.spec.hint)
                    wrong = f"not _is_compiling() and not is_bearable({_local(field)}, {hint})"  # dynamo cannot trace beartype
                    self._require(field, wrong, self._wrong_class(field))
                case _:
                    pass
        for field in self._fields:
            if isinstance(field.spec, TensorSpec):
                self._tensor_expressions(field, field.spec)
        arguments = "".join(f", {_local(field)}" for field in self._all)
        start = ["dims = {}"] if self._nested else ["dev = None", *(f"D_{dim} = None" for dim in sorted(self._possible - self._definite))]
        body = [*start, *self._lines, *self._late, "if _level > 1: deep(self)"]
        check = f"def {name}(self{arguments}):\n" + "".join(f"    {line}\n" for line in body)
        return check + self._write_dims(f"{name}_dims")

    def _write_dims(self, name: str) -> str:
        """Return the source of the function that reads a valid object's dims into a new dict; nothing for a class that has none."""
        shapes: list[str] = []
        dims: dict[str, str] = {}
        late: list[str] = []
        for field in self._fields:  # those that may be None come last
            value = _local(field)
            match field.spec:
                case TensorSpec():
                    named = {dim.name: axis for axis, dim in reversed([*enumerate(field.spec.dims)]) if dim.name not in (None, *dims)}
                    found = {DEVICE: f"self.{field.name}.device"} | {str(dim): f"{value}[{axis}]" for dim, axis in named.items()}
                    shape = [f"{value} = self.{field.name}.shape"] if named else []
                case ClassSpec() if field.spec.dim is not None:
                    found, shape = {field.spec.dim: f"self.{field.name}"}, []
                case ClassSpec() if field.spec.nested:
                    rename = f"{self._constant(field.spec.rename)}.get(key, key)" if field.spec.rename else "key"
                    lines = [f"for key, size in read({value}).items(): dims.setdefault({rename}, size)"]
                    late += [f"{value} = self.{field.name}", *self._read_nested(value, lines)]
                    continue
                case _:
                    continue
            if field.optional:
                inner = [*shape, *(f"dims.setdefault({dim!r}, {size})" for dim, size in found.items())]
                late += [f"if self.{field.name} is not None:", *(f"    {line}" for line in inner)]
            else:
                shapes += shape
                dims = found | dims
        if not dims and not late:
            return ""
        start = [*shapes, f"dims = {{{', '.join(f'{dim!r}: {size}' for dim, size in dims.items())}}}"]
        body = [*start, *late, "return dims"]
        broken = ["except (AttributeError, IndexError):", "    recheck(self)", "    raise"]  # it was built wrong while debug was off
        return f"def {name}(self):\n    try:\n" + "".join([*(f"        {line}\n" for line in body), *(f"    {line}\n" for line in broken)])

    # -- pieces of source --------------------------------------------------------------------------------------------------

    def _fail(self, field: Field, reason: str, hint: str = "") -> str:
        return f"fail({self._me}, {field.name!r}, {reason}, {self._values}, {hint!r})"

    def _guarded(self, field: Field, lines: list[str]) -> list[str]:
        if not field.optional:
            return lines
        return [f"if {_local(field)} is not None:", *(f"    {line}" for line in lines)]

    def _require(self, field: Field, wrong: str, reason: str) -> None:
        self._lines += self._guarded(field, [f"if {wrong}: {self._fail(field, reason)}"])

    def _read_nested(self, value: str, lines: list[str]) -> list[str]:
        return [f"read = dims_readers.get(type({value}))", "if read is not None:", *(f"    {line}" for line in lines)]

    def _wrong_class(self, field: Field) -> str:
        return f"'is of type ' + type({_local(field)}).__name__ + {f', expected {field.declared}'!r}"

    def _read_dim(self, name: str) -> str:
        return f"dims[{name!r}]" if self._nested else f"D_{name}"

    def _source(self, tree: ast.expr) -> str:
        reader = self

        class Names(ast.NodeTransformer):
            @override
            def visit_Name(self, node: ast.Name) -> ast.expr:  # the name is ast's
                return ast.parse(reader._read_dim(node.id), mode="eval").body

        copied = ast.parse(ast.unparse(tree), mode="eval").body
        return "(" + ast.unparse(Names().visit(copied)) + ")"

    # -- tensors -------------------------------------------------------------------------------------------------------------

    def _tensor_names(self, field: Field, spec: TensorSpec) -> None:
        name = _local(field)
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in spec.dtypes)
        if len(spec.dtypes) == 1:
            wrong_dtype = f"{name}.dtype != {self._constant(spec.dtypes[0])}"
        else:
            wrong_dtype = f"{name}.dtype not in {self._constant(spec.dtypes)}"
        shape = " ".join(dim.text for dim in spec.dims)
        dtype_reason = f"'dtype is ' + str({name}.dtype).removeprefix('torch.') + {f', expected {expected}'!r}"
        rank_reason = f"f'has {{len(s)}} dims, expected {len(spec.dims)} ({shape})'"
        lines = [
            f"if not isinstance({name}, _Tensor): {self._fail(field, self._wrong_class(field))}",
            f"if {wrong_dtype}: {self._fail(field, dtype_reason)}",
            f"s = {name}.shape",
            f"if len(s) != {len(spec.dims)}: {self._fail(field, rank_reason)}",
            *self._device(field),
        ]
        for axis, dim in enumerate(spec.dims):
            if dim.name is not None:
                lines += self._bind(field, dim.name, f"s[{axis}]", f"axis {axis} is {{s[{axis}]}}, expected {dim.name} = ")
            elif isinstance(dim.tree, ast.Constant):
                lines.append(f"if s[{axis}] != {dim.text}: " + self._fail(field, f"f'axis {axis} is {{s[{axis}]}}, expected {dim.text}'"))
        self._lines += self._guarded(field, lines)

    def _device(self, field: Field) -> list[str]:
        wrong = f"f'is on {{{_local(field)}.device}}, but the fields before it are on {{dev}}'"
        if self._alone:
            return []
        return [
            f"if dev is None: dev = {_local(field)}.device",
            f"elif {_local(field)}.device != dev: {self._fail(field, wrong)}",
        ]

    def _bind(self, field: Field, dim: str, size: str, text: str) -> list[str]:
        read = self._read_dim(dim)
        clash = self._fail(field, f'f"{text}{{{read}}}"')
        if self._nested:
            self._possible.add(dim)
            return [f"if dims.setdefault({dim!r}, {size}) != {size}: {clash}"]
        if dim in self._definite:
            return [f"if {size} != {read}: {clash}"]
        if not field.optional:
            self._definite.add(dim)
            return [f"{read} = {size}"]
        self._possible.add(dim)
        return [f"if {read} is None: {read} = {size}", f"elif {size} != {read}: {clash}"]

    def _tensor_expressions(self, field: Field, spec: TensorSpec) -> None:
        name = _local(field)
        lines: list[str] = []
        for axis, dim in enumerate(spec.dims):
            if dim.name is None and dim.tree is not None and not isinstance(dim.tree, ast.Constant):
                lines += self._equal(field, dim, f"{name}.shape[{axis}]", f"axis {axis}")
        layout = spec.layout
        if layout is not None and layout.contiguous:
            reason = f"f'is not contiguous: stride {{{name}.stride()}} for shape {{list({name}.shape)}}'"
            hint = "copy it with .contiguous(), or take the format whose layout this is"
            lines.append(f"if not {name}.is_contiguous(): " + self._fail(field, reason, hint))
        if spec.stride:
            strides: list[str] = []
            for axis, dim in enumerate(spec.stride):
                inner = self._equal(field, dim, f"{name}.stride({axis})", f"stride of axis {axis}")
                strides += [f"if {name}.shape[{axis}] > 1:", *(f"    {line}" for line in inner)] if inner else []
            lines += [f"if {name}.numel() > 0:", *(f"    {line}" for line in strides)] if strides else []
        if layout is not None and layout.align is not None:
            reason = f"f'starts at an address that is not a multiple of {layout.align} bytes'"
            lines.append(f"if not _is_compiling() and {name}.data_ptr() % {layout.align}: " + self._fail(field, reason))
        if lines:
            self._late += self._guarded(field, lines)

    def _equal(self, field: Field, dim: DimExpr, got: str, what: str) -> list[str]:
        if dim.tree is None:
            return []
        lines: list[str] = []
        for known in dict.fromkeys(dim.names):
            if known not in self._definite | self._possible and not self._nested:
                raise BoundaryDefinitionError(f"{self._cls.__qualname__}.{field.name}: no field binds the dim {known!r}")
            if known not in self._definite:
                missing = f"{known!r} not in dims" if self._nested else f"{self._read_dim(known)} is None"
                lines.append(f"if {missing}: " + self._fail(field, repr(f"needs the dim {known}, which no field that is present binds")))
        for dividend, divisor in dim.divisions():
            left, right = self._source(dividend), self._source(divisor)
            reason = f'f"{ast.unparse(dividend)} = {{{left}}} is not a multiple of {{{right}}}"'
            lines.append(f"if {right} == 0 or {left} % {right}: " + self._fail(field, reason))
        want = self._source(dim.tree)
        value = "" if isinstance(dim.tree, ast.Constant) else f" = {{{want}}}"
        reason = f'f"{what} is {{{got}}}, expected {dim.text}{value}"'
        lines.append(f"if {got} != {want}: " + self._fail(field, reason))
        return lines

    # -- instances -----------------------------------------------------------------------------------------------------------

    def _class_field(self, field: Field, spec: ClassSpec) -> None:
        name = _local(field)
        classes = self._constant((*spec.classes, int) if float in spec.classes else spec.classes)  # an int is a float to checkers too
        wrong = f"not isinstance({name}, {classes})"
        known = {cls for cls in self._known if issubclass(cls, spec.classes)} if spec.nested else set[type]()
        if known:  # abc's isinstance costs seven times as much as looking a class up
            wrong = f"type({name}) not in {self._constant(frozenset(known))} and {wrong}"
        if not {int, float}.isdisjoint(spec.classes) and bool not in spec.classes:
            wrong = f"({wrong} or isinstance({name}, bool))"
        lines = [f"if {wrong}: {self._fail(field, self._wrong_class(field))}"] if object not in spec.classes else []
        for held in spec.held:
            value, bounds = f"{name}.{held.field}", self._constant(held.bounds)
            test = f"isinstance({value}, {bounds})" if held.instance else f"isinstance({value}, type) and issubclass({value}, {bounds})"
            wrong = f"isinstance({name}, {self._constant(held.cls)}) and not ({test})"
            came = f"type({value}).__name__" if held.instance else f"getattr({value}, '__name__', 'no class')"
            expected = " or ".join(cls.__qualname__ for cls in held.bounds)
            reason = f"'holds {held.field} = ' + {came} + ', expected {expected}'"
            lines.append(f"if {wrong}: {self._fail(field, reason)}")
        if spec.dim is not None:
            lines += self._bind(field, spec.dim, name, f"is {{{name}}}, expected {spec.dim} = ")
        if spec.nested:
            clash = 'f"has {key} = {size} inside, but {key} = {dims[key]} here"'
            bind = [
                f"for key, size in read({name}).items():",
                *([f"    key = {self._constant(spec.rename)}.get(key, key)"] if spec.rename else []),
                f"    if dims.setdefault(key, size) != size: {self._fail(field, clash)}",
            ]
            first = field is next(field for field in self._fields if isinstance(field.spec, ClassSpec) and field.spec.nested)
            lines += self._read_nested(name, [f"dims = read({name})"] if first and not spec.rename else bind)
        self._lines += self._guarded(field, lines)
