"""Checkpoints as transformers writes them, from tiny configs, and the MoE blocks they were written from."""

import importlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from moe_typed import (
    Bf16Rows,
    Experts,
    Fp32Rows,
    StandardDispatcher,
    bf16_as_is,
    fp32_as_is,
    prepare_reference,
)
from moe_typed.checkpoints import LayerWeights
from moe_typed.formats import AnyDenseRows
from moe_typed.runners import PreparedWeights, ReferenceRunner

# Imported by name: it is not typed as strictly as this project.
_transformers = importlib.import_module("transformers")

HIDDEN = 64

_COMMON = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "num_experts_per_tok": 3,
}
_QWEN = {"moe_intermediate_size": 32, "intermediate_size": 48, "num_experts": 8}
_GROUPED = {
    "intermediate_size": 48,
    "moe_intermediate_size": 32,
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
_MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
CONFIGS: Mapping[str, Mapping[str, object]] = {
    "mixtral": {"intermediate_size": 32, "num_local_experts": 8},
    "qwen2_moe": {**_QWEN, "shared_expert_intermediate_size": 40, "norm_topk_prob": False},
    "qwen3_moe": {**_QWEN, "norm_topk_prob": True, "mlp_only_layers": [0]},
    "olmoe": {"intermediate_size": 32, "num_experts": 8, "norm_topk_prob": False},
    "deepseek_v3": {**_GROUPED, **_MLA},
    "glm4_moe": _GROUPED,
    "gpt_oss": {"intermediate_size": 32, "num_local_experts": 8, "head_dim": 16},
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Tiny matrices gain nothing from threads, and lose much where tests run side by side."""
    _transformers.utils.logging.disable_progress_bar()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _randomize(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if ".mlp." not in name:
                continue
            spread = 0.3 if "correction" in name else 1.0 if "bias" in name else 1.5 * HIDDEN**-0.5
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * spread)


def _make(family: str, directory: Path, dtype: torch.dtype, shard: str, changes: Mapping[str, object]) -> nn.Module:
    config = _transformers.AutoConfig.for_model(family, **{**_COMMON, **CONFIGS[family], **changes})
    model = _transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation="eager")
    _randomize(model)
    model.save_pretrained(directory, max_shard_size=shard)
    return cast("nn.Module", model)


@pytest.fixture(scope="session")
def write_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., nn.Module]:
    """Write a model of one family to a directory and return it: ``(family, directory, dtype, shard, **config)``."""
    made: dict[str, tuple[nn.Module, Path]] = {}

    def write(family: str, directory: Path, dtype: torch.dtype = torch.float32, shard: str = "1GB", **changes: object) -> nn.Module:
        key = repr((family, dtype, shard, sorted(changes.items())))
        if key not in made:
            first = tmp_path_factory.mktemp(family)
            made[key] = _make(family, first, dtype, shard, changes), first
        model, first = made[key]
        shutil.copytree(first, directory, dirs_exist_ok=True)
        return model

    return write


@pytest.fixture
def block_output() -> Callable[[nn.Module, int, Tensor], Tensor]:
    """What the library's own MoE block returns for rows of hidden states."""

    def run(model: nn.Module, layer: int, hidden_states: Tensor) -> Tensor:
        block = model.get_submodule(f"model.layers.{layer}.mlp")
        with torch.no_grad():
            output = cast("Tensor | tuple[Tensor, Tensor]", block(hidden_states.unsqueeze(0)))
        return (output[0] if isinstance(output, tuple) else output).view(hidden_states.shape)

    return run


@pytest.fixture
def typed_output() -> Callable[[LayerWeights, Tensor], Tensor]:
    """What the typed layer makes of the same rows."""

    def run(weights: LayerWeights, hidden_states: Tensor) -> Tensor:
        prepared: PreparedWeights[ReferenceRunner, AnyDenseRows] = prepare_reference(weights.experts)
        experts = Experts(prepared, weights.activation)
        routing = weights.route(hidden_states)
        if hidden_states.dtype == torch.bfloat16:
            routed = StandardDispatcher(bf16_as_is).then(experts)(Bf16Rows(hidden_states), routing)
        else:
            routed = StandardDispatcher(fp32_as_is).then(experts)(Fp32Rows(hidden_states), routing)
        return weights.complete(routed, hidden_states)

    return run


@pytest.fixture
def edit_config() -> Callable[..., None]:
    """Change options of config.json: ``(directory, *dropped, **changed)``."""

    def edit(directory: Path, *dropped: str, **changed: object) -> None:
        path = directory / "config.json"
        config: dict[str, object] = {**json.loads(path.read_text()), **changed}
        path.write_text(json.dumps({name: value for name, value in config.items() if name not in dropped}))

    return edit


@pytest.fixture
def edit_tensors() -> Callable[..., None]:
    """Change the tensors of model.safetensors: ``(directory, change)``."""

    def edit(directory: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
        tensors = load_file(directory / "model.safetensors")
        change(tensors)
        save_file({name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}, directory / "model.safetensors")

    return edit
