"""Layers for the emulated AITER: weights by random codes and scales, routings, and a plain float32 layer that shares no code with the emulation."""

import itertools
from collections.abc import Callable, Iterator
from typing import Final, Literal, TypeAlias, final

import attrs
import torch
from torch import Tensor

from tests.emulation.aiter.aiter import EmulatedAiter
from tests.emulation.aiter.dtypes import Gfx
from tests.emulation.aiter.enums import ActivationType, QuantType
from tests.emulation.aiter.library import Tuned, VersionName

Kind: TypeAlias = Literal["no", "per_tensor", "per_token_fp8", "per_token_int8", "per_128x128", "a4w4", "a16w4", "a8w4", "mxfp8"]
Space: TypeAlias = Literal["plain", "masked", "sink"]

KINDS: Final[tuple[Kind, ...]] = ("no", "per_tensor", "per_token_fp8", "per_token_int8", "per_128x128", "a4w4", "a16w4", "a8w4", "mxfp8")
L, H, I, K = 4, 256, 128, 3  # noqa: E741 - the letters of the contract
MASK: Final = (1, 0, 1, 1, 0, 1)  # four of six experts are here
FP8: Final = torch.float8_e4m3fn
FP8_MAX: Final = 448.0
E2M1: Final = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
BF16: Final = 2.0**-8  # half the distance of neighbours, relative
# The same of the activations' format. int8 has a fixed distance: half of amax / 127, where amax of 256 normal values is below 5 times their norm.
ROUNDING: Final[dict[Kind, float]] = {
    "no": 0.0,
    "a16w4": 0.0,
    "per_tensor": 2.0**-4,
    "per_token_fp8": 2.0**-4,
    "per_128x128": 2.0**-4,
    "a8w4": 2.0**-4,
    "mxfp8": 2.0**-4,
    "a4w4": 2.0**-2,
    "per_token_int8": 5 / 254,
}
_QUANT: Final = {
    "no": QuantType.No,
    "per_tensor": QuantType.per_Tensor,
    "per_token_fp8": QuantType.per_Token,
    "per_token_int8": QuantType.per_Token,
    "per_128x128": QuantType.per_128x128,
}


def make_aiter(
    kind: Kind = "no",
    mode: Literal["strict", "faithful"] = "strict",
    *,
    version: VersionName = "head",
    gfx: Gfx = "gfx950",
    tuned: Tuned | None = None,
    env: dict[str, str] | None = None,
) -> EmulatedAiter:
    """Return a library that chooses the activations of this kind for any number of rows below 256."""
    bound = {"AITER_BF16_FP8_MOE_BOUND": "0"} if kind == "a8w4" else {}
    return EmulatedAiter(version=version, gfx=gfx, mode=mode, env={**bound, **(env or {})}, tuned=tuned)


@final
@attrs.frozen
class Layer:
    """Weights as they go into ``fused_moe``, and as float32."""

    kind: Kind
    arguments: dict[str, object]
    w1: Tensor  # float32 (L, 2I, H), gate rows first
    w2: Tensor  # float32 (L, H, I)
    codes: tuple[Tensor, Tensor]  # w1 and w2 before their shuffle


def make_layer(library: EmulatedAiter, kind: Kind, fp8: torch.dtype = FP8) -> Layer:
    """Return a layer, shuffled by the library as its recipe says."""
    generator = torch.Generator().manual_seed(1)
    first = _matrix(kind, 2 * I, H, fp8, generator)
    second = _matrix(kind, H, I, fp8, generator)
    arguments: dict[str, object] = {"quant_type": _QUANT.get(kind, QuantType.per_1x32)}
    if kind == "a16w4":
        arguments["activation"] = ActivationType.Swiglu
    if kind == "a8w4":
        arguments["gate_mode"] = "interleave"
    for name, (codes, scale, _) in (("w1", first), ("w2", second)):
        arguments[name], arguments[f"{name}_scale"] = shuffle(library, kind, name, codes, scale)
    return Layer(kind, arguments, first[2], second[2], (first[0], second[0]))


def shuffle(library: EmulatedAiter, kind: Kind, name: str, codes: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return a weight and its scale as the recipe of the kind has them."""
    if kind not in ("a16w4", "a8w4", "mxfp8"):
        return library.shuffle_weight(codes), library.e8m0_shuffle(scale)
    gated = name == "w1" and kind != "a16w4"
    assert scale is not None
    by_tiles = kind == "mxfp8" and name == "w2"
    return (
        library.shuffle_weight_a16w4(codes, 16, gated),
        library.e8m0_shuffle(scale) if by_tiles else library.shuffle_scale_a16w4(scale, L, gated),
    )


def _matrix(kind: Kind, rows: int, columns: int, fp8: torch.dtype, generator: torch.Generator) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return codes, scales and float32 values of about the size 1 / sqrt(columns)."""
    normal = torch.randn(L, rows, columns, generator=generator)
    size = columns**-0.5
    if kind == "no":
        codes = (normal * size).to(torch.bfloat16)
        return codes, None, codes.float()
    if kind in ("a4w4", "a16w4", "a8w4"):
        codes = torch.randint(16, (L, rows, columns), generator=generator, dtype=torch.uint8)
        scale, factors = _mx_scales(rows, columns, size / 4, generator)
        packed = codes[..., 0::2] | codes[..., 1::2] << 4
        return packed.view(torch.float4_e2m1fn_x2), scale, E2M1[codes.long()] * factors
    if kind == "mxfp8":
        codes = (normal * 16).to(fp8)
        scale, factors = _mx_scales(rows, columns, size / 16, generator)
        return codes, scale, codes.float() * factors
    integers = kind == "per_token_int8"
    codes = (normal * 32).round().clamp(-127, 127).to(torch.int8) if integers else (normal * 32).to(fp8)
    shape = {"per_tensor": (L, 1, 1), "per_128x128": (L, rows // 128, columns // 128)}.get(kind, (L, rows, 1))
    scale = (0.5 + torch.rand(shape, generator=generator)) * size / 32
    factors = scale.repeat_interleave(rows // shape[1], 1).repeat_interleave(columns // shape[2], 2)
    return codes, scale.view(L, 1) if kind == "per_tensor" else scale, codes.float() * factors


def _mx_scales(rows: int, columns: int, size: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    middle = 127 + int(torch.tensor(size).log2().round())
    scale = torch.randint(middle - 1, middle + 2, (L * rows, columns // 32), generator=generator, dtype=torch.uint8)
    factors = torch.exp2(scale.float() - 127).view(L, rows, -1).repeat_interleave(32, -1)
    return scale.view(torch.float8_e8m0fnu), factors


@final
@attrs.frozen
class Routes:
    """A routing as it goes into ``fused_moe``, and the local experts that it means; -1 for those of other ranks."""

    ids: Tensor
    weights: Tensor
    mask: Tensor | None
    local: Tensor

    @property
    def arguments(self) -> dict[str, object]:
        return {"topk_ids": self.ids, "topk_weight": self.weights, "expert_mask": self.mask}

    def each(self) -> Iterator[tuple[int, int, int]]:
        """Yield row, slot and local expert of the routes that are computed here."""
        for row, slot in itertools.product(*map(range, self.local.shape)):
            if (expert := int(self.local[row, slot])) >= 0:
                yield row, slot, expert


def make_routes(tokens: int, space: Space = "plain", slots: int = K) -> Routes:
    """Return distinct experts for every row, some of them elsewhere unless the space is plain; the last row has none here then."""
    generator = torch.Generator().manual_seed(2)
    experts = L if space == "plain" else len(MASK)
    chosen = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :slots]
    weights = torch.rand(tokens, slots, generator=generator)
    if space == "plain":
        return Routes(chosen.to(torch.int32), weights, None, chosen)
    chosen[-1] = torch.tensor([1, 4, 1])  # not here
    here = torch.tensor([0, -1, 1, 2, -1, 3])
    local = here[chosen]
    if space == "masked":
        return Routes(chosen.to(torch.int32), weights, torch.tensor(MASK, dtype=torch.int32), local)
    mask = torch.tensor([1] * L + [0], dtype=torch.int32)
    return Routes(torch.where(local < 0, L, local).to(torch.int32), weights, mask, local)


def make_hidden(tokens: int) -> Tensor:
    return torch.randn(tokens, H, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)


def silu_gate(h: Tensor) -> Tensor:
    g, u = h.chunk(2, -1)
    return torch.nn.functional.silu(g) * u


def oai_gate(h: Tensor, limit: float = 7.0) -> Tensor:
    g, u = h.chunk(2, -1)
    g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    return g * torch.sigmoid(1.702 * g) * (u + 1)


def reference(layer: Layer, x: Tensor, routes: Routes, rounded: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Return the rows of a float32 layer. ``rounded``: what is done to the rows of both stages, nothing where None."""
    gate = oai_gate if layer.kind == "a16w4" else silu_gate
    keep = rounded or torch.clone
    result = torch.zeros(len(x), H)
    rows = keep(x.float())
    for row, slot, expert in routes.each():
        inter = gate(layer.w1[expert] @ rows[row])
        result[row] += routes.weights[row, slot] * (layer.w2[expert] @ keep(inter[None])[0])
    return result


def distance(left: Tensor, right: Tensor) -> float:
    """Return the relative error in the Euclidean norm."""
    return float(((left.float() - right.float()).square().sum() / right.float().square().sum()).sqrt())


def tolerance(kind: Kind) -> float:
    """Both stages round the activations, and each rounding of the gated intermediate counts for gate and up."""
    return 3 * ROUNDING[kind] + 4 * BF16


def rounded(kind: Kind) -> Callable[[Tensor], Tensor]:
    """Return the rounding of rows of a kind, told by values: the nearest of the format over a scale of the group."""

    def nearest(value: Tensor, group: int) -> Tensor:
        split = value.bfloat16().float().reshape(len(value), -1, group)
        amax = split.abs().amax(-1, keepdim=True)
        if kind == "a4w4":
            scale = torch.exp2(torch.ceil(torch.log2(amax / 6)))
            grid = torch.cat((E2M1[0::2], E2M1[1::2]))  # of two that are as near, the one with the even code comes first
            return (grid[((split / scale)[..., None] - grid).abs().argmin(-1)] * scale).view(value.shape)
        if kind in ("a8w4", "mxfp8"):
            scale = torch.exp2(torch.ceil(torch.log2(amax / FP8_MAX)))
        else:
            scale = amax / (127 if kind == "per_token_int8" else FP8_MAX)
        quotient = split / scale
        return ((quotient.round() if kind == "per_token_int8" else quotient.to(FP8).float()) * scale).view(value.shape)

    groups = {"per_128x128": 128, "a4w4": 32, "a8w4": 32, "mxfp8": 32}
    if kind in ("no", "a16w4"):
        return lambda value: value.bfloat16().float()
    return lambda value: nearest(value, groups.get(kind, value.shape[-1]))
