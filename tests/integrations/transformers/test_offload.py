"""accelerate takes weights away after each forward and brings others before the next: what a device_map with offload does."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from moe_typed.integrations.transformers import NAME, layer_reports
from moe_typed.integrations.transformers.implementation import held_by
from moe_typed.integrations.transformers.registration import experts_of
from tests.integrations.transformers.test_models import make, registered, tokens

pytestmark = pytest.mark.usefixtures("registered")
__all__ = ["registered"]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return cast("torch.Tensor", model(tokens(), use_cache=False).logits)


@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss", "DeepseekV3"])
@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_a_model_in_parts_gives_what_it_gave_whole(name: str, place: str, tmp_path: Path) -> None:
    model = make(name)
    own = logits(model)
    model.save_pretrained(tmp_path / "model")
    layers = {f"model.layers.{layer}": place for layer in range(model.config.num_hidden_layers)}
    rest = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    loaded: Any = model.from_pretrained(
        tmp_path / "model", experts_implementation=NAME, device_map={**rest, **layers}, offload_folder=str(tmp_path / "offload")
    )
    for _ in range(2):
        assert torch.allclose(logits(loaded), own, rtol=1e-4, atol=1e-5)
    assert all(not row.refusal for row in layer_reports(loaded))
    if place == "disk":
        assert all(held_by(module) is None for _, module in experts_of(loaded))
