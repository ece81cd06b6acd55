"""What a boundary raises.

TypeError
+-- BoundaryError          a value does not have the layout that its boundary declares
+-- BoundaryDefinitionError  a class given to ``@boundary`` cannot be checked as it is written
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import final

from typing_extensions import override

_NOTHING: Mapping[str, str] = MappingProxyType({})


@final
class BoundaryDefinitionError(TypeError):
    """Say that a class cannot be made a boundary; raised when its checks are generated."""


def _again(reason: str, boundary: str, field: str, declared: str, got: str, bindings: Mapping[str, str], hint: str) -> "BoundaryError":
    return BoundaryError(reason, boundary=boundary, field=field, declared=declared, got=got, bindings=bindings, hint=hint)


@final
class BoundaryError(TypeError):
    """Say which field of which boundary is wrong, what was declared, and what came.

    The attributes hold the parts of the message, for programs:

    * ``boundary``, ``field``: the names; a fault of the whole object has an empty ``field``.
    * ``reason``: one clause that says what is wrong.
    * ``declared``: the annotation; ``got``: dtype, shape, stride and device (never values).
    * ``bindings``: the other fields, described in the same way.
    * ``hint``: what to do, or the other format that these values do satisfy.
    """

    def __init__(
        self,
        reason: str,
        *,
        boundary: str = "",
        field: str = "",
        declared: str = "",
        got: str = "",
        bindings: Mapping[str, str] = _NOTHING,
        hint: str = "",
    ) -> None:
        self.reason = reason
        self.boundary = boundary
        self.field = field
        self.declared = declared
        self.got = got
        self.bindings = bindings
        self.hint = hint

    # No call of super().__init__, which dynamo does not trace: BaseException.__new__ has set args already.

    @override
    def __reduce__(self) -> tuple[Callable[..., "BoundaryError"], tuple[object, ...]]:
        return _again, (self.reason, self.boundary, self.field, self.declared, self.got, dict(self.bindings), self.hint)

    @override
    def __str__(self) -> str:
        place = ".".join(part for part in (self.boundary, self.field) if part)
        lines = [f"{place}: {self.reason}" if place else self.reason]
        if self.declared:
            lines.append(f"  declared  {self.field}: {self.declared}")
        if self.got:
            lines.append(f"  got       {self.got}")
        lines += [f"  with      {name}={value}" for name, value in self.bindings.items()]
        if self.hint:
            lines.append(f"  hint      {self.hint}")
        return "\n".join(lines)
