"""Wrong calls of AITER: what a hazard is, and how each kind of wrong argument is made."""

from collections.abc import Callable
from typing import Final, Literal, TypeAlias, final

import attrs
import pytest
import torch
from torch import Tensor

from tests.emulation.aiter.aiter import EmulatedAiter
from tests.emulation.aiter.enums import ActivationType, QuantType
from tests.emulation.aiter.library import Tuned, VersionName
from tests.emulation.aiter.misuse import EmulatedMisuse, Reason
from tests.emulation.aiter.shuffles import mark
from tests.emulation.aiter_cases import FP8, K, Kind, Layer, Routes, Space, distance, make_aiter, make_hidden, make_layer, make_routes

Arguments: TypeAlias = dict[str, object]
TOKENS: Final = 5
FNUZ: Final = torch.float8_e4m3fnuz


@final
@attrs.frozen
class Case:
    """A right call, to be spoilt."""

    library: EmulatedAiter
    layer: Layer
    routes: Routes
    hidden: Tensor

    @property
    def arguments(self) -> Arguments:
        return {"hidden_states": self.hidden, **self.layer.arguments, **self.routes.arguments}

    def weight(self, name: str) -> Tensor:
        found = self.layer.arguments[name]
        assert isinstance(found, Tensor)
        return found

    @property
    def mask(self) -> Tensor:
        assert self.routes.mask is not None
        return self.routes.mask


Change: TypeAlias = Callable[[Case], Arguments]
POISON: Final[Change] = lambda case: {}  # noqa: E731 - markers: the first is asked for by identity
NOISE: Final[Change] = lambda case: {}  # noqa: E731


@final
@attrs.frozen
class Hazard:
    """A wrong call. ``outcome``: POISON, NOISE, or the right call that has the same result in faithful mode."""

    reason: Reason
    operand: str
    change: Change
    outcome: Change
    kind: Kind = "no"
    space: Space = "plain"
    version: VersionName = "head"
    tuned: Tuned | None = None
    env: dict[str, str] = attrs.field(factory=dict[str, str])

    def case(self, mode: Literal["strict", "faithful"]) -> Case:
        """Return the right call."""
        library = make_aiter(self.kind, mode, version=self.version, tuned=self.tuned, env=self.env)
        return Case(library, make_layer(library, self.kind), make_routes(TOKENS, self.space), make_hidden(TOKENS))


def one_hot_id(case: Case, value: int) -> Arguments:
    ids = case.routes.ids.clone()
    ids[0, 0] = value
    return {"topk_ids": ids}


def twice(case: Case) -> Tensor:
    """Return ids whose first row has one expert in the first and last slot."""
    ids = case.routes.ids.clone()
    ids[0, 0] = ids[0, -1]
    return ids


def without_first_route(case: Case) -> Arguments:
    """Return a call that differs by the weight of that first slot: 0."""
    weights = case.routes.weights.clone()
    weights[0, 0] = 0
    return {"topk_weight": weights}


def strided(tensor: Tensor) -> Tensor:
    """Return the same values two apart."""
    return torch.stack((tensor, tensor), -1)[..., 0]


def transposed(tensor: Tensor) -> Tensor:
    """Return the same values, column-major."""
    return tensor.t().contiguous().t()


def quantised(case: Case, quant: QuantType, **options: object) -> Arguments:
    """Return rows that are quantised already, and their scale."""
    payload, scale = make_aiter(version="later").get_hip_quant(quant)(case.hidden, **options)
    return {"hidden_states": payload, "a1_scale": scale, "dtype": torch.bfloat16}


def mxfp8(case: Case) -> Arguments:
    return quantised(case, QuantType.per_1x32, quant_dtype=FP8, scale_type=torch.float8_e8m0fnu)


def scale_of(arguments: Arguments) -> Tensor:
    scale = arguments["a1_scale"]
    assert isinstance(scale, Tensor)
    return scale


def marked_plain(case: Case) -> Arguments:
    first, second = case.layer.codes
    return {"w1": mark(first.clone()), "w2": mark(second.clone())}


def word_ids(case: Case) -> Arguments:
    """Return the int32 ids that the words of int64 ids are."""
    return {"topk_ids": case.routes.ids.long().view(torch.int32).flatten()[: TOKENS * K].view(TOKENS, K)}


def long_ids(case: Case) -> Arguments:
    return {"topk_ids": case.routes.ids.long()}


def lane_weights(case: Case) -> Arguments:
    """Return the weights of fp8 activations, whose layout the kernels of the case do not read."""
    arguments = make_layer(case.library, "a8w4").arguments
    return {name: arguments[name] for name in ("w1", "w1_scale", "w2", "w2_scale")}


def many_slots(_: Case) -> Arguments:
    """Return 256 slots, one more than 8 bits of a sorted id tell from padding."""
    return {"topk_ids": torch.zeros(TOKENS, 256, dtype=torch.int32), "topk_weight": torch.ones(TOKENS, 256)}


def without_last(tensor: Tensor, columns: int) -> Tensor:
    """Return the tensor with its last columns zero."""
    kept = tensor.clone()
    kept[:, -columns:] = 0
    return kept


def two_routes(case: Case, mask: tuple[int, ...] | None) -> Arguments:
    """Return the ids 0 and 2 in every row: with a 2 in the mask before it, the id 2 means the third expert here, not the second."""
    ids = torch.tensor([[0, 2]] * TOKENS, dtype=torch.int32)
    expert_mask = None if mask is None else torch.tensor(mask, dtype=torch.int32)
    return {"topk_ids": ids, "topk_weight": case.routes.weights[:, :2].contiguous(), "expert_mask": expert_mask}


def count(value: int, dtype: torch.dtype = torch.int32) -> Arguments:
    return {"num_local_tokens": torch.tensor([value], dtype=dtype)}


def check_hazard(hazard: Hazard) -> None:
    """Let strict mode raise for a wrong call, and faithful mode have its outcome."""
    strict = hazard.case("strict")
    with pytest.raises(EmulatedMisuse) as raised:
        strict.library.fused_moe(**{**strict.arguments, **hazard.change(strict)})
    assert (raised.value.reason, raised.value.operand) == (hazard.reason, hazard.operand)
    faithful = hazard.case("faithful")
    out = faithful.library.fused_moe(**{**faithful.arguments, **hazard.change(faithful)})
    if hazard.outcome is POISON:
        assert out.isnan().all()
        return
    expected = faithful.library.fused_moe(**{**faithful.arguments, **({} if hazard.outcome is NOISE else hazard.outcome(faithful))})
    live = ~expected.isnan().any(1)
    if hazard.outcome is NOISE:
        assert not distance(out, expected) < 0.5  # the sum of squares of unrelated numbers is twice as large; NaN counts
    else:
        assert torch.equal(out.isnan().any(1), ~live)
        assert distance(out[live], expected[live]) < 2.0**-7  # sums of another order, rounded to bfloat16


def situ(*constants: float) -> Arguments:
    return {"activation": ActivationType.Situv2, **dict(zip(("beta", "linear_beta"), constants, strict=False))}
