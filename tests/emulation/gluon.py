"""Gluon kernels for compute capability 9.x, run on the CPU: one thread for each warpgroup, and barriers that have phases and count bytes.

A kernel is executed from its source, without the imports. A matrix product reads its
operands when it is waited for, as late as the real one may, so that a stage that is given back too early can be seen to be. Copies are done at once.
"""

import ast
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Final, TypeAlias, cast, final, overload

import torch
from torch import Tensor

from tests.emulation.gluon_memory import Barrier, Barriers, Memory, Number, Pointer, Values, load, store, values

Kernel: TypeAlias = Callable[..., None]


@final
class _Program(threading.local):
    number = 0
    count = 1

    def __init__(self) -> None:
        self.products: list[Product] = []


_HERE: Final = _Program()


@final
class Product:
    """A matrix product that may not have been made yet."""

    def __init__(self, a: Memory, b: Memory, acc: "Values | Product", *, adds: bool) -> None:
        self._made: Values | None = None
        self._operands = (a, b, acc)
        self._adds = adds

    def make(self) -> None:
        a, b, acc = self._operands
        made = values(a.data.float() @ b.data.float())
        self._made = values(made + value_of(acc)) if self._adds else made

    def value(self) -> Values:
        if self._made is None:
            raise RuntimeError("a product is read that was not waited for")
        return self._made

    def if_made(self) -> "Values | Product":
        return self if self._made is None else self._made


def value_of(acc: Values | Product) -> Values:
    return acc.value() if isinstance(acc, Product) else acc


def multiply(a: Memory, b: Memory, acc: Values | Product, *, is_async: bool, use_acc: bool = True) -> Product:
    if not is_async:
        raise NotImplementedError("products here are asynchronous")
    _HERE.products.append(Product(a, b, acc, adds=use_acc))
    return _HERE.products[-1]


def wait_for_products(outstanding: int, deps: tuple[Values | Product, ...]) -> object:
    while len(_HERE.products) > outstanding:
        _HERE.products.pop(0).make()
    found = tuple(one.if_made() if isinstance(one, Product) else one for one in deps)
    return found[0] if len(found) == 1 else found


@final
class Descriptor:
    """A matrix of which the copy engine brings boxes; what lies outside is zero."""

    layout = None

    def __init__(self, matrix: Tensor, rows: int, columns: int) -> None:
        self.matrix = matrix
        self.box = (rows, columns)
        self.dtype = matrix.dtype


def bring(descriptor: Descriptor, corner: Sequence[Number], barrier: Barrier, to: Memory, pred: Tensor | bool = True) -> None:
    if not bool(pred):
        return
    rows, columns = descriptor.box
    if tuple(to.shape) != descriptor.box:
        raise ValueError(f"a box of {descriptor.box} does not fit {tuple(to.shape)}")
    row, column = (int(one) for one in corner)
    part = descriptor.matrix[row : row + rows, column : column + columns].float()
    box = torch.zeros(rows, columns)
    box[: part.shape[0], : part.shape[1]] = part
    to.data.copy_(box)
    barrier.change(0, -rows * columns * descriptor.matrix.element_size())


def specialize(parts: Sequence[tuple[Kernel, tuple[object, ...]]], warps: Sequence[int], registers: Sequence[int]) -> None:
    number, count = _HERE.number, _HERE.count
    raised: list[BaseException] = []

    def run(kernel: Kernel, arguments: tuple[object, ...]) -> None:
        _HERE.number, _HERE.count = number, count
        try:
            kernel(*arguments)
            if _HERE.products:
                raise RuntimeError("a warpgroup ends before its products")
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=part) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]


def allocate(dtype: torch.dtype, shape: Sequence[int], layout: None) -> Memory | Barriers:
    return Barriers(shape[0]) if dtype == torch.int64 else Memory(torch.full(shape, float("nan")).to(dtype))


def where(condition: Tensor | bool, one: Tensor | float, other: Tensor | float) -> Values:
    return values(torch.where(torch.as_tensor(condition), torch.as_tensor(one), torch.as_tensor(other)))


def _nothing(*_arguments: object, **_named: object) -> None: ...


@overload
def jit(function: Kernel) -> Kernel: ...
@overload
def jit(*, do_not_specialize: Sequence[str]) -> Callable[[Kernel], Kernel]: ...
def jit(function: Kernel | None = None, *, do_not_specialize: Sequence[str] = ()) -> Kernel | Callable[[Kernel], Kernel]:
    def same(made: Kernel) -> Kernel:
        return made

    return same if function is None else function


def init(barrier: Barrier, count: int) -> None:
    barrier.start(count)


def wait(barrier: Barrier, phase: Number) -> None:
    barrier.wait(phase)


def arrive(barrier: Barrier, *, count: int, pred: Tensor | bool = True) -> None:
    if bool(pred):
        barrier.change(count, 0)


def expect(barrier: Barrier, size: int) -> None:
    barrier.change(1, size)


def gather(to: Memory, pointer: Pointer) -> None:
    to.store(load(pointer))


def arrive_each(barrier: Barrier, increment_count: bool) -> None:
    barrier.change(128, 0)  # the threads of a warpgroup


def keep(value: Tensor, layout: None) -> Tensor:
    return value


def arange(start: int, end: int, layout: None) -> Values:
    return values(torch.arange(start, end))


def zeros(shape: Sequence[int], dtype: torch.dtype, layout: None) -> Values:
    return values(torch.zeros(*shape, dtype=dtype))


def program_id(axis: int) -> Values:
    return values(_HERE.number)


def num_programs(axis: int) -> Values:
    return values(_HERE.count)


def minimum(one: Number, other: Number) -> Tensor:
    return torch.minimum(torch.as_tensor(one), torch.as_tensor(other))


def largest(value: Tensor, axis: int) -> Tensor:
    return value.amax(axis)


def total(value: Tensor, axis: int) -> Tensor:
    return value.sum(axis)


def split(value: Tensor) -> tuple[Tensor, Tensor]:
    return value[..., 0], value[..., 1]


def join(one: Tensor, other: Tensor) -> Tensor:
    return torch.stack((one, other), -1)


def in_assembly(asm: str, constraints: str, args: list[Tensor], dtype: object, is_pure: bool, pack: int) -> tuple[Tensor, ...]:
    if asm.strip().startswith("//"):  # a comment: what goes in comes out
        return tuple(args)
    raise NotImplementedError(f"assembly is not run here: {asm}")


def _names() -> dict[str, object]:
    """Return what kernels import."""
    layouts = ("BlockedLayout", "SliceLayout", "NVMMADistributedLayout", "NVMMASharedLayout", "SwizzledSharedLayout")
    language: dict[str, object] = {
        **dict.fromkeys(layouts, _nothing),
        "float32": torch.float32,
        "int32": torch.int32,
        "int64": torch.int64,
        "exp": torch.exp,
        "abs": torch.abs,
        "maximum": torch.maximum,
        "minimum": minimum,
        "max": largest,
        "sum": total,
        "where": where,
        "tensor": Tensor,
        "constexpr": _same,
        "load": load,
        "store": store,
        "allocate_shared_memory": allocate,
        "warp_specialize": specialize,
        "arange": arange,
        "zeros": zeros,
        "to_tensor": values,
        "convert_layout": keep,
        "program_id": program_id,
        "num_programs": num_programs,
        "split": split,
        "join": join,
        "static_range": range,
        "inline_asm_elementwise": in_assembly,
    }
    return {
        "gluon": SimpleNamespace(jit=jit),
        "gl": SimpleNamespace(**language),
        "mbarrier": SimpleNamespace(MBarrierLayout=_nothing, init=init, wait=wait, arrive=arrive, expect=expect),
        "tma": SimpleNamespace(__all__=["async_load"], async_load=bring),
        "async_copy": SimpleNamespace(__all__=["async_load"], async_load=gather, mbarrier_arrive=arrive_each),
        "fence_async_shared": _nothing,
        "warpgroup_mma": multiply,
        "warpgroup_mma_wait": wait_for_products,
    }


def _same(value: object) -> object:
    return value


def kernel(name: str, paths: Sequence[Path], constants: dict[str, object]) -> Callable[[int, Sequence[object], dict[str, object]], None]:
    """Return a kernel that is defined in one of some files, to be run as so many programs, one after the other; ``constants``: what they import."""
    names = {**_names(), **constants}
    for path in paths:
        tree = ast.parse(path.read_text())
        tree.body = [one for one in tree.body if not isinstance(one, (ast.Import, ast.ImportFrom))]
        exec(compile(tree, str(path), "exec"), names)
    function = cast("Kernel", names[name])

    def run(programs: int, arguments: Sequence[object], named: dict[str, object]) -> None:
        for number in range(programs):
            _HERE.number, _HERE.count = number, programs
            function(*arguments, **named)

    return run
