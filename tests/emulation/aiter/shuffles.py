"""The library's shuffle functions: they mark weights with ``is_shuffled`` where upstream does, and nothing else tells what they did."""

import math
from typing import final

import attrs
import torch
from torch import Tensor

from .library import Library
from .permutations import A16W4_LANES, A16W4_PACK, Layout, as_bytes, lanes, scale_lanes, scale_tiles, tiles

_POISON_SCALE = 0xFF  # e8m0 NaN: padding that upstream leaves uninitialised
_ONE = 0x7F  # e8m0 1.0: padding that upstream writes


def mark(tensor: Tensor) -> Tensor:
    """Set ``is_shuffled``, as upstream does and as callers do again after a view."""
    vars(tensor)["is_shuffled"] = True
    return tensor


def is_marked(tensor: Tensor) -> bool:
    """Ask as upstream asks."""
    return bool(getattr(tensor, "is_shuffled", False))


def padded_scale_shape(m: int, n: int) -> tuple[int, int]:
    """Return the shape that e8m0_shuffle pads to."""
    return math.ceil(m / 256) * 256, math.ceil(n / 8) * 8


def swizzle_scale(scale: Tensor) -> Tensor:
    """Return one-byte scales (m, n) in the order of e8m0_shuffle, padded with poison."""
    m, n = scale.shape
    padded = torch.full(padded_scale_shape(m, n), _POISON_SCALE, dtype=torch.uint8)
    padded[:m, :n] = as_bytes(scale)
    return scale_tiles(padded).view(scale.dtype)


@final
@attrs.frozen
class Shuffles:
    """The functions of ``aiter.ops.shuffle`` and ``aiter.utility.fp4_utils``, as one version has them."""

    _library: Library

    def shuffle_weight_wheel(self, x: Tensor, layout: tuple[int, int] = (16, 16), use_int4: bool = False) -> Tensor:
        """Shuffle in tiles: the wheel's parameters."""
        vector = 32 if use_int4 else 16 // x.element_size()
        shuffled = tiles(as_bytes(x), layout[0], 2 * layout[1], vector).view(x.dtype)
        if layout == (16, 16) and not use_int4:
            self._library.remember(shuffled, Layout.TILES)
        return mark(shuffled)

    def shuffle_weight(
        self,
        x: Tensor,
        layout: tuple[int, int] = (16, 16),
        use_int4: bool = False,
        is_guinterleave: bool = False,
        gate_up: bool = False,
        pad_k_to: int = 0,
    ) -> Tensor:
        """Shuffle in tiles or in lanes: the parameters of HEAD."""
        if pad_k_to < 0:
            raise ValueError(f"pad_k_to must not be negative, got {pad_k_to}")
        if pad_k_to and (use_int4 or is_guinterleave):
            raise NotImplementedError("pad_k_to with int4 or interleave")
        if is_guinterleave:
            return mark(self._lanes(x, layout[0], layout[1], gate_up=gate_up))
        original = x.shape[-1]
        if pad_k_to:
            padded = math.ceil(original / pad_k_to) * pad_k_to
            x = torch.cat((as_bytes(x), as_bytes(x).new_zeros(*x.shape[:-1], padded - original)), -1).view(x.dtype)
        shuffled = self.shuffle_weight_wheel(x, layout, use_int4)
        if pad_k_to:
            vars(shuffled).update(aiter_original_k=original, aiter_padded_k=x.shape[-1])
        return shuffled

    def shuffle_weight_a16w4(self, src: Tensor, NLane: int, gate_up: bool) -> Tensor:  # noqa: N803 - upstream's name
        """Shuffle in lanes. The wheel does not mark the result."""
        shuffled = self._lanes(src, NLane, A16W4_PACK, gate_up=gate_up)
        return shuffled if self._library.version.is_wheel else mark(shuffled)

    def _lanes(self, x: Tensor, n_lane: int, k_pack: int, *, gate_up: bool) -> Tensor:
        assert x.dim() == 3, f"expected three dimensions, got {x.dim()}"
        shuffled = lanes(as_bytes(x), n_lane, k_pack, gate_up=gate_up).view(x.dtype)
        if (n_lane, k_pack) == (A16W4_LANES, A16W4_PACK):
            self._library.remember(shuffled, Layout.GATED_LANES if gate_up else Layout.LANES)
        return shuffled

    def e8m0_shuffle(self, scale: Tensor | None) -> Tensor | None:
        """Shuffle e8m0 scales (m, n); None and float32 come back as they are."""
        if scale is None or scale.dtype is torch.float32:
            return scale
        assert scale.dim() == 2, f"expected two dimensions, got {scale.dim()}"
        shuffled = swizzle_scale(scale)
        self._library.remember(shuffled, Layout.SCALE_TILES)
        return shuffled

    def shuffle_scale(self, scale: Tensor | None) -> Tensor | None:
        """The same under its other name."""
        return self.e8m0_shuffle(scale)

    def shuffle_scale_a16w4(self, src: Tensor, experts_cnt: int | None, gate_up: bool) -> Tensor:
        """Shuffle e8m0 scales (L * n, k) for kernels that read lanes; k is padded to a multiple of 8 with ones."""
        if experts_cnt is None:
            raise ValueError("experts_cnt must be given")
        rows, k = src.shape
        padded = torch.full((rows, math.ceil(k / 8) * 8), _ONE, dtype=torch.uint8)
        padded[:, :k] = as_bytes(src)
        shuffled = scale_lanes(padded, experts_cnt, gate_up=gate_up).view(src.dtype)
        self._library.remember(shuffled, Layout.SCALE_GATED_LANES if gate_up else Layout.SCALE_LANES)
        return shuffled
