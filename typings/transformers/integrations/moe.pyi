from collections.abc import Callable

from torch import Tensor, nn

class ExpertsInterface:
    @classmethod
    def register(cls, key: str, value: Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]) -> None: ...
    def get(self, key: str, /) -> Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor] | None: ...
    def pop(self, key: str, /) -> Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]: ...

ALL_EXPERTS_FUNCTIONS: ExpertsInterface

def use_experts_implementation(
    experts_class: type[nn.Module] | None = None,
    *,
    experts_interface: ExpertsInterface = ...,
    is_concatenated: bool = True,
    is_transposed: bool = False,
    has_bias: bool = False,
    has_gate: bool = True,
    has_post_expert_norm: bool = False,
) -> Callable[[type[nn.Module]], type[nn.Module]]: ...
