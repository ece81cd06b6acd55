from collections.abc import Callable
from typing import TypeAlias, cast

import pytest
import torch
import triton

from moe_typed.ops._launch import Launcher

Arguments: TypeAlias = tuple[object, ...]


class Compiled:
    """A compiled kernel that notes its launches."""

    def __init__(self, launches: list[tuple[str, object, Arguments]]) -> None:
        self._launches = launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments: self._launches.append(("compiled", grid, arguments))


class Jitted:
    """A jitted function that notes its launches; interpreted functions return None."""

    def __init__(self, *, interpreted: bool) -> None:
        self.launches: list[tuple[str, object, Arguments]] = []
        self._interpreted = interpreted

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Compiled | None]:
        def launch(*arguments: object, **constants: object) -> Compiled | None:
            self.launches.append(("jitted", grid, (*arguments, *constants.items())))
            return None if self._interpreted else Compiled(self.launches)

        return launch

    def warmup(self, *arguments: object, grid: tuple[int, ...], **constants: object) -> None:
        self.launches.append(("warmup", grid, (*arguments, *constants.items())))


def launcher(*, interpreted: bool = False) -> tuple[Launcher, Jitted]:
    jitted = Jitted(interpreted=interpreted)
    return Launcher(cast("triton.JITFunction[..., None]", jitted)), jitted


def test_triton_finds_a_variant_once_and_the_rest_is_launched_as_it_was_compiled() -> None:
    launch, jitted = launcher()
    a, b = torch.zeros(4), torch.zeros(8)
    launch(3, (a, None), (5, 0.5), {"K": 2, "LAST": True}, num_warps=1)
    launch(7, (b, None), (6, 1.5), {"K": 2, "LAST": True}, num_warps=1)
    assert jitted.launches == [
        ("jitted", (3,), (a, None, 5, 0.5, ("K", 2), ("LAST", True), ("num_warps", 1), ("num_stages", 3))),
        ("compiled", (7, 1, 1), (b, None, 6, 1.5, 2, True)),
    ]


@pytest.mark.parametrize(
    ("tensors", "constants", "num_warps"),
    [
        ((torch.zeros(4, dtype=torch.bfloat16), None), {"K": 2}, 1),
        ((torch.zeros(4), torch.zeros(4)), {"K": 2}, 1),
        ((torch.zeros(4), None), {"K": 3}, 1),
        ((torch.zeros(4), None), {"K": 2}, 4),
        ((torch.zeros(4)[1:], None), {"K": 2}, 1),
    ],
    ids=["dtype", "presence", "constant", "warps", "alignment"],
)
def test_what_can_make_another_variant_is_left_to_triton(
    tensors: tuple[torch.Tensor, torch.Tensor | None], constants: dict[str, int], num_warps: int
) -> None:
    launch, jitted = launcher()
    launch(1, (torch.zeros(4), None), (), {"K": 2}, num_warps=1)
    launch(1, tensors, (), constants, num_warps=num_warps)
    assert [how for how, _, _ in jitted.launches] == ["jitted", "jitted"]


def test_another_number_of_stages_is_another_variant() -> None:
    launch, jitted = launcher()
    for stages in (2, 4, 2):
        launch(1, (torch.zeros(4), None), (), {}, num_warps=1, num_stages=stages)
    assert [how for how, _, _ in jitted.launches] == ["jitted", "jitted", "compiled"]


def test_pointers_that_are_not_aligned_are_always_left_to_triton() -> None:
    launch, jitted = launcher()
    for first, second in [(0, 1), (1, 0), (1, 0)]:
        launch(1, (torch.zeros(8)[first:], torch.zeros(8)[second:]), (), {}, num_warps=1)
    assert [how for how, _, _ in jitted.launches] == ["jitted"] * 3


def test_interpreted_kernels_are_interpreted_each_time() -> None:
    launch, jitted = launcher(interpreted=True)
    for _ in range(2):
        launch(1, (torch.zeros(4),), (), {}, num_warps=1)
    assert [how for how, _, _ in jitted.launches] == ["jitted", "jitted"]


def test_over_tensors_without_memory_it_compiles_and_launches_nothing() -> None:
    launch, jitted = launcher()
    shape = torch.empty(4, device="meta")
    for _ in range(2):  # nothing is kept that could be launched
        launch(3, (shape, None), (5,), {"K": 2}, num_warps=1)
    assert jitted.launches == [("warmup", (3,), (shape, None, 5, ("K", 2), ("num_warps", 1), ("num_stages", 3)))] * 2
