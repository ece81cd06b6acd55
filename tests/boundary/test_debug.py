"""The debug switch: blocks, threads, the environment, and what the values level reads."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import cast

import pytest
import torch
from jaxtyping import Float32
from torch import Tensor

from moe_typed import (
    BoundaryError,
    DebugLevel,
    DeviceCount,
    Fp8Block128Rows,
    LocalIds,
    LocalSinkIds,
    LogicalIds,
    MxFp8Rows,
    PhysicalIds,
    Routing,
    Settled,
    debug,
    debug_level,
    set_debug_level,
)
from moe_typed.boundary import BoundaryDefinitionError, boundary
from moe_typed.boundary.debug import LevelName
from moe_typed.formats import Payload
from moe_typed.routing import Ids
from moe_typed.stages import FlatRowsInput

OFF, LAYOUT, VALUES, STRICT = DebugLevel


@boundary
class Pair:
    x: Float32[Tensor, " n"]
    y: Float32[Tensor, " n"]


GOOD = (torch.zeros(2), torch.zeros(2))
BAD = (torch.zeros(2), torch.zeros(3))


@pytest.fixture(autouse=True)
def off() -> Iterator[None]:
    assert debug_level() is OFF
    yield
    assert debug_level() is OFF


def checks() -> bool:
    """Say whether construction checks now."""
    try:
        Pair(*BAD)
    except BoundaryError:
        return True
    return False


# ---- blocks ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", list(DebugLevel))
def test_a_block_holds_a_level_given_by_name_or_as_itself(level: DebugLevel) -> None:
    with debug(cast("LevelName", level.name.lower())) as held:
        assert held is debug_level() is level
        assert checks() is (level is not OFF)
    with debug(level):
        assert debug_level() is level
    assert not checks()


def test_layout_is_the_default() -> None:
    with debug() as level:
        assert level is LAYOUT


def test_blocks_nest_and_the_innermost_holds() -> None:
    with debug("strict"):
        with debug("off"):
            assert not checks()
            with debug("layout"), debug("layout"):
                assert debug_level() is LAYOUT
            assert debug_level() is OFF
        assert debug_level() is STRICT


def test_one_context_manager_object_serves_one_block_but_the_function_is_reentrant() -> None:
    with ExitStack() as stack:
        for level in (LAYOUT, VALUES, OFF, STRICT):
            stack.enter_context(debug(level))
            assert debug_level() is level


def test_an_exception_restores_the_level() -> None:
    with pytest.raises(KeyError), debug("values"), debug("strict"):
        raise KeyError
    assert debug_level() is OFF


def test_the_base_level_holds_outside_blocks_and_survives_them() -> None:
    try:
        with debug("strict"):
            set_debug_level("layout")
            assert debug_level() is STRICT
        assert debug_level() is LAYOUT
    finally:
        set_debug_level("off")


@pytest.mark.parametrize("name", ["", "on", "LAYOUT", "1", 1, None])
def test_an_unknown_level_is_refused_by_name(name: object) -> None:
    unknown = cast("LevelName", name)
    with pytest.raises(ValueError, match="debug level must be one of off, layout, values, strict; got ") as caught:
        set_debug_level(unknown)
    assert str(caught.value).endswith(repr(name))
    with pytest.raises(ValueError, match="debug level must be one of"), debug(unknown):
        raise AssertionError


def test_a_class_that_cannot_be_checked_leaves_the_switch_as_it_was() -> None:
    program = """
from jaxtyping import Float32
from torch import Tensor
from moe_typed import debug, debug_level, set_debug_level
from moe_typed.boundary import BoundaryDefinitionError, boundary

@boundary
class Bad:
    x: Float32[Tensor, "n**2"]

for attempt in range(2):
    try:
        with debug("layout"):
            raise SystemExit("the block was entered")
    except BoundaryDefinitionError as error:
        assert "Bad.x" in str(error)
    try:
        set_debug_level("layout")
    except BoundaryDefinitionError as error:
        assert "Bad.x" in str(error)
    else:
        raise SystemExit("the level was set")
    assert debug_level().name == "OFF"
    with debug("off"):
        pass
"""
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ | {"MOE_TYPED_DEBUG": ""})


# ---- threads -----------------------------------------------------------------------------------------------------------------------


def test_a_thread_that_began_before_the_block_sees_it() -> None:
    entered, left = threading.Event(), threading.Event()
    seen: list[bool] = []

    def work() -> None:
        seen.append(checks())
        for event in (entered, left):
            assert event.wait(10)
            seen.append(checks())

    thread = threading.Thread(target=work)
    thread.start()
    with debug("layout"):
        entered.set()
        while len(seen) < 2:
            pass
    left.set()
    thread.join()
    assert seen == [False, True, False]


@pytest.mark.parametrize("order", ["first opened, first closed", "first opened, last closed"])
def test_blocks_of_several_threads_close_in_any_order(order: str) -> None:
    levels = [LAYOUT, VALUES, STRICT]
    opened = [threading.Event() for _ in levels]
    close = [threading.Event() for _ in levels]

    def hold(number: int) -> None:
        with debug(levels[number]):
            opened[number].set()
            assert close[number].wait(10)

    threads = [threading.Thread(target=hold, args=(number,)) for number in range(len(levels))]
    for number, thread in enumerate(threads):
        thread.start()
        assert opened[number].wait(10)
        assert debug_level() is levels[number]  # the one entered last holds
    closing = [0, 1, 2] if order.endswith("first closed") else [2, 1, 0]
    after = [STRICT, STRICT, OFF] if order.endswith("first closed") else [VALUES, LAYOUT, OFF]
    for number, level in zip(closing, after, strict=True):
        close[number].set()
        threads[number].join()
        assert debug_level() is level


def test_toggling_while_other_threads_build_and_declare_raises_nothing() -> None:
    stop = threading.Event()
    errors: list[Exception] = []

    def build() -> None:
        try:
            while not stop.is_set():
                Pair(*GOOD)
        except Exception as error:
            errors.append(error)

    def declare() -> None:
        try:
            for _ in range(40):

                @boundary
                class Made:
                    x: Float32[Tensor, " n"]

                Made(GOOD[0])
        except Exception as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=work) for work in (build, build, declare)]
    try:
        for thread in threads:
            thread.start()
        for _ in range(1500):
            with debug("layout"):
                pass
        stop.set()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert errors == []


# ---- the environment ---------------------------------------------------------------------------------------------------------------


def run_with(value: str, program: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"MOE_TYPED_DEBUG": value}
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("value", "level"), [("layout", "LAYOUT"), ("Strict", "STRICT")])
def test_the_environment_sets_the_base_level(value: str, level: str) -> None:
    result = run_with(value, "import moe_typed; print(moe_typed.debug_level().name)")
    assert (result.stdout.strip(), result.stderr) == (level, "")


def test_an_unknown_level_in_the_environment_is_named() -> None:
    result = run_with("loud", "import moe_typed")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == "ValueError: MOE_TYPED_DEBUG: debug level must be one of off, layout, values, strict; got 'loud'"


# ---- the values level --------------------------------------------------------------------------------------------------------------


def routing(ids: object, space: type[Ids], *, live: int | DeviceCount | None = None, weights: Tensor | None = None, shared: int = 0) -> Routing[Ids]:
    topk_ids = torch.tensor(ids, dtype=torch.int32)
    weights = torch.ones(topk_ids.shape) if weights is None else weights
    return Routing(topk_ids, weights, space, 4, Settled(), True, topk_ids.shape[0] if live is None else live, shared)


def count(live: int) -> DeviceCount:
    return DeviceCount(torch.tensor([live], dtype=torch.int32))


def dispatched(payload: Payload) -> FlatRowsInput:
    return FlatRowsInput(payload, cast("Routing[LocalIds]", routing([[0]] * payload.rows, LocalIds)))


def fp8(scale: float) -> FlatRowsInput:
    return dispatched(Fp8Block128Rows(torch.zeros(1, 256).to(torch.float8_e4m3fn), torch.tensor([[1.0, scale]])))


def mxfp8(byte: int) -> FlatRowsInput:
    scale = torch.tensor([[127, byte]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    return dispatched(MxFp8Rows(torch.zeros(1, 64).to(torch.float8_e4m3fn), scale))


@pytest.mark.parametrize(
    ("build", "field", "reason"),
    [
        pytest.param(
            lambda: routing([[4]], LogicalIds), "topk_ids", "holds the id 4, but logical ids over 4 experts lie in -1..3", id="logical, high"
        ),
        pytest.param(lambda: routing([[-2]], LocalIds), "topk_ids", "holds the id -2, but local ids over 4 experts lie in -1..3", id="local, low"),
        pytest.param(
            lambda: routing([[-1]], PhysicalIds), "topk_ids", "holds the id -1, but physical ids over 4 experts lie in 0..3", id="no sentinel"
        ),
        pytest.param(
            lambda: routing([[5]], LocalSinkIds), "topk_ids", "holds the id 5, but local with sink ids over 4 experts lie in 0..4", id="sink"
        ),
        pytest.param(
            lambda: routing([[-1]], LocalSinkIds), "topk_ids", "holds the id -1, but local with sink ids over 4 experts lie in 0..4", id="-1"
        ),
        pytest.param(lambda: routing([[0], [1]], LogicalIds, live=3), "live", "is 3, but there are 2 rows", id="live, host"),
        pytest.param(lambda: routing([[0], [1]], LogicalIds, live=-1), "live", "is -1, but there are 2 rows", id="live, negative"),
        pytest.param(lambda: routing([[0], [1]], LogicalIds, live=count(3)), "live", "is 3, but there are 2 rows", id="live, device"),
        pytest.param(lambda: routing([[0, 1]], LogicalIds, shared=3), "num_shared", "is 3, but there are 2 columns", id="shared"),
        pytest.param(
            lambda: routing([[0]], LogicalIds, weights=torch.tensor([[float("nan")]])), "topk_weights", "holds an infinity or a NaN", id="nan weight"
        ),
        pytest.param(lambda: fp8(float("nan")), "scale", "holds an infinity or a NaN", id="nan scale"),
        pytest.param(lambda: fp8(float("inf")), "scale", "holds an infinity or a NaN", id="infinite scale"),
        pytest.param(lambda: mxfp8(255), "scale", "holds the byte 255, which is NaN", id="e8m0 255"),
    ],
)
def test_the_values_level_reads_the_data(build: Callable[[], object], field: str, reason: str) -> None:
    with debug("layout"):
        build()
    for level in (VALUES, STRICT):
        with debug(level), pytest.raises(BoundaryError) as caught:
            build()
        assert (caught.value.field, caught.value.reason) == (field, reason)
        assert caught.value.got
        assert field not in caught.value.bindings


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(lambda: routing([[0, 3], [-1, 2]], LogicalIds), id="in range"),
        pytest.param(lambda: routing([[0, 4]], LocalSinkIds), id="the sink"),
        pytest.param(lambda: routing([[0], [123456]], LogicalIds, live=1), id="ids beyond the live rows, host count"),
        pytest.param(
            lambda: routing([[0], [-7]], LogicalIds, live=count(1), weights=torch.tensor([[1.0], [float("nan")]])),
            id="ids and weights beyond the live rows, device count",
        ),
        pytest.param(lambda: routing([[99]], LogicalIds, live=0), id="no live row"),
        pytest.param(lambda: routing([list[int]()], LogicalIds), id="no column"),
        pytest.param(lambda: mxfp8(254), id="e8m0 254"),
        pytest.param(lambda: mxfp8(0), id="e8m0 0"),
    ],
)
def test_the_values_level_accepts(build: Callable[[], object]) -> None:
    with debug("strict"):
        build()


def test_there_is_no_data_on_the_meta_device_to_check() -> None:
    with debug("values"):
        Fp8Block128Rows(torch.empty(1, 256, dtype=torch.float8_e4m3fn, device="meta"), torch.empty(1, 2, device="meta"))
        DeviceCount(torch.empty(1, dtype=torch.int32, device="meta"))
        Routing(torch.empty(2, 1, dtype=torch.int32, device="meta"), torch.empty(2, 1, device="meta"), LogicalIds, 4, Settled(), True, 2)


def test_definition_errors_are_type_errors() -> None:
    assert issubclass(BoundaryDefinitionError, TypeError)
