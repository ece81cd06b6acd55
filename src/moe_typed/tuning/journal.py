"""What is measured of a cell that is not done yet: a line a plan, so that a run that is interrupted loses nothing."""

import json
from pathlib import Path
from typing import Final, cast, final

from ..ops.product_plans.files import CONVERTER, Conditions, file_name
from ..ops.product_plans.spec import Plan
from .space import Cell

FOLDER: Final = "unfinished"


@final
class Journal:
    """The measurements of one cell under the same conditions; those under others are forgotten. Raises: OSError."""

    def __init__(self, directory: Path, cell: Cell, conditions: Conditions) -> None:
        layer = cell.layer
        name = f"{layer.format}-{layer.experts}-{layer.top_k}-{layer.hidden}-{layer.inter}-at-{cell.tokens}.jsonl"
        self._path = directory / FOLDER / Path(file_name(conditions.device)).stem / name
        self._head = json.dumps({"routed": cell.routed, **cast("dict[str, object]", CONVERTER.unstructure(conditions))})
        self._times: dict[Plan, tuple[float | None, str]] = {}
        self._read()

    def _read(self) -> None:
        if not self._path.exists():
            return
        text = self._path.read_text(encoding="utf-8", errors="replace")
        head, *lines = text.splitlines() or [""]
        if head != self._head:
            self.drop()
            return
        if not text.endswith("\n"):  # a line that was cut short; the next one starts anew
            with self._path.open("a", encoding="utf-8") as file:
                file.write("\n")
        for line in lines:
            try:
                plan, us, failure = CONVERTER.structure(json.loads(line), tuple[Plan, float | None, str])
            except Exception:  # noqa: S112  a line that was cut short is measured again, and cattrs raises groups of anything
                continue
            self._times[plan] = (us, failure)

    def __len__(self) -> int:
        """Return how many plans are known."""
        return len(self._times)

    def known(self, plan: Plan) -> tuple[float | None, str] | None:
        """Return the time of a plan, or None and why it failed; None for a plan that was not measured."""
        return self._times.get(plan)

    def add(self, plan: Plan, us: float | None, failure: str) -> None:
        """Note the time of a plan, or why it failed. It is on disk when this returns."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not self._path.exists()
        line = json.dumps(CONVERTER.unstructure((plan, us, failure), tuple[Plan, float | None, str]))
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{self._head}\n{line}\n" if is_new else f"{line}\n")
        self._times[plan] = (us, failure)

    def drop(self) -> None:
        """Forget everything, on disk too."""
        self._times.clear()
        self._path.unlink(missing_ok=True)
        for folder in self._path.parents[:2]:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
