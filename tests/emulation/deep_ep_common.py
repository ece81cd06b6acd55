"""What the two generations of DeepEP's Python have in common: the id dtype, launch parameters, and what is checked first."""

from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor

from tests.emulation.hazards import host_check, python_check

topk_idx_t: Final = torch.int64

KNOWN_RANKS: Final = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)  # those with a tuned config
NODE: Final = 8  # ranks of one node


@final
@dataclass(frozen=True)
class Config:
    """Launch parameters, which the emulation has no use for."""

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return a number of bytes, a multiple of 128."""
        return self.num_max_nvl_chunked_recv_tokens * num_ranks * -(-hidden_bytes // 128) * 128

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return 0 for a single node, as the real one does."""
        return 0 if num_ranks <= NODE else self.num_max_rdma_chunked_recv_tokens * num_ranks * -(-hidden_bytes // 128) * 128


def check_torch_deterministic() -> None:
    """Refuse torch's deterministic mode when it fills what is not initialised, as the real library does: AssertionError."""
    fills: object = getattr(torch.utils.deterministic, "fill_uninitialized_memory")  # noqa: B009 - torch's stubs do not know it
    python_check(not (torch.are_deterministic_algorithms_enabled() and bool(fills)), "deterministic algorithms fill uninitialized memory")


def check_stream(previous_event: object, *, async_finish: bool, allocate_on_comm_stream: bool) -> None:
    """Check what ``allocate_on_comm_stream`` needs: RuntimeError."""
    host_check(
        not allocate_on_comm_stream or (previous_event is not None and async_finish), "allocate_on_comm_stream needs an event and async_finish"
    )


def check_ids(ids: Tensor) -> None:
    """Check routes: RuntimeError."""
    host_check(ids.dtype == topk_idx_t, f"topk_idx is {topk_idx_t}, not {ids.dtype}")
    host_check(ids.dim() == 2 and ids.is_contiguous(), "topk_idx is (tokens, topk), contiguous")
