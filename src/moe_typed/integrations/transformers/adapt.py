"""From the tensors of an experts module to a weight class: the module's own memory wherever the layouts agree."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, final

import attrs
import torch
from torch import Tensor

from ...formats import (
    Bf16ExpertWeights,
    Bf16TransposedExpertWeights,
    Bf16UngatedExpertWeights,
    Fp8Block128ExpertWeights,
    Fp16ExpertWeights,
    Fp16TransposedExpertWeights,
    Fp16UngatedExpertWeights,
    Fp32ExpertWeights,
    Fp32TransposedExpertWeights,
    Fp32UngatedExpertWeights,
    GateUpOrder,
    MxFp4ExpertWeights,
    Ungated,
)
from ...runners import ReferenceCheckpoint, UnsupportedError
from .modules import Stored

_BLOCK: Final = 128

_Gated = Callable[[Tensor, Tensor, type[GateUpOrder], Tensor | None, Tensor | None], ReferenceCheckpoint]
_GATED: Final[Mapping[torch.dtype, _Gated]] = MappingProxyType(
    {torch.bfloat16: Bf16ExpertWeights, torch.float16: Fp16ExpertWeights, torch.float32: Fp32ExpertWeights}
)
_TRANSPOSED: Final[Mapping[torch.dtype, _Gated]] = MappingProxyType(
    {torch.bfloat16: Bf16TransposedExpertWeights, torch.float16: Fp16TransposedExpertWeights, torch.float32: Fp32TransposedExpertWeights}
)
_UNGATED: Final[Mapping[torch.dtype, Callable[[Tensor, Tensor, type[Ungated], Tensor | None, Tensor | None], ReferenceCheckpoint]]] = (
    MappingProxyType({torch.bfloat16: Bf16UngatedExpertWeights, torch.float16: Fp16UngatedExpertWeights, torch.float32: Fp32UngatedExpertWeights})
)


@final
@attrs.frozen(eq=False)
class Adapted:
    """Weights in a class of this project.

    ``relaid``: the bytes that were laid out anew in place. ``copied``: the bytes that are copies, which do not follow a change of the module's.
    """

    weights: ReferenceCheckpoint
    relaid: int = 0
    copied: int = 0


def adapt(stored: Stored, *, row_major: bool) -> Adapted:
    """Return a module's weights.

    ``row_major``: lay transposed matrices out anew, in place, if they are not row-major already; where one of the two is, the other follows in any
    case. Raises: UnsupportedError for a layout that no class of this project has, with the reason.
    """
    if stored.get(stored.first, "_blocks") is not None:
        return _mxfp4_blocks(stored)
    first, second = stored.need(stored.first), stored.need(stored.second)
    if first.dtype != second.dtype:
        raise UnsupportedError(f"the projections are {first.dtype} and {second.dtype}; both must have one dtype")
    if first.shape[0] != stored.num_experts or second.shape[0] != stored.num_experts:
        raise UnsupportedError(f"the projections hold {first.shape[0]} and {second.shape[0]} experts; the module counts {stored.num_experts}")
    if first.dtype in _GATED:
        return _dense(stored, first, second, row_major=row_major)
    if first.dtype is torch.float8_e4m3fn:
        return _fp8(stored, first, second)
    if first.dtype is torch.int8:
        return _packed_fp4(stored, first, second)
    raise UnsupportedError(f"weights are {first.dtype}, which no class of transformers' experts is known to hold")


def _dense(stored: Stored, first: Tensor, second: Tensor, *, row_major: bool) -> Adapted:
    dtype = first.dtype
    b13, b2, copied = _biases(stored, dtype)
    if stored.order is Ungated:
        if stored.transposed:
            raise UnsupportedError("weights are transposed and have no gate, which no class holds")
        return Adapted(_UNGATED[dtype](_dense_in_memory(first), _dense_in_memory(second), Ungated, b13, b2), copied=copied)
    if not stored.transposed:
        return Adapted(_GATED[dtype](_dense_in_memory(first), _dense_in_memory(second), stored.order, b13, b2), copied=copied)
    if not row_major and first.is_contiguous() and second.is_contiguous():
        return Adapted(_TRANSPOSED[dtype](first, second, stored.order, b13, b2), copied=copied)
    relaid = sum(_relay(tensor) for tensor in (first, second))
    return Adapted(_GATED[dtype](first.mT, second.mT, stored.order, b13, b2), relaid=relaid, copied=copied)


def _biases(stored: Stored, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None, int]:
    """Return both biases in ``dtype``, and the bytes of those that had to be copied for it."""
    b13, b2 = stored.get(stored.first, "_bias"), stored.get(stored.second, "_bias")
    copied = sum(bias.numel() * dtype.itemsize for bias in (b13, b2) if bias is not None and bias.dtype is not dtype)
    return None if b13 is None else b13.to(dtype), None if b2 is None else b2.to(dtype), copied


def _dense_in_memory(tensor: Tensor) -> Tensor:
    if not tensor.is_contiguous():
        raise UnsupportedError(f"a weight of shape {list(tensor.shape)} has strides {list(tensor.stride())}: make it contiguous")
    return tensor


def may_relay(stored: Stored) -> bool:
    """Say whether both projections are alone in their memory: a part of a larger tensor would no longer be one when it is laid out anew."""
    projections = stored.need(stored.first), stored.need(stored.second)
    return all(tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size() for tensor in projections)


def _relay(parameter: Tensor) -> int:
    """Make the memory of a parameter that of its transposed, row-major; return the bytes that were written. The parameter's values stay."""
    if parameter.mT.is_contiguous():
        return 0
    # What is made under inference_mode stays without gradients for ever: a parameter must not become that, whoever calls.
    with torch.inference_mode(parameter.is_inference()), torch.no_grad():
        parameter.data = parameter.detach().mT.contiguous().mT
    return parameter.numel() * parameter.element_size()


def _fp8(stored: Stored, first: Tensor, second: Tensor) -> Adapted:
    w13_scale, w2_scale = stored.need(stored.first, "_scale_inv"), stored.need(stored.second, "_scale_inv")
    if stored.get(stored.first, "_activation_scale") is not None:
        raise UnsupportedError("fp8 weights with static activation scales")
    if stored.order is Ungated or stored.transposed:
        raise UnsupportedError("fp8 weights without a gate, or transposed")
    experts, rows, hidden = first.shape
    inter = second.shape[2]
    if inter % _BLOCK or hidden % _BLOCK:
        raise UnsupportedError(f"fp8 weights of width {hidden} and {inter}: {_BLOCK} must divide both, or blocks of scales are cut")
    shapes = (experts, rows // _BLOCK, hidden // _BLOCK), (experts, hidden // _BLOCK, inter // _BLOCK)
    if (tuple(w13_scale.shape), tuple(w2_scale.shape)) != shapes:
        raise UnsupportedError(f"scales of fp8 weights are {list(w13_scale.shape)} and {list(w2_scale.shape)}; blocks of {_BLOCK} have {shapes}")
    copied = 0
    if w13_scale.dtype is not torch.float32:  # e8m0 ("ue8m0"): powers of two, which float32 holds exactly
        w13_scale, w2_scale = w13_scale.to(torch.float32), w2_scale.to(torch.float32)
        copied = 4 * (w13_scale.numel() + w2_scale.numel())
    return Adapted(Fp8Block128ExpertWeights(first, second, w13_scale, w2_scale, stored.order), copied=copied)


def _packed_fp4(stored: Stored, first: Tensor, second: Tensor) -> Adapted:
    """Two e2m1 values a byte, a scale for each 32 along the reduction (DeepSeek-V4's ``expert_dtype`` "fp4")."""
    w13_scale, w2_scale = stored.need(stored.first, "_scale_inv"), stored.need(stored.second, "_scale_inv")
    if w13_scale.dtype is not torch.float8_e8m0fnu:
        raise UnsupportedError(f"fp4 weights whose scales are {w13_scale.dtype}; mxfp4 has float8_e8m0fnu")
    fp4 = torch.float4_e2m1fn_x2
    return Adapted(MxFp4ExpertWeights(first.view(fp4), second.view(fp4), w13_scale, w2_scale, stored.order))


def _mxfp4_blocks(stored: Stored) -> Adapted:
    """gpt-oss: blocks uint8 (experts, rows, groups, 16) with scales uint8 (experts, rows, groups), which are e8m0."""
    blocks = [stored.need(name, "_blocks") for name in (stored.first, stored.second)]
    scales = [stored.need(name, "_scales").view(torch.float8_e8m0fnu) for name in (stored.first, stored.second)]
    w13, w2 = (block.flatten(2).view(torch.float4_e2m1fn_x2) for block in blocks)
    b13, b2, copied = _biases(stored, torch.bfloat16)
    return Adapted(MxFp4ExpertWeights(w13, w2, scales[0], scales[1], stored.order, b13, b2), copied=copied)
