"""Every operator of ``torch.ops.npu`` that the backend calls, in torch on the CPU.

It follows the documented maths, and shares no code with what it judges but the names of codes. Floats are computed in float32, integers exactly;
results are rounded once. What the operators leave undefined is poison. In strict mode a misuse that the device takes without a word raises
EmulatedMisuse; in faithful mode it has its consequence. What the operators refuse raises EmulatedRefusal in both.

Where documents conflict the newest counts: routing's MX modes follow the ceiling rule, and the groups of a product may have fewer rows than there
are. A row of zeros, of which documents say nothing, is quantised to zeros with the scale 0.
"""

from typing import final

from .activation import ActivationEmulation
from .distribute import DistributeEmulation
from .finalize import FinalizeEmulation
from .fused_matmul import FusedMatmulEmulation
from .gating import GatingEmulation
from .grouped_matmul import GroupedMatmulEmulation
from .packing import PackingEmulation
from .quantise import QuantiseEmulation
from .routing import RoutingEmulation


@final
class EmulatedAscendOps(
    GatingEmulation,
    RoutingEmulation,
    FinalizeEmulation,
    GroupedMatmulEmulation,
    FusedMatmulEmulation,
    ActivationEmulation,
    QuantiseEmulation,
    PackingEmulation,
    DistributeEmulation,
):
    """An ``AscendOps`` without a device."""
