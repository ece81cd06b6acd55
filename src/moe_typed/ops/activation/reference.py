"""Activations in torch operations."""

import torch
from torch import Tensor

from .spec import E4M3_MAX, GROUP, Gate, Split


def activate(joined: Tensor, split: Split, gate: Gate) -> Tensor:
    """Return the activated rows, float32 (slots, inter), of ``joined`` (slots, 2 * inter)."""
    inter = joined.shape[1] // 2
    column = torch.arange(inter, device=joined.device) * split.step
    g = joined[:, split.gate + column].to(torch.float32).clamp(max=gate.limit)
    u = joined[:, split.up + column].to(torch.float32).clamp(-gate.limit, gate.limit)
    return g * torch.sigmoid(gate.alpha * g) * (u + gate.shift)


def activate_fp8(joined: Tensor, split: Split, gate: Gate) -> tuple[Tensor, Tensor]:
    """Return the activated rows as (float8_e4m3fn (slots, inter), float32 scales (slots, inter / 128)).

    The scale of a group is amax / 448; where that is zero it is 1, and where the group holds an infinity or a NaN it is NaN.
    """
    groups = activate(joined, split, gate).view(joined.shape[0], -1, GROUP)
    scale = groups.abs().amax(2) / E4M3_MAX
    scale = torch.where(scale == 0, 1.0, torch.where(torch.isfinite(scale), scale, torch.nan))
    return (groups / scale.unsqueeze(2)).to(torch.float8_e4m3fn).flatten(1), scale
