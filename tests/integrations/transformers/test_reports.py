"""The table of expert layers, for plans of devices that are not here."""

import io

import attrs
import pytest
from rich.console import Console

from moe_typed.integrations.transformers.reports import LayerReport, print_layers
from moe_typed.plan import Environment, MoEProblem, plan

H200 = Environment(device="cuda", device_name="NVIDIA H200", capability=(9, 0), libraries={"torch": "2.13.0", "triton": "3.9.0"})
QWEN = MoEProblem(num_experts=128, top_k=8, hidden=2048, inter=768, model="bf16", weights="bf16", activation="silu", rows=1)


def printed(problem: MoEProblem, environment: Environment) -> str:
    found = plan(problem, environment)
    row = LayerReport(
        layer="layers.0",
        experts="Qwen3MoeExperts",
        plan=found,
        activation="silu",
        weights="Bf16ExpertWeights",
        steps=found.steps,
        relaid=0,
        copied=0,
        refusal="",
    )
    text = io.StringIO()
    print_layers([row], Console(file=text, width=300))
    return text.getvalue()


@pytest.mark.parametrize(
    ("problem", "environment", "tiles"),
    [
        (QWEN, H200, "; tiles tuned on this device"),
        (QWEN, attrs.evolve(H200, device_name="NVIDIA H100"), "; tiles tuned on another device of the same compute capability"),
        (attrs.evolve(QWEN, inter=512), H200, "; tiles by rule"),
    ],
)
def test_a_triton_layer_says_where_its_tiles_come_from(problem: MoEProblem, environment: Environment, tiles: str) -> None:
    assert f"silu: triton > combine{tiles} " in printed(problem, environment)


def test_other_runners_have_no_tiles_to_speak_of() -> None:
    assert "tiles" not in printed(QWEN, attrs.evolve(H200, device="cpu", capability=(0, 0)))
