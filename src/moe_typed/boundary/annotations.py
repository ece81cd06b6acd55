"""Metadata of boundary fields: dtype names, layouts, named integers, renamed dims.

A tensor field is annotated as jaxtyping does it, ``Float32[Tensor, "rows hidden//128"]``. A dim is ``_``, a number, a name, or
arithmetic over names (``+ - * //``). ``a//b`` demands that ``b`` divides ``a``; ``-(-a//b)`` rounds up and demands nothing.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, final

import attrs
from jaxtyping import AbstractDtype
from typing_extensions import override

if TYPE_CHECKING:
    from ._dtypes_static import E8M0 as E8M0
    from ._dtypes_static import Float4e2m1x2 as Float4e2m1x2
    from ._dtypes_static import Floating as Floating
else:

    class E8M0(AbstractDtype):
        """Name torch.float8_e8m0fnu: one power of two a byte."""

        dtypes = ("float8_e8m0fnu",)

    class Float4e2m1x2(AbstractDtype):
        """Name torch.float4_e2m1fn_x2: two values a byte, the low nibble first."""

        dtypes = ("float4_e2m1fn_x2",)

    class Floating(AbstractDtype):
        """Name the dtypes that a model computes in; jaxtyping's Float takes float8 too."""

        dtypes = ("bfloat16", "float16", "float32")


@final
@attrs.frozen
class Layout:
    """Demand a memory layout of a tensor field.

    ``contiguous``: row-major without gaps. ``stride``: one expression a dim, in elements, over the same names as the shape (``"1 rows"`` is
    column-major; ``_`` takes any). ``align``: bytes that the data pointer must be a multiple of.
    A stride is not looked at where its dim has fewer than two entries, nor in an empty tensor: there it addresses nothing.
    Alignment is not checked while ``torch.compile`` traces: a traced tensor has no address.
    """

    contiguous: bool = False
    stride: str | None = None
    align: int | None = None

    @override
    def __str__(self) -> str:
        """Return the demands alone."""
        demands = [
            "contiguous" if self.contiguous else "",
            f"stride {self.stride!r}" if self.stride else "",
            f"{self.align}-byte alignment" if self.align else "",
        ]
        return f"Layout({', '.join(demand for demand in demands if demand)})"


@final
@attrs.frozen
class Dim:
    """Bind a plain ``int`` field to a named dim, as a tensor's shape would."""

    name: str


@final
@attrs.frozen
class Rename:
    """Give dims of a nested boundary other names in the outer one, where the same name means another size.

    ``Annotated[Routing[LogicalIds], Rename({"rows": "source_rows"})]``
    """

    names: Mapping[str, str]
