from collections.abc import Sequence

from triton.language import tensor

def async_copy_global_to_shared(
    tensor_desc: tensor, coord: Sequence[tensor | int], barrier: tensor, result: tensor, pred: tensor | bool = ...
) -> None: ...
