"""What dispatchers raise beside the errors of boundaries and handles."""

from typing import final


@final
class CapacityError(ValueError):
    """Say that a batch has more rows than the library has room for. Raised before the library is called: nothing was sent, and nothing is lost."""


@final
class ArenaError(RuntimeError):
    """Say that a dispatch would overwrite a result that is not combined yet. Raised before the library is called."""


@final
class LibraryError(RuntimeError):
    """Say that a library returned something other than what its dispatcher was told to expect. The dispatch has happened, and cannot be combined."""


@final
class ReceiveCapError(RuntimeError):
    """Say that more rows arrived than a cap allows. The dispatch has happened, and cannot be combined."""
