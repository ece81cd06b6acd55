"""AITER behind a typed facade. This file alone imports it, and only when it is asked to: the import builds extensions and asks for the GPU."""

import functools
import inspect
from typing import TYPE_CHECKING, Final, Protocol, final

import attrs
import torch
from torch import Tensor
from typing_extensions import override

from .probe import AiterFacts, RowBounds, probe_installed_aiter

if TYPE_CHECKING:
    from aiter import ActivationType, QuantType

_MISSING: Final = "the AITER runner needs AITER: pip install amd-aiter, or build ROCm/aiter for the installed ROCm"


class FusedMoe(Protocol):
    """``aiter.fused_moe.fused_moe`` as every version has it, with the arguments that the runner gives.

    Later versions have more; what is given of those stands behind a look at ``AiterFacts.parameters``.
    """

    def __call__(
        self,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weight: Tensor,
        topk_ids: Tensor,
        expert_mask: Tensor | None = ...,
        activation: "ActivationType" = ...,
        quant_type: "QuantType" = ...,
        doweight_stage1: bool = ...,  # the library's own order
        w1_scale: Tensor | None = ...,
        w2_scale: Tensor | None = ...,
        a1_scale: Tensor | None = ...,
        a2_scale: Tensor | None = ...,
        block_size_M: int | None = ...,  # noqa: N803 - the library's own name
        num_local_tokens: Tensor | None = ...,
        moe_sorting_dispatch_policy: int = ...,
        dtype: torch.dtype | None = ...,
        hidden_pad: int = ...,
        intermediate_pad: int = ...,
        bias1: Tensor | None = ...,
        bias2: Tensor | None = ...,
    ) -> Tensor:
        """Return the summed rows."""
        ...


@final
@attrs.frozen(eq=False, repr=False)
class AiterLibrary:
    """The names of AITER that the runner uses, and the facts of this AITER.

    The members of the enums are what pybind makes of them: objects with ``value`` and ``name``, for which no number stands.
    """

    facts: AiterFacts
    fused_moe: FusedMoe
    silu: "ActivationType"
    swiglu: "ActivationType"
    no_quant: "QuantType"
    per_tensor: "QuantType"
    per_token: "QuantType"
    per_128x128: "QuantType"
    per_1x32: "QuantType"

    @override
    def __repr__(self) -> str:
        """Return the version and the architecture; errors of boundaries quote it."""
        return f"AiterLibrary({self.facts.version}, {self.facts.gfx})"


@functools.cache
def load_aiter() -> AiterLibrary:
    """Import AITER, once, and return it with its facts.

    What signatures tell is read from the loaded functions; what they do not tell, from the source. Raises: ImportError where it is not installed.
    """
    installed = probe_installed_aiter()
    if installed is None:
        raise ImportError(_MISSING)
    from aiter import ActivationType, QuantType, get_hip_quant
    from aiter.fused_moe import fused_moe

    facts = attrs.evolve(
        installed,
        quantizes_mxfp8="scale_type" in inspect.signature(get_hip_quant(QuantType.per_1x32)).parameters,
        parameters=frozenset(inspect.signature(fused_moe).parameters),
        gfx=gfx_of(None),
        bounds=RowBounds.read(),
    )
    return AiterLibrary(
        facts,
        fused_moe,
        silu=ActivationType.Silu,
        swiglu=ActivationType.Swiglu,
        no_quant=QuantType.No,
        per_tensor=QuantType.per_Tensor,
        per_token=QuantType.per_Token,
        per_128x128=QuantType.per_128x128,
        per_1x32=QuantType.per_1x32,
    )


def gfx_of(device: torch.device | None) -> str | None:
    """Return the architecture of a GPU, such as "gfx950"; of the current one for None. None where torch is not built for ROCm, or sees no GPU."""
    if torch.version.hip is None or not torch.cuda.is_available():
        return None
    # torch does not annotate what get_device_properties returns
    name = str(torch.cuda.get_device_properties(device).gcnArchName)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    return name.partition(":")[0]  # features follow: gfx942:sramecc+:xnack-
