"""Boundaries under ``torch.compile(fullgraph=True)``: construction, checks, and code that follows the switch after it was compiled."""

from collections.abc import Callable, Iterator
from typing import Annotated, Protocol

import pytest
import torch
from jaxtyping import Float32
from torch import Tensor
from torch._dynamo import lookup_backend

from moe_typed import DebugLevel, debug
from moe_typed.boundary import Dim, Layout, boundary

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # inductor's own import

BACKENDS = ["eager", "aot_eager", "inductor"]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@boundary
class Scaled:
    data: Annotated[Float32[Tensor, "rows hidden"], Layout(contiguous=True, align=4)]
    scale: Annotated[Float32[Tensor, "rows hidden//4"], Layout(stride="_ 1")]


@boundary
class Carried:
    """Every kind of field."""

    scaled: Scaled
    rows: Annotated[int, Dim("rows")]
    kind: type[Scaled]
    names: tuple[str, ...]
    extra: Float32[Tensor, " hidden"] | None = None


def step(data: Tensor, scale: Tensor) -> Tensor:
    scaled = Scaled(data, scale)
    carried = Carried(scaled, data.shape[0], Scaled, ("a", "b"))
    return carried.scaled.data + carried.scaled.scale.repeat_interleave(4, 1)


class Compile(Protocol):
    def __call__(
        self, model: Callable[..., object], /, *, backend: object, fullgraph: bool, dynamic: bool | None = None
    ) -> Callable[..., object]: ...


COMPILE: Compile = vars(torch)["compile"]  # its own annotations are partial


def compiled(backend: str, function: Callable[..., object] = step) -> Callable[..., object]:
    return COMPILE(function, backend=backend, fullgraph=True)


def build(data: Tensor, scale: Tensor) -> Tensor:
    return Scaled(data, scale).data + 1


GOOD = (torch.ones(3, 8), torch.ones(3, 2))
BAD = (torch.ones(3, 8), torch.ones(3, 3))  # three groups where two are right


@pytest.mark.parametrize("backend", BACKENDS)
def test_construction_traces_and_checks_follow_the_switch_both_ways(backend: str) -> None:
    run = compiled(backend, build)
    assert isinstance(run(*BAD), Tensor)  # off: nothing is looked at
    with debug("layout"):
        assert isinstance(run(*GOOD), Tensor)
        with pytest.raises(Exception, match="axis 1 is 3, expected hidden//4 = 2") as caught:
            run(*BAD)
        assert "BoundaryError" in str(caught.value)
        assert "Scaled.scale" in str(caught.value)
    assert isinstance(run(*BAD), Tensor)
    with debug("layout"), pytest.raises(Exception, match="axis 1 is 3, expected hidden//4 = 2"):
        run(*BAD)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("level", list(DebugLevel), ids=lambda level: str(level.name))
def test_every_kind_of_field_traces_at_every_level(backend: str, level: DebugLevel) -> None:
    run = compiled(backend)
    with debug(level):
        result = run(*GOOD)
        assert isinstance(result, Tensor)
        assert torch.equal(result, torch.full((3, 8), 2.0))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("level", [DebugLevel.OFF, DebugLevel.LAYOUT], ids=lambda level: str(level.name))
def test_rows_may_vary_without_a_new_graph_for_each(backend: str, level: DebugLevel) -> None:
    graphs = 0

    def counting(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        nonlocal graphs
        graphs += 1
        return lookup_backend(backend)(module, inputs)

    run = COMPILE(step, backend=counting, fullgraph=True, dynamic=True)
    with debug(level):
        for rows in (5, 2, 9, 3, 64):
            result = run(torch.full((rows, 8), 1.0), torch.full((rows, 2), float(rows)))
            assert isinstance(result, Tensor)
            assert torch.equal(result, torch.full((rows, 8), 1.0 + rows))
    assert graphs == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_objects_pass_into_and_out_of_a_compiled_function(backend: str) -> None:
    def double(scaled: Scaled) -> Scaled:
        return Scaled(scaled.data * 2, scaled.scale)

    run = compiled(backend, double)
    with debug("layout"):
        for _ in range(3):
            result = run(Scaled(*GOOD))
            assert isinstance(result, Scaled)
            assert torch.equal(result.data, torch.full((3, 8), 2.0))


def test_values_are_not_read_while_tracing() -> None:
    seen: list[object] = []

    @boundary
    class Reads:
        x: Float32[Tensor, " n"]

        def check_values(self) -> None:
            seen.append(self)
            raise AssertionError("read")

    def read(x: Tensor) -> Tensor:
        return Reads(x).x + 1

    with debug("values"):
        compiled("eager", read)(torch.zeros(2))
    assert seen == []
    with debug("values"), pytest.raises(AssertionError, match="read"):
        Reads(torch.zeros(2))
