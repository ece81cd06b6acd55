"""gpt-oss in mxfp4 as its checkpoints store it: blocks and scales stay what they are, and nothing is dequantised but by a runner that must."""

from typing import Protocol, cast, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from ...formats import Interleaved
from ...runners import SwigluOai, UnsupportedError
from .implementation import ExpertsImplementation
from .options import NAME

_GROUP = 32  # values along the reduction that share a scale; two of them lie in a byte

_CHOSEN = "_experts_implementation"  # the field of a config that names it


class _GptOss(Protocol):
    """What is read of the module that is replaced."""

    num_experts: int
    hidden_size: int
    intermediate_size: int
    alpha: float
    limit: float
    config: object


class _Registered(Protocol):
    def get(self, key: str, /) -> object: ...


@final
class MxFp4Experts(nn.Module):
    """The experts of a gpt-oss layer in mxfp4, under the names of its checkpoints.

    ``gate_up_proj_blocks``: uint8 (experts, 2 * inter, hidden // 32, 16), two e2m1 values a byte, the low nibble first; gate and up alternate.
    ``gate_up_proj_scales``: uint8 (experts, 2 * inter, hidden // 32), e8m0. ``gate_up_proj_bias``: bf16 (experts, 2 * inter). ``down_proj_*`` alike,
    of (experts, hidden, inter). Raises: UnsupportedError for widths that 32 does not divide.
    """

    def __init__(self, replaced: nn.Module, interface: _Registered) -> None:
        super().__init__()
        source = cast("_GptOss", replaced)
        experts, hidden, inter = source.num_experts, source.hidden_size, source.intermediate_size
        if hidden % _GROUP or inter % _GROUP:
            raise UnsupportedError(f"mxfp4 has a scale for {_GROUP} values, which does not divide hidden = {hidden} or inter = {inter}")
        self.config = source.config
        self.num_experts = experts
        self.has_gate, self.has_bias, self.has_post_expert_norm = True, True, False
        self.is_transposed, self.is_concatenated = False, False
        self._is_expert_parallel = False
        self._activation = SwigluOai(float(source.alpha), float(source.limit))
        self._interface = interface
        for name, rows, depth in (("gate_up_proj", 2 * inter, hidden), ("down_proj", hidden, inter)):
            groups = depth // _GROUP
            for role, shape, dtype in (
                ("blocks", (experts, rows, groups, _GROUP // 2), torch.uint8),
                ("scales", (experts, rows, groups), torch.uint8),
                ("bias", (experts, rows), torch.bfloat16),
            ):
                self.register_parameter(f"{name}_{role}", nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False))

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        return self._activation.activate(gate_up, Interleaved)

    @override
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Run the layer. Raises: RuntimeError where the model's experts implementation is another, which could not read these weights."""
        implementation = self._interface.get(NAME)
        if getattr(self.config, _CHOSEN) != NAME or not isinstance(implementation, ExpertsImplementation):
            raise RuntimeError(f"mxfp4 blocks are run by {NAME!r} alone: register(), and model.set_experts_implementation({NAME!r})")

        return implementation(self, hidden_states, top_k_index, top_k_weights)
