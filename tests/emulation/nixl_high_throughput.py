"""The high-throughput methods of ``nixl_ep.Buffer``, which are not emulated: what they raise in the other mode alone."""

from abc import ABC
from typing import Never

from torch import Tensor

from tests.emulation.deep_ep_common import Config
from tests.emulation.events import EventOverlap
from tests.emulation.hazards import host_check


class HighThroughputMethods(ABC):
    """Methods that raise RuntimeError in low-latency mode, as the real ones, and NotImplementedError in their own."""

    def __init__(self, *, low_latency_mode: bool) -> None:
        self.low_latency_mode = low_latency_mode

    def _refuse(self) -> Never:
        host_check(not self.low_latency_mode, "the buffer was made for low latency")
        raise NotImplementedError("high throughput is not emulated")

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Never:
        """Raise."""
        self._refuse()

    def ht_dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        handle: tuple[Tensor, ...] | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Never:
        """Raise."""
        self._refuse()

    def ht_combine(
        self,
        x: Tensor,
        handle: tuple[Tensor, ...],
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Never:
        """Raise."""
        self._refuse()
