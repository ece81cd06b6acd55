from collections.abc import Sequence

from triton.language import tensor

from . import mbarrier as mbarrier
from . import tma as tma

def fence_async_shared() -> None: ...
def warpgroup_mma(a: tensor, b: tensor, acc: tensor, *, use_acc: bool = ..., is_async: bool = ...) -> tensor: ...
def warpgroup_mma_wait(num_outstanding: int, deps: Sequence[tensor]) -> tensor: ...
