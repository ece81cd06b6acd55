"""One small dispatch output of each variant, made by hand: what libraries leave undefined holds NaN, and ids that there are not."""

import math
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias, TypeVar, cast

import attrs
import pytest
import torch
from torch import Tensor

from moe_typed import BoundaryError, DeviceCount, Fp32Rows, LocalIds, Payload, Pending, PhysicalIds, Routing, StandardDispatchOutput, debug
from moe_typed.boundary.debug import LevelName
from moe_typed.routing import Residence, RoutedScaling, contiguous_residence
from moe_typed.stages import (
    CombineInput,
    DeepEPLLDispatchOutput,
    DeepEPLLHandle,
    DeepEPNormalDispatchOutput,
    DeepEPNormalHandle,
    DeepEPv2ExpandedDispatchOutput,
    DeepEPv2ExpandedHandle,
    DeepEPv2MaskedDispatchOutput,
    DeepEPv2PlainDispatchOutput,
    DeepEPv2PlainHandle,
    DispatchOutput,
    Handle,
    MooncakeDispatchOutput,
    MooncakeHandle,
    MoriEPLLDispatchOutput,
    MoriEPLLHandle,
    MoriEPNormalDispatchOutput,
    MoriEPNormalHandle,
    NixlDispatchOutput,
    NixlHandle,
    PaddedPrefixSum,
    PaddedReceivedPerExpert,
    ReceivedPerExpert,
    SegmentEnds,
)

H = TypeVar("H", bound=Handle[object])

NAN: Final = math.nan
LOCAL, HIDDEN = 2, 8
"""Experts of this rank, and values in a row."""
SLOTS, FIRST = 6, 2
"""Slots over all ranks, and the first of this one."""
CAPACITY = 3
PENDING: Final = Pending(2.5)

AnyOutput: TypeAlias = DispatchOutput[Payload, CombineInput]
Routes: TypeAlias = list[tuple[int, float]]


class Owner:
    """A dispatcher that never combines: it makes handles, and discards those that a test leaves."""

    def __init__(self) -> None:
        self.made: list[Handle[object]] = []

    def handle(self, cls: type[H]) -> H:
        build: Callable[[object, object], H] = cls
        made = build(("what the library returned",), self)
        self.made.append(made)
        return made

    def close(self) -> None:
        for handle in self.made:
            if handle.open:
                handle.discard("the test is over")


@attrs.frozen(eq=False)
class Case:
    """A dispatch output, and for each of its rows the routes that its result sums: (local expert, weight); None for a row that is not live."""

    dispatched: AnyOutput
    routes: list[Routes | None]


def changed(made: object, level: LevelName = "strict", /, **changes: object) -> object:
    """Return a boundary object with other values in some fields, built at a debug level."""
    build: Callable[..., object] = type(made)
    with debug(level):
        return build(**vars(made) | changes)


def refused(made: object, level: LevelName = "layout", /, **changes: object) -> BoundaryError:
    """Return the error of the same; its field is the first of those that changed."""
    changed(made)
    with pytest.raises(BoundaryError) as caught:
        changed(made, level, **changes)
    return caught.value


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ids(*rows: list[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def weights(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float32)


def vector(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def device(live: int) -> DeviceCount:
    return DeviceCount(vector(live))


def rows_of(routes: list[Routes | None]) -> Fp32Rows:
    """Return rows of which those that are not live hold NaN."""
    data = random(len(routes), HIDDEN)
    data[[route is None for route in routes]] = NAN
    return Fp32Rows(data)


def local(topk_ids: Tensor, topk_weights: Tensor, live: int | DeviceCount, scaling: RoutedScaling = PENDING) -> Routing[LocalIds]:
    return Routing(topk_ids, topk_weights, LocalIds, LOCAL, scaling, True, live)


def origin(rows: int = 3) -> Routing[PhysicalIds]:
    """Return this rank's own routing, whose rows are not those that came."""
    return Routing(
        ids(*[[row % SLOTS, (row + 1) % SLOTS] for row in range(rows)]), random(rows, 2, seed=5).abs(), PhysicalIds, SLOTS, PENDING, True, rows
    )


def residence(first: int = FIRST) -> Residence[PhysicalIds]:
    return contiguous_residence(PhysicalIds, SLOTS, first, LOCAL, torch.device("cpu"))


# ---- flat rows with local ids ---------------------------------------------------------------------------------------------------------

_IDS = ids([0, -1], [1, 0], [-1, -1])
_WEIGHTS = weights([0.5, 0.25], [0.75, 0.125], [0.3, 0.4])  # those of routes to other ranks stand there, too
_ROUTES: Final[list[Routes]] = [[(0, 0.5)], [(1, 0.75), (0, 0.125)], []]


def _with_tail() -> tuple[Tensor, Tensor, list[Routes | None]]:
    """Return the rows above and two that nobody wrote."""
    return torch.cat((_IDS, ids([77, -9], [0, 1]))), torch.cat((_WEIGHTS, torch.full((2, 2), NAN))), [*_ROUTES, None, None]


def standard(owner: Owner) -> Case:
    topk_ids, topk_weights, routes = _with_tail()
    return Case(StandardDispatchOutput(rows_of(routes), local(topk_ids, topk_weights, 3)), routes)


def deepep_normal(owner: Owner) -> Case:
    received = PaddedReceivedPerExpert((4, 4), 4)
    dispatched = DeepEPNormalDispatchOutput(rows_of([*_ROUTES]), local(_IDS, _WEIGHTS, 3), received, owner.handle(DeepEPNormalHandle))
    return Case(dispatched, [*_ROUTES])


def deepep_normal_worst(owner: Owner) -> Case:
    """Return rows for the worst case: the host did not wait, and rows that are not real have -1 alone."""
    topk_ids, topk_weights = torch.cat((_IDS, ids([-1, -1], [-1, -1]))), torch.cat((_WEIGHTS, torch.zeros(2, 2)))
    routes: list[Routes | None] = [*_ROUTES, None, None]
    dispatched = DeepEPNormalDispatchOutput(rows_of(routes), local(topk_ids, topk_weights, 5), None, owner.handle(DeepEPNormalHandle))
    return Case(dispatched, [*_ROUTES, [], []])  # DeepEP sums them with nothing: they are zero


def deepep_v2_plain(owner: Owner) -> Case:
    topk_ids, topk_weights, routes = _with_tail()
    routing = local(topk_ids, topk_weights, device(3))
    return Case(DeepEPv2PlainDispatchOutput(rows_of(routes), routing, PaddedPrefixSum(vector(4, 8), 4), owner.handle(DeepEPv2PlainHandle)), routes)


# ---- segments -------------------------------------------------------------------------------------------------------------------------

_SEGMENTS: Final[list[Routes | None]] = [[(0, 0.5)], [(0, 0.25)], None, None, [(1, 0.75)], [(1, 2.0)], [(1, 0.125)], None, None]


def segments() -> tuple[Fp32Rows, Tensor, SegmentEnds]:
    """Return rows of two experts with two and three rows, from multiples of four on."""
    slot_weights = torch.tensor([NAN if routes is None else routes[0][1] for routes in _SEGMENTS])
    return rows_of(_SEGMENTS), slot_weights, SegmentEnds(vector(2, 7), 4)


def deepep_v2_expanded(owner: Owner) -> Case:
    return Case(DeepEPv2ExpandedDispatchOutput(*segments(), PENDING, owner.handle(DeepEPv2ExpandedHandle)), _SEGMENTS)


def deepep_v2_masked(owner: Owner) -> Case:
    return Case(DeepEPv2MaskedDispatchOutput(*segments(), 4, 2, PENDING, owner.handle(DeepEPv2ExpandedHandle)), _SEGMENTS)


# ---- slabs ----------------------------------------------------------------------------------------------------------------------------

_SLAB: Final[list[Routes | None]] = [[(0, 1.0)], None, None, [(1, 1.0)], [(1, 1.0)], None]
"""The library's combine applies the router's weights: here each row counts once."""


def deepep_ll(owner: Owner) -> Case:
    received = ReceivedPerExpert(vector(1, 2))
    return Case(DeepEPLLDispatchOutput(rows_of(_SLAB), received, CAPACITY, 2, origin(), owner.handle(DeepEPLLHandle)), _SLAB)


def mooncake(owner: Owner) -> Case:
    received = ReceivedPerExpert(vector(1, 2))
    return Case(MooncakeDispatchOutput(rows_of(_SLAB), received, CAPACITY, 2, origin(), owner.handle(MooncakeHandle)), _SLAB)


def nixl(owner: Owner) -> Case:
    received = ReceivedPerExpert(vector(1, 2))
    return Case(NixlDispatchOutput(rows_of(_SLAB), received, CAPACITY, 2, origin(), owner.handle(NixlHandle)), _SLAB)


# ---- arenas ---------------------------------------------------------------------------------------------------------------------------


def _arena() -> tuple[Fp32Rows, Routing[PhysicalIds], list[Routes | None]]:
    topk_ids = ids([FIRST, 0], [FIRST + 1, FIRST], [5, 1], [77, -1])
    topk_weights = weights([0.5, 0.25], [0.75, 0.125], [0.3, 0.4], [NAN, NAN])
    routes: list[Routes | None] = [*_ROUTES, None]
    return rows_of(routes), Routing(topk_ids, topk_weights, PhysicalIds, SLOTS, PENDING, True, device(3)), routes


def mori_normal(owner: Owner) -> Case:
    rows, routing, routes = _arena()
    handle = owner.handle(MoriEPNormalHandle)
    return Case(MoriEPNormalDispatchOutput(rows, routing, residence(), origin(), torch.bfloat16, handle), routes)


def mori_normal_staged(owner: Owner) -> Case:
    """Return rows with a view of staging memory that has room for one row more."""
    rows, routing, routes = _arena()
    staging = torch.full((5, HIDDEN), NAN, dtype=torch.bfloat16)[:4]
    handle = owner.handle(MoriEPNormalHandle)
    return Case(MoriEPNormalDispatchOutput(rows, routing, residence(), origin(), torch.bfloat16, handle, staging), routes)


def mori_ll(owner: Owner) -> Case:
    rows, routing, routes = _arena()
    return Case(MoriEPLLDispatchOutput(rows, routing, residence(), origin(), torch.bfloat16, owner.handle(MoriEPLLHandle)), routes)


Make: TypeAlias = Callable[[Owner], Case]
CASES: Final[Mapping[str, Make]] = {
    make.__name__: make
    for make in (
        standard,
        deepep_normal,
        deepep_normal_worst,
        deepep_v2_plain,
        deepep_v2_expanded,
        deepep_v2_masked,
        deepep_ll,
        mooncake,
        nixl,
        mori_normal,
        mori_normal_staged,
        mori_ll,
    )
}


def finals(base: type) -> list[type]:
    """Return the package's own classes right under a base."""
    below: list[type] = base.__subclasses__()
    return [cls for cls in below if cls.__module__.startswith("moe_typed.")]


HANDLES: Final = tuple(cast("list[type[Handle[object]]]", finals(Handle)))
