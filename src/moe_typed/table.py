"""The transition table.

THEORY

A MoE layer is a chain of states. Dispatch leaves the rows in one of ``n`` layouts (a class each), and a runner takes them in one of ``m`` layouts
(a class each). This file says how one becomes the other, and how what the runner returns becomes what that dispatcher's combine takes::

    DispatchOutput --pre--> (RunnerInput, Carry) --run--> RunnerOutput --post--> CombineInput
                                    |                                  ^
                                    +----------- Carry ----------------+

Rule 1. All that changes state between dispatch and combine is in a row of this table. No stage keeps anything on the side: what ``post`` needs
and the runner does not, ``pre`` puts into the carry, which is one class a combine class. It replaces the dict that engines pass along.

Rule 2. A row does not know weights or payload formats. It moves rows about; what the values mean is between the payload class and the prepared
weights (the acceptance table). Hence ``pre`` takes ``Payload``, and rows do not multiply by formats.

Rule 3. A row ends at the combine class of the dispatcher that it began at. The static type of a dispatch output names that class, so experts
return it without an overload, and a test compares it with the row.

Rule 4. A carry belongs to one combine class. Rows of one variant end alike, whatever the runner, so they share the carry and ``post``.

Rule 5. The table is total: a pair (dispatch variant, runner input) is a row, or it is Unsupported with a reason from a closed list. Nothing
degrades silently.

A row is built in two steps, so that a checker compares one function at a time with types that are fixed already, and says exactly what is wrong::

    Edge(Variant[Payload], CombineClass, InputClass).pre(f).post(g)
"""

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, Generic, Never, TypeAlias, TypeVar, cast, final, get_origin

import attrs
from typing_extensions import override

from .boundary import is_strict, judged
from .formats import Payload
from .runners import expert_rows as to_place
from .runners import flat_rows as to_flat
from .runners import posts as home
from .runners.aiter import rows as to_aiter
from .runners.ascend import posts as home_ascend
from .runners.ascend import rows as to_ascend
from .runners.base import Runner, UnsupportedError
from .stages import (
    AiterSinkInput,
    AiterSlotInput,
    AscendRowsInput,
    AscendSlicedRowsInput,
    AscendTPCombineInput,
    AscendTPDispatchOutput,
    Carry,
    CombineInput,
    DeepEPLLCombineInput,
    DeepEPLLDispatchOutput,
    DeepEPLLNpuCombineInput,
    DeepEPLLNpuDispatchOutput,
    DeepEPNormalCombineInput,
    DeepEPNormalDispatchOutput,
    DeepEPNormalNpuCombineInput,
    DeepEPNormalNpuDispatchOutput,
    DeepEPv2ExpandedCombineInput,
    DeepEPv2ExpandedDispatchOutput,
    DeepEPv2MaskedDispatchOutput,
    DeepEPv2PlainCombineInput,
    DeepEPv2PlainDispatchOutput,
    DispatchOutput,
    FlatRowsInput,
    MooncakeCombineInput,
    MooncakeDispatchOutput,
    MoriEPLLCombineInput,
    MoriEPLLDispatchOutput,
    MoriEPNormalCombineInput,
    MoriEPNormalDispatchOutput,
    NixlCombineInput,
    NixlDispatchOutput,
    RunnerInput,
    RunnerOutput,
    SegmentRowsInput,
    SlabRowsInput,
    StandardCombineInput,
    StandardDispatchOutput,
)

D = TypeVar("D", bound=DispatchOutput[Payload, CombineInput])
C = TypeVar("C", bound=CombineInput)
P = TypeVar("P", bound=Payload)
RI = TypeVar("RI", bound=RunnerInput)
RO = TypeVar("RO", bound=RunnerOutput)
S = TypeVar("S", bound=Carry)

AnyDispatchOutput: TypeAlias = DispatchOutput[Payload, CombineInput]
AnyRunner: TypeAlias = Runner[Never, RunnerOutput]


class Row(ABC):
    """A row with its types forgotten, so that rows of all types can stand in one table."""

    @property
    @abstractmethod
    def key(self) -> tuple[type[AnyDispatchOutput], type[RunnerInput]]:
        """Return what the row is found by."""

    @property
    @abstractmethod
    def ends_at(self) -> type[CombineInput]:
        """Return the combine class."""

    @property
    @abstractmethod
    def functions(self) -> tuple[Callable[..., object], Callable[..., object]]:
        """Return pre and post."""

    @abstractmethod
    def bind(self, runner: AnyRunner) -> Callable[[Never], CombineInput]:
        """Return ``using(runner)``; the caller has found the row by the classes of both sides."""


@final
@attrs.frozen(eq=False)
class Transition(Row, Generic[D, C, RI, S, RO]):
    """One row: the plain functions, with no wrapper between them and the caller."""

    dispatch_output: type[D]
    combine_input: type[C]
    runner_input: type[RI]
    pre: Callable[[D], tuple[RI, S]]
    post: Callable[[RO, S], C]

    def using(self, runner: Runner[RI, RO], /) -> Callable[[D], C]:
        """Return the experts' part of a layer as one function."""
        pre, run, post = self.pre, runner.run, self.post

        def transit(dispatched: D) -> C:
            if is_strict():
                runner_input, carry = judged(pre)(dispatched)
                return judged(post)(run(runner_input), carry)
            runner_input, carry = pre(dispatched)
            return post(run(runner_input), carry)

        return transit

    @property
    @override
    def key(self) -> tuple[type[AnyDispatchOutput], type[RunnerInput]]:
        return get_origin(self.dispatch_output) or self.dispatch_output, self.runner_input

    @property
    @override
    def ends_at(self) -> type[CombineInput]:
        return self.combine_input

    @property
    @override
    def functions(self) -> tuple[Callable[..., object], Callable[..., object]]:
        return self.pre, self.post

    @override
    def bind(self, runner: AnyRunner) -> Callable[[Never], CombineInput]:
        return self.using(cast("Runner[RI, RO]", runner))


@final
@attrs.frozen(eq=False)
class HalfEdge(Generic[D, C, RI, S]):
    """A row that still lacks its way back."""

    edge: "Edge[D, C, RI]"
    forward: Callable[[D], tuple[RI, S]]

    def post(self, function: Callable[[RO, S], C], /) -> Transition[D, C, RI, S, RO]:
        """Complete the row: ``function`` must take exactly the carry that ``pre`` returns, and return the row's combine class."""
        return Transition(self.edge.dispatch_output, self.edge.combine_input, self.edge.runner_input, self.forward, function)


@final
@attrs.frozen(eq=False)
class Edge(Generic[D, C, RI]):
    """Begin a row: from a dispatch variant to a runner input, and back to a combine class."""

    dispatch_output: type[D]
    combine_input: type[C]
    runner_input: type[RI]

    def pre(self, function: Callable[[D], tuple[RI, S]], /) -> HalfEdge[D, C, RI, S]:
        """Name the way to the runner; its second result is the carry."""
        return HalfEdge(self, function)


@final
class UnsupportedReason(enum.Enum):
    """Say why a pair of dispatch variant and runner input has no row."""

    LAYOUT = "the runner input cannot hold rows in this layout without a copy that nobody asked for"
    ID_SPACE = "the runner input has ids of another space"
    DEVICE = "the two are of libraries that run on different devices"
    RANKS = "the runner's ranks must have the same rows, and those of this dispatch have not"


@final
@attrs.frozen
class Unsupported:
    """Stand in the table where there is no row."""

    reason: UnsupportedReason
    detail: str


Cell: TypeAlias = Row | Unsupported
Key: TypeAlias = tuple[type[AnyDispatchOutput], type[RunnerInput]]

# ---- the rows ---------------------------------------------------------------------------------------------------------------------

ROWS: Final[tuple[Row, ...]] = (
    # to flat rows with local ids: the reference and Triton runners
    Edge(StandardDispatchOutput[Payload], StandardCombineInput, FlatRowsInput).pre(to_flat.standard_pre).post(home.standard_post),
    Edge(DeepEPNormalDispatchOutput[Payload], DeepEPNormalCombineInput, FlatRowsInput).pre(to_flat.deepep_normal_pre).post(home.deepep_normal_post),
    Edge(DeepEPLLDispatchOutput[Payload], DeepEPLLCombineInput, FlatRowsInput).pre(to_flat.deepep_ll_pre).post(home.deepep_ll_post),
    Edge(DeepEPv2PlainDispatchOutput[Payload], DeepEPv2PlainCombineInput, FlatRowsInput)
    .pre(to_flat.deepep_v2_plain_pre)
    .post(home.deepep_v2_plain_post),
    Edge(DeepEPv2ExpandedDispatchOutput[Payload], DeepEPv2ExpandedCombineInput, FlatRowsInput)
    .pre(to_flat.deepep_v2_expanded_pre)
    .post(home.deepep_v2_expanded_post),
    Edge(DeepEPv2MaskedDispatchOutput[Payload], DeepEPv2ExpandedCombineInput, FlatRowsInput)
    .pre(to_flat.deepep_v2_masked_pre)
    .post(home.deepep_v2_expanded_post),
    Edge(MoriEPNormalDispatchOutput[Payload], MoriEPNormalCombineInput, FlatRowsInput).pre(to_flat.mori_normal_pre).post(home.mori_normal_post),
    Edge(MoriEPLLDispatchOutput[Payload], MoriEPLLCombineInput, FlatRowsInput).pre(to_flat.mori_ll_pre).post(home.mori_ll_post),
    Edge(MooncakeDispatchOutput[Payload], MooncakeCombineInput, FlatRowsInput).pre(to_flat.mooncake_pre).post(home.mooncake_post),
    Edge(NixlDispatchOutput[Payload], NixlCombineInput, FlatRowsInput).pre(to_flat.nixl_pre).post(home.nixl_post),
    # to rows that lie by expert, where they lie: the Triton runner
    Edge(DeepEPLLDispatchOutput[Payload], DeepEPLLCombineInput, SlabRowsInput).pre(to_place.deepep_ll_in_place).post(home.deepep_ll_post),
    Edge(MooncakeDispatchOutput[Payload], MooncakeCombineInput, SlabRowsInput).pre(to_place.mooncake_in_place).post(home.mooncake_post),
    Edge(NixlDispatchOutput[Payload], NixlCombineInput, SlabRowsInput).pre(to_place.nixl_in_place).post(home.nixl_post),
    Edge(DeepEPv2ExpandedDispatchOutput[Payload], DeepEPv2ExpandedCombineInput, SegmentRowsInput)
    .pre(to_place.deepep_v2_expanded_in_place)
    .post(home.deepep_v2_expanded_post),
    Edge(DeepEPv2MaskedDispatchOutput[Payload], DeepEPv2ExpandedCombineInput, SegmentRowsInput)
    .pre(to_place.deepep_v2_masked_in_place)
    .post(home.deepep_v2_expanded_post),
    # to AITER
    Edge(StandardDispatchOutput[Payload], StandardCombineInput, AiterSinkInput).pre(to_aiter.standard_to_aiter).post(home.standard_post),
    Edge(DeepEPNormalDispatchOutput[Payload], DeepEPNormalCombineInput, AiterSinkInput)
    .pre(to_aiter.deepep_normal_to_aiter)
    .post(home.deepep_normal_post),
    Edge(DeepEPLLDispatchOutput[Payload], DeepEPLLCombineInput, AiterSinkInput).pre(to_aiter.deepep_ll_to_aiter).post(home.deepep_ll_post),
    Edge(DeepEPv2PlainDispatchOutput[Payload], DeepEPv2PlainCombineInput, AiterSinkInput)
    .pre(to_aiter.deepep_v2_plain_to_aiter)
    .post(home.deepep_v2_plain_post),
    Edge(DeepEPv2ExpandedDispatchOutput[Payload], DeepEPv2ExpandedCombineInput, AiterSinkInput)
    .pre(to_aiter.deepep_v2_expanded_to_aiter)
    .post(home.deepep_v2_expanded_post),
    Edge(DeepEPv2MaskedDispatchOutput[Payload], DeepEPv2ExpandedCombineInput, AiterSinkInput)
    .pre(to_aiter.deepep_v2_masked_to_aiter)
    .post(home.deepep_v2_expanded_post),
    Edge(MoriEPNormalDispatchOutput[Payload], MoriEPNormalCombineInput, AiterSlotInput)
    .pre(to_aiter.mori_normal_to_aiter)
    .post(home.mori_normal_post),
    Edge(MoriEPLLDispatchOutput[Payload], MoriEPLLCombineInput, AiterSlotInput).pre(to_aiter.mori_ll_to_aiter).post(home.mori_ll_post),
    Edge(MooncakeDispatchOutput[Payload], MooncakeCombineInput, AiterSinkInput).pre(to_aiter.mooncake_to_aiter).post(home.mooncake_post),
    Edge(NixlDispatchOutput[Payload], NixlCombineInput, AiterSinkInput).pre(to_aiter.nixl_to_aiter).post(home.nixl_post),
    # on the Ascend NPU
    Edge(AscendTPDispatchOutput[Payload], AscendTPCombineInput, FlatRowsInput).pre(to_ascend.ascend_tp_flat_pre).post(home_ascend.ascend_tp_post),
    Edge(DeepEPNormalNpuDispatchOutput[Payload], DeepEPNormalNpuCombineInput, FlatRowsInput)
    .pre(to_ascend.deepep_normal_npu_flat_pre)
    .post(home_ascend.deepep_normal_npu_post),
    Edge(DeepEPLLNpuDispatchOutput[Payload], DeepEPLLNpuCombineInput, FlatRowsInput)
    .pre(to_ascend.deepep_ll_npu_flat_pre)
    .post(home_ascend.deepep_ll_npu_post),
    Edge(AscendTPDispatchOutput[Payload], AscendTPCombineInput, AscendRowsInput).pre(to_ascend.ascend_tp_pre).post(home_ascend.ascend_tp_post),
    Edge(AscendTPDispatchOutput[Payload], AscendTPCombineInput, AscendSlicedRowsInput)
    .pre(to_ascend.ascend_tp_sliced_pre)
    .post(home_ascend.ascend_tp_sliced_post),
    Edge(DeepEPNormalNpuDispatchOutput[Payload], DeepEPNormalNpuCombineInput, AscendRowsInput)
    .pre(to_ascend.deepep_normal_npu_pre)
    .post(home_ascend.deepep_normal_npu_post),
    Edge(DeepEPLLNpuDispatchOutput[Payload], DeepEPLLNpuCombineInput, AscendRowsInput)
    .pre(to_ascend.deepep_ll_npu_pre)
    .post(home_ascend.deepep_ll_npu_post),
)

# ---- what has no row, and why -----------------------------------------------------------------------------------------------------

_GLOBAL = Unsupported(
    UnsupportedReason.ID_SPACE, "rows from MoRI have slots over all ranks, and AITER reads them with a mask over all slots (AiterSlotInput)"
)
_LOCAL = Unsupported(UnsupportedReason.ID_SPACE, "its rows have ids of this rank's experts, and AITER reads them with a sink (AiterSinkInput)")
_ON_NPU = Unsupported(UnsupportedReason.DEVICE, "its rows are on an Ascend NPU, and AITER runs on AMD GPUs")
_UNSORTED = Unsupported(UnsupportedReason.LAYOUT, "the NPU reads rows sorted by expert without gaps, which its own dispatchers alone deliver")
_SPREAD = Unsupported(UnsupportedReason.RANKS, "activations are gathered over the ranks among which experts are cut, and here each has other rows")
_OFF_NPU = Unsupported(UnsupportedReason.DEVICE, "its rows are on an Ascend NPU, and the runner that takes them where they lie runs on GPUs")
_NO_SLAB = Unsupported(UnsupportedReason.LAYOUT, "its rows are not in slabs, one of equal size for each expert")
_NO_SEGMENT = Unsupported(UnsupportedReason.LAYOUT, "its rows are not in segments, each behind the one before it, with a router weight a row")
_ARENAS: Final = (MoriEPNormalDispatchOutput, MoriEPLLDispatchOutput)
_NPU: Final = (AscendTPDispatchOutput, DeepEPNormalNpuDispatchOutput, DeepEPLLNpuDispatchOutput)
_NPU_INPUTS: Final = (AscendRowsInput, AscendSlicedRowsInput)
_SLABS: Final = (DeepEPLLDispatchOutput, MooncakeDispatchOutput, NixlDispatchOutput)
_SEGMENTS: Final = (DeepEPv2ExpandedDispatchOutput, DeepEPv2MaskedDispatchOutput)
_ON_GPUS: Final = tuple(row.key[0] for row in ROWS if row.key[1] is FlatRowsInput and row.key[0] not in _NPU)

UNSUPPORTED: Final[Mapping[Key, Unsupported]] = MappingProxyType(
    {
        **{(variant, AiterSinkInput): _GLOBAL for variant in _ARENAS},
        **{(row.key[0], AiterSlotInput): _LOCAL for row in ROWS if row.key[1] is AiterSinkInput},
        **{(variant, runner_input): _ON_NPU for variant in _NPU for runner_input in (AiterSinkInput, AiterSlotInput)},
        **{(variant, AscendSlicedRowsInput): _SPREAD for variant in (DeepEPNormalNpuDispatchOutput, DeepEPLLNpuDispatchOutput)},
        **{(variant, runner_input): _OFF_NPU for variant in _NPU for runner_input in (SlabRowsInput, SegmentRowsInput)},
        **{(variant, SlabRowsInput): _NO_SLAB for variant in _ON_GPUS if variant not in _SLABS},
        **{(variant, SegmentRowsInput): _NO_SEGMENT for variant in _ON_GPUS if variant not in _SEGMENTS},
        **{(row.key[0], runner_input): _UNSORTED for row in ROWS if row.key[0] not in _NPU for runner_input in _NPU_INPUTS},
    }
)

# ---- the table --------------------------------------------------------------------------------------------------------------------

TRANSITIONS: Final[Mapping[Key, Cell]] = MappingProxyType({**{row.key: row for row in ROWS}, **UNSUPPORTED})


def find(variant: type[AnyDispatchOutput], runner: AnyRunner) -> Row:
    """Return the row for a dispatch variant and the first input class of a runner that has one.

    Raises: UnsupportedError that names both sides and the reason of every cell that was looked at.
    """
    reasons: list[str] = []
    for runner_input in runner.inputs:
        cell = TRANSITIONS.get((get_origin(variant) or variant, runner_input))
        match cell:
            case Row():
                return cell
            case Unsupported():
                reasons.append(f"{runner_input.__qualname__}: {cell.reason.value} ({cell.detail})")
            case None:
                reasons.append(f"{runner_input.__qualname__}: not in the table")
    raise UnsupportedError(f"the runner {runner.name!r} has no way from {variant.__qualname__}: {'; '.join(reasons)}")


def connect(variant: type[DispatchOutput[P, C]], runner: AnyRunner) -> Callable[[DispatchOutput[P, C]], C]:
    """Return the experts' part of a layer for one dispatch variant. Raises: UnsupportedError as ``find``.

    The cast is sound by rule 3: the row was found by ``variant``, and ends at the combine class that ``variant`` names.
    """
    return cast("Callable[[DispatchOutput[P, C]], C]", find(variant, runner).bind(runner))
