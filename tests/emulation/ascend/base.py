"""What the operators of one emulation share."""

from abc import ABC
from collections.abc import Mapping

from tests.emulation.hazards import Mode
from tests.emulation.world import Group

from .groups import Provenance
from .misuse import Device, Judge


class Emulation(ABC):
    """Operators on the CPU, without state but for what they remember of their results.

    Args:
        mode: what a misuse leads to.
        device: the series, on which some results depend.
        limits: whether documented limits count: sizes, which toy shapes break, and the devices of formats.
        groups: the groups of ranks by name, as this rank sees them.
        renorm_always: whether npu_moe_gating_top_k takes Renorm.ALWAYS, as newer kernels may.
    """

    def __init__(
        self,
        mode: Mode = "strict",
        device: Device = Device.A3,
        *,
        limits: bool = False,
        groups: Mapping[str, Group] | None = None,
        renorm_always: bool = False,
    ) -> None:
        self.judge = Judge(mode, device, limits)
        self.lists = Provenance()
        self.indices = Provenance()
        self.groups = dict(groups or {})
        self.renorm_always = renorm_always
