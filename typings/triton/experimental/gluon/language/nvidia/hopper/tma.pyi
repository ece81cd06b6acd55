from collections.abc import Sequence

from triton.language import tensor

__all__ = ["async_copy_global_to_shared", "async_load"]

def async_copy_global_to_shared(
    tensor_desc: tensor, coord: Sequence[tensor | int], barrier: tensor, result: tensor, pred: tensor | bool = ...
) -> None: ...
def async_load(tensor_desc: tensor, coord: Sequence[tensor | int], barrier: tensor, result: tensor, pred: tensor | bool = ...) -> None: ...
