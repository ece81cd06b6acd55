"""What a plan says of the Triton runner's tiles: where they come from, on machines without a GPU too."""

import io
from pathlib import Path

import attrs
import pytest
import torch
from rich.console import Console

from moe_typed.cli.render import print_plan
from moe_typed.ops.product_plans.files import SHIPPED, VARIABLE, LayerKey, Origin, TunedPlan, read_tuned
from moe_typed.ops.product_plans.spec import How, Tile
from moe_typed.plan import Backend, Environment, MoEProblem, RunnerRequest, from_json, plan, probe_environment, to_json
from moe_typed.tuning import Store

H200 = Environment(device="cuda", device_name="NVIDIA H200", capability=(9, 0), libraries={"torch": "2.13.0", "triton": "3.9.0", "deep_ep": "2"})
QWEN = MoEProblem(num_experts=128, top_k=8, hidden=2048, inter=768, model="bf16", weights="bf16", activation="silu", rows=10)
SHIPPED_FILE = SHIPPED / "NVIDIA_H200.json"
TILE = Tile(16, 32, 128, 4, 4, 1)


@pytest.mark.parametrize(
    ("problem", "environment", "origin", "fragments"),
    [
        (QWEN, H200, Origin.DEVICE, ("NVIDIA H200", str(SHIPPED_FILE))),
        (attrs.evolve(QWEN, weights="fp8-block128"), H200, Origin.DEVICE, ()),
        (attrs.evolve(QWEN, model="fp16", weights="fp16"), H200, Origin.DEVICE, ()),
        (attrs.evolve(QWEN, activation="swiglu-oai"), H200, Origin.DEVICE, ()),
        (QWEN, attrs.evolve(H200, device_name="NVIDIA H100"), Origin.CAPABILITY, ("NVIDIA H200",)),
        (QWEN, attrs.evolve(H200, capability=(8, 9), device_name="NVIDIA L40S"), Origin.RULE, ("no file of NVIDIA L40S", "8.9")),
        (attrs.evolve(QWEN, inter=512), H200, Origin.RULE, ("inter 512", str(SHIPPED_FILE))),
        (attrs.evolve(QWEN, weights="mxfp8"), H200, Origin.RULE, ("mxfp8",)),
        (attrs.evolve(QWEN, activation="gelu-tanh"), H200, Origin.RULE, ("gelu-tanh",)),
        (attrs.evolve(QWEN, model="fp32", weights="fp32"), H200, Origin.RULE, ("fp32",)),
        (QWEN, attrs.evolve(H200, gfx="gfx942"), Origin.RULE, ("NVIDIA GPUs alone",)),
    ],
)
def test_a_plan_says_where_its_tiles_come_from(problem: MoEProblem, environment: Environment, origin: Origin, fragments: tuple[str, ...]) -> None:
    source = plan(attrs.evolve(problem, runner=RunnerRequest.TRITON), environment).product_plans
    assert source is not None
    assert source.origin is origin
    for fragment in fragments:
        assert fragment in str(source)


def test_other_runners_have_none_to_speak_of() -> None:
    assert plan(attrs.evolve(QWEN, runner=RunnerRequest.REFERENCE), H200).product_plans is None


def tuned(directory: Path, key: LayerKey) -> Environment:
    Store(directory, "NVIDIA H200", (9, 0)).put(key, TunedPlan(8, How.WALK, TILE, TILE))
    return attrs.evolve(H200, tuned=str(directory))


@pytest.mark.parametrize(
    ("backend", "key"),
    [
        (Backend.DEEPEP_NORMAL, LayerKey("bf16", 16, 8, 2048, 768)),
        (Backend.DEEPEP_LL, LayerKey("bf16", 16, 1, 2048, 768)),
    ],
)
def test_the_layer_is_looked_up_as_its_runner_meets_it(tmp_path: Path, backend: Backend, key: LayerKey) -> None:
    problem = attrs.evolve(QWEN, backend=backend, ranks=8, runner=RunnerRequest.TRITON)
    before, after = (plan(problem, environment).product_plans for environment in (H200, tuned(tmp_path, key)))
    assert before is not None
    assert after is not None
    assert (before.origin, after.origin) == (Origin.RULE, Origin.DEVICE)
    assert after.file == str(tmp_path / SHIPPED_FILE.name)


def test_rows_that_lie_by_expert_take_tiles_that_were_measured_with_more_routes_a_row() -> None:
    problem = attrs.evolve(QWEN, num_experts=256, hidden=7168, inter=2048, backend=Backend.DEEPEP_LL, ranks=8, runner=RunnerRequest.TRITON)
    source = plan(problem, H200).product_plans
    assert source is not None
    assert source.origin is Origin.RULE
    assert f"more routes a row alone ({SHIPPED_FILE})" in str(source)


def test_backends_with_one_route_a_row_are_those_whose_rows_have_an_expert() -> None:
    single = {backend for backend in Backend if backend.one_route_a_row}
    assert Backend.STANDARD not in single
    assert {Backend.DEEPEP_LL, Backend.MOONCAKE, Backend.NIXL, Backend.DEEPEP_V2_EXPANDED, Backend.ASCEND_TP} <= single
    assert not {Backend.DEEPEP_NORMAL, Backend.DEEPEP_V2_PLAIN, Backend.MORI_NORMAL, Backend.MORI_LL} & single


def test_the_tables_show_it_and_json_keeps_it() -> None:
    report = plan(QWEN, H200)
    printed = io.StringIO()
    print_plan(Console(width=400, file=printed), report)
    assert str(report.product_plans) in printed.getvalue()
    again = from_json(to_json(report))
    assert again == report
    assert again.product_plans == report.product_plans


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="which is no directory"):
        plan(QWEN, attrs.evolve(H200, tuned=str(tmp_path / "gone")))


def test_the_environment_of_this_machine_holds_what_the_variable_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert probe_environment(torch.device("cpu")).tuned == str(tmp_path)
    monkeypatch.delenv(VARIABLE)
    assert probe_environment(torch.device("cpu")).tuned == ""


def test_every_shipped_layer_is_found() -> None:
    for layer in read_tuned(SHIPPED_FILE).layers:
        weights = {"bf16": "bf16", "fp8": "fp8-block128"}[layer.format]
        problem = attrs.evolve(
            QWEN, num_experts=layer.experts, top_k=layer.top_k, hidden=layer.hidden, inter=layer.inter, weights=weights, runner=RunnerRequest.TRITON
        )
        source = plan(problem, H200).product_plans
        assert source is not None
        assert source.origin is Origin.DEVICE
