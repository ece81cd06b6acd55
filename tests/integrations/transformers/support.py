"""Small modules and models, and how outputs are compared."""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from moe_typed.integrations.transformers import NAME
from moe_typed.integrations.transformers.implementation import ExpertsImplementation
from moe_typed.integrations.transformers.options import Options
from moe_typed.integrations.transformers.survey import EXPERTS, HIDDEN, ExpertsClass
from moe_typed.plan import relative_error

TOP_K = 2
# Each of the six roundings on the way (two products, the function, its product with up, the weight, the sum) is half a unit in the last place:
# their root sum of squares is 2.5 half units; six is the most that they can be.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 6 * 2.0**-9}


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(rows: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows, ids that leave half of the experts without any, and weights in the dtype of the model."""
    generator = torch.Generator().manual_seed(seed + 1)
    ids = 2 * torch.stack([torch.randperm(EXPERTS // 2, generator=generator)[:TOP_K] for _ in range(rows)]) if rows else torch.zeros(0, TOP_K).long()
    weights = torch.rand(rows, TOP_K, generator=generator)
    return random(rows, HIDDEN, seed=seed, dtype=dtype), ids, weights.to(dtype)


def eager(module: nn.Module, hidden_states: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return cast("Tensor", module(hidden_states, ids, weights))


def typed(options: Options | None = None) -> Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]:
    return ExpertsImplementation(options or Options())


def error(got: Tensor, expected: Tensor) -> float:
    assert got.shape == expected.shape
    assert got.dtype is expected.dtype
    if not expected.numel():
        return 0.0
    return relative_error(got, expected)


def experts(module: str, name: str) -> ExpertsClass:
    return ExpertsClass(f"transformers.models.{module}.modeling_{module}", name)


QWEN = experts("qwen3_moe", "Qwen3MoeExperts")
GPT_OSS = experts("gpt_oss", "GptOssExperts")
NEMOTRON = experts("nemotron_h", "NemotronHExperts")
MUSE = experts("muse_spark", "MuseSparkExperts")
INKLING = experts("inkling2", "Inkling2Experts")

__all__ = ["NAME"]
