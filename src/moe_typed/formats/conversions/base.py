"""What a conversion is."""

from typing import Final, Generic, Never, Protocol, TypeAlias, TypeVar, final

import attrs
from torch import Tensor

from ..payloads import Payload

P_contra = TypeVar("P_contra", bound=Payload, contravariant=True)
Q_co = TypeVar("Q_co", bound=Payload, covariant=True)


class Convert(Protocol[P_contra, Q_co]):
    """A function from payload to payload. ``live``: int32 (1,), the leading rows that count, None for all; what the others hold is then undefined."""

    def __call__(self, rows: P_contra, live: Tensor | None = None, /) -> Q_co:
        """Return the converted rows."""
        ...


@final
@attrs.frozen(eq=False)
class Conversion(Generic[P_contra, Q_co]):
    """One named conversion of payloads.

    ``source`` lists the classes it takes and ``target`` is the class it makes; ``run`` does it.
    """

    name: str
    source: tuple[type[Payload], ...]
    target: type[Q_co]
    run: Convert[P_contra, Q_co]

    def bytes_moved(self, source: type[Payload], rows: int, hidden: int) -> int:
        """Return the bytes that the step reads and writes; none where source and target are the same class."""
        if source is self.target:
            return 0
        return source.format.payload_bytes(rows, hidden) + self.target.format.payload_bytes(rows, hidden)


AnyConversion: TypeAlias = Conversion[Never, Payload]

AS_IS: Final = "as is"
