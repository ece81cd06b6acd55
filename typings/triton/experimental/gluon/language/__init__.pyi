# As in triton.language: every value is a tensor, shared memory, barriers and descriptors too. A constexpr is an int for checkers, and so is a layout.
from collections.abc import Sequence
from typing import Self

from triton import language as tl
from triton.language import abs as abs
from triton.language import atomic_add as atomic_add
from triton.language import constexpr as constexpr
from triton.language import dtype as dtype
from triton.language import exp as exp
from triton.language import float32 as float32
from triton.language import int32 as int32
from triton.language import int64 as int64
from triton.language import join as join
from triton.language import load as load
from triton.language import max as max
from triton.language import maximum as maximum
from triton.language import minimum as minimum
from triton.language import num_programs as num_programs
from triton.language import program_id as program_id
from triton.language import split as split
from triton.language import static_range as static_range
from triton.language import store as store
from triton.language import sum as sum
from triton.language import tensor as tensor
from triton.language import where as where

class BlockedLayout(int):
    def __new__(cls, size_per_thread: Sequence[int], threads_per_warp: Sequence[int], warps_per_cta: Sequence[int], order: Sequence[int]) -> Self: ...

class NVMMADistributedLayout(int):
    def __new__(cls, version: Sequence[int], warps_per_cta: Sequence[int], instr_shape: Sequence[int]) -> Self: ...

class NVMMASharedLayout(int):
    def __new__(cls, swizzle_byte_width: int, element_bitwidth: int, rank: int = ...) -> Self: ...

class SliceLayout(int):
    def __new__(cls, dim: int, parent: int) -> Self: ...

class SwizzledSharedLayout(int):
    def __new__(cls, vec: int, per_phase: int, max_phase: int, order: Sequence[int]) -> Self: ...

def allocate_shared_memory(element_ty: tl.dtype, shape: Sequence[int], layout: int) -> tensor: ...
def arange(start: int, end: int, layout: int) -> tensor: ...
def convert_layout(value: tensor, layout: int) -> tensor: ...
def inline_asm_elementwise(
    asm: str, constraints: str, args: Sequence[tensor], dtype: tuple[tl.dtype, tl.dtype], is_pure: bool, pack: int
) -> tuple[tensor, tensor]: ...
def to_tensor(x: tl.tensor | int) -> tensor: ...
def warp_specialize(
    functions_and_args: Sequence[tuple[object, tuple[tensor | float | None, ...]]], worker_num_warps: Sequence[int], worker_num_regs: Sequence[int]
) -> None: ...
def zeros(shape: Sequence[int], dtype: tl.dtype, layout: int) -> tensor: ...
