import torch

topk_idx_t: torch.dtype  # chosen when it was built: int64 unless asked otherwise

class Config:
    def __init__(
        self,
        num_sms: int = 20,
        num_max_nvl_chunked_send_tokens: int = 6,
        num_max_nvl_chunked_recv_tokens: int = 256,
        num_max_rdma_chunked_send_tokens: int = 6,
        num_max_rdma_chunked_recv_tokens: int = 256,
    ) -> None: ...
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int: ...
    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int: ...

class EventHandle:
    def __init__(self) -> None: ...
    def current_stream_wait(self) -> None: ...
