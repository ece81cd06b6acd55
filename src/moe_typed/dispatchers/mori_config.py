"""What is read of MoRI's configs. They are the library's own objects, made by the engine."""

from typing import Protocol

import torch


class Named(Protocol):
    """A member of an enum of the library."""

    @property
    def name(self) -> str:
        """Return the name of the member."""
        ...


class MoriConfig(Protocol):
    """What both versions have."""

    @property
    def rank(self) -> int:
        """Return the rank of this process."""
        ...

    @property
    def world_size(self) -> int:
        """Return how many ranks there are."""
        ...

    @property
    def hidden_dim(self) -> int:
        """Return how many values a row has, two of which may share a byte."""
        ...

    @property
    def scale_dim(self) -> int:
        """Return how many scales travel with a row."""
        ...

    @property
    def scale_type_size(self) -> int:
        """Return how many bytes a scale has."""
        ...

    @property
    def max_num_inp_token_per_rank(self) -> int:
        """Return the most rows that a rank may send."""
        ...

    @property
    def num_experts_per_rank(self) -> int:
        """Return how many slots a rank has."""
        ...

    @property
    def num_experts_per_token(self) -> int:
        """Return how many routes a row has."""
        ...

    @property
    def quant_type(self) -> str:
        """Return what combine makes of rows on the wire, which changes numbers."""
        ...


class MoriV1Config(MoriConfig, Protocol):
    """What ``mori.ops.EpDispatchCombineConfig`` has besides."""

    @property
    def kernel_type(self) -> Named:
        """Return the kernel, which decides on the mode."""
        ...

    @property
    def max_token_type_size(self) -> int:
        """Return the bytes of the widest value that travels."""
        ...

    @property
    def use_external_inp_buf(self) -> bool:
        """Return whether combine sends what it is given."""
        ...


class MoriV2Config(MoriConfig, Protocol):
    """What ``mori.ops.dispatch_combine_v2.EpDispatchCombineConfig`` has besides."""

    @property
    def data_type(self) -> torch.dtype:
        """Return the dtype of both ways, where none is given for each."""
        ...

    @property
    def dispatch_data_type(self) -> torch.dtype | None:
        """Return the dtype of dispatch."""
        ...

    @property
    def combine_data_type(self) -> torch.dtype | None:
        """Return the dtype of combine."""
        ...

    @property
    def combine_mode(self) -> str:
        """Return whether combine gathers or scatters."""
        ...
