"""What reading a checkpoint raises: one error, whatever is wrong.

ValueError
+-- CheckpointError    a checkpoint is damaged, contradicts itself, or is of a kind that is not supported
"""

from pathlib import Path
from typing import final


@final
class CheckpointError(ValueError):
    """Say which file of a checkpoint is wrong, in which tensor or option, what was expected, and what came.

    The attributes hold the parts of the message, for programs: ``file``, ``subject`` (a tensor or a config option; empty for the file as a
    whole), ``reason``, ``expected``, ``got``, ``hint``.
    """

    def __init__(self, reason: str, *, file: Path, subject: str = "", expected: str = "", got: str = "", hint: str = "") -> None:
        self.reason = reason
        self.file = file
        self.subject = subject
        self.expected = expected
        self.got = got
        self.hint = hint
        super().__init__(self._message())

    def _message(self) -> str:
        lines = [": ".join(part for part in (str(self.file), self.subject, self.reason) if part)]
        parts = (("expected", self.expected), ("got", self.got), ("hint", self.hint))
        lines += [f"  {name:<9} {text}" for name, text in parts if text]
        return "\n".join(lines)
