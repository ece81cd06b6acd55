"""Plan the weights of a stack of experts: one tensor for each expert and projection, or one for all experts."""

from collections.abc import Callable, Iterator
from typing import TypeVar, final

import attrs

from ..formats import AnyExpertWeights, GateUpOrder
from .assembly import Assembler, Assembly, Piece, Planner
from .errors import CheckpointError
from .quantization import Parts, ScaleStorage, Storage
from .tensors import DTYPES

O = TypeVar("O", bound=GateUpOrder)  # noqa: E741  as in formats


@final
@attrs.frozen
class Matrix:
    """Where one projection of an expert is stored: ``rows`` rows of the target from row ``first`` on.

    ``entry``: the expert's entry of a stacked tensor. ``tensor`` is the name of the weight; scales and biases are named after it.
    """

    tensor: str
    slot: int
    first: int
    rows: int
    entry: int | None = None


@final
@attrs.frozen
class Experts:
    """A stack to be planned.

    ``root``: the module that holds it. ``stacked``: one tensor holds all experts; else expert ``e`` is the module ``root.e`` (``numbered``), or
    ``root`` itself. ``projections``: gate, up and down of a single expert. ``transposed``: weights lie (in, out).
    """

    root: str
    count: int
    inter: int
    hidden: int
    projections: tuple[str, str, str]
    stacked: bool = False
    numbered: bool = True
    transposed: bool = False
    biased: bool = False

    def first_matrices(self) -> Iterator[Matrix]:
        """Yield where w13 is stored."""
        gate, up, _ = self.projections
        for expert in range(self.count):
            if self.stacked:
                yield Matrix(f"{self.root}.gate_up_proj", expert, 0, 2 * self.inter, expert)
            else:
                yield Matrix(f"{self._module(expert)}.{gate}.weight", expert, 0, self.inter)
                yield Matrix(f"{self._module(expert)}.{up}.weight", expert, self.inter, self.inter)

    def second_matrices(self) -> Iterator[Matrix]:
        """Yield where w2 is stored."""
        for expert in range(self.count):
            if self.stacked:
                yield Matrix(f"{self.root}.down_proj", expert, 0, self.hidden, expert)
            else:
                yield Matrix(f"{self._module(expert)}.{self.projections[2]}.weight", expert, 0, self.hidden)

    def _module(self, expert: int) -> str:
        return f"{self.root}.{expert}" if self.numbered else self.root


@final
@attrs.frozen(eq=False)
class StackPlan:
    """All tensors of a stack, checked by their headers and not yet read."""

    storage: Storage
    w13: Assembly
    w2: Assembly
    w13_scale: Assembly | None
    w2_scale: Assembly | None
    b13: Assembly | None
    b2: Assembly | None

    @property
    def nbytes(self) -> int:
        """Return the bytes that the stack will hold."""
        parts = (self.w13, self.w2, self.w13_scale, self.w2_scale, self.b13, self.b2)
        return sum(part.nbytes for part in parts if part is not None)

    def build(self, assembler: Assembler, order: type[O]) -> AnyExpertWeights[O]:
        """Read the tensors and return them as the weight class of their storage."""
        parts = Parts(
            w13=assembler.make(self.w13),
            w2=assembler.make(self.w2),
            w13_scale=assembler.make_optional(self.w13_scale),
            w2_scale=assembler.make_optional(self.w2_scale),
            b13=assembler.make_optional(self.b13),
            b2=assembler.make_optional(self.b2),
        )
        return self.storage.build(parts, order)


@final
@attrs.frozen(eq=False)
class _Projection:
    """One side of the stack, w13 or w2: ``matrices`` says where its weights are stored, ``rows`` x ``columns`` is one expert's.

    Matrices are listed anew for each use, so that a count from a damaged config meets a missing tensor before it fills the memory.
    """

    planner: Planner
    experts: Experts
    matrices: Callable[[], Iterator[Matrix]]
    rows: int
    columns: int
    storage: Storage
    hint: str

    def weight(self) -> Assembly:
        """Plan the weights."""
        stored = tuple(name for name, dtype in DTYPES.items() if dtype == self.storage.weight)
        transposed = self.experts.transposed
        pieces: list[Piece] = []
        for matrix in self.matrices():
            shape = (self.columns, matrix.rows) if transposed else (matrix.rows, self.columns)
            self.planner.expect(matrix.tensor, self._stored_shape(matrix, shape), stored, self.hint)
            pieces.append(Piece(matrix.tensor, matrix.slot, matrix.first, matrix.entry, transposed))
        return Assembly((self.experts.count, self.rows, self.columns), self.storage.weight, tuple(pieces))

    def scale(self) -> Assembly | None:
        """Plan the scales, where the storage has them; all are stored in one dtype."""
        scale = self.storage.scale
        if scale is None:
            return None
        block_rows, block_columns = scale.block
        columns = self.columns // block_columns
        stored = scale.stored
        pieces: list[Piece] = []
        for matrix in self.matrices():
            name = self._scale_name(matrix.tensor, scale)
            dtype = self.planner.expect(name, self._stored_shape(matrix, (matrix.rows // block_rows, columns)), stored, self.hint)
            stored = tuple(kind for kind in stored if DTYPES[kind] == dtype)
            pieces.append(Piece(name, matrix.slot, matrix.first // block_rows, matrix.entry))
        return Assembly((self.experts.count, self.rows // block_rows, columns), scale.dtype, tuple(pieces), scale.hold)

    def bias(self) -> Assembly | None:
        """Plan the biases, where the family has them; they are stacked as the weights are."""
        if not self.experts.biased:
            return None
        shape = (self.experts.count, self.rows)
        stored = tuple(name for name, dtype in DTYPES.items() if dtype == self.storage.weight)
        name = f"{next(self.matrices()).tensor}_bias"
        self.planner.expect(name, shape, stored, self.hint)
        return Assembly(shape, self.storage.weight, (Piece(name),))

    def _stored_shape(self, matrix: Matrix, shape: tuple[int, int]) -> tuple[int, ...]:
        return shape if matrix.entry is None else (self.experts.count, *shape)

    def _scale_name(self, weight: str, scale: ScaleStorage) -> str:
        names = [weight + suffix for suffix in scale.suffixes]
        found = [name for name in names if self.planner.has(name)]
        if len(found) > 1:
            raise CheckpointError(
                "there are two scale tensors for one weight", file=self.planner.file(weight), subject=weight, got=" and ".join(found)
            )
        return found[0] if found else names[0]


def plan_stack(planner: Planner, experts: Experts, storage: Storage, hint: str) -> StackPlan:
    """Plan a stack of experts. Raises: CheckpointError for a tensor that is missing, or has not the shape and dtype that it must have."""
    inter, hidden = experts.inter, experts.hidden
    if storage.scale is not None:
        _demand_divisible(planner, experts, max(storage.scale.block))
    first = _Projection(planner, experts, experts.first_matrices, 2 * inter, hidden, storage, hint)
    second = _Projection(planner, experts, experts.second_matrices, hidden, inter, storage, hint)
    w13, w2 = first.weight(), second.weight()
    return StackPlan(storage, w13, w2, first.scale(), second.scale(), first.bias(), second.bias())


def _demand_divisible(planner: Planner, experts: Experts, block: int) -> None:
    for name, size in (("hidden", experts.hidden), ("inter", experts.inter)):
        if size % block:
            raise CheckpointError(
                f"{name} is not made of whole blocks of {block}, which its scales are for",
                file=planner.index.source,
                subject=experts.root,
                expected=f"a multiple of {block}",
                got=str(size),
            )
