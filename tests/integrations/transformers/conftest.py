"""Fixtures of the tests of the transformers integration."""

import pytest
import torch

from moe_typed.integrations.transformers import layers
from moe_typed.plan import Environment


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let plans be made as for a GPU; Triton's interpreter runs them."""

    def probe(device: torch.device) -> Environment:
        return Environment(device="cuda", device_name="interpreter", capability=(9, 0), libraries={"torch": "", "triton": ""})

    monkeypatch.setattr(layers, "probe_environment", probe)
