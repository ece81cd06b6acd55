"""Write the small checkpoint of ``moe-typed demo``: a two-layer Qwen3-MoE in the on-disk format that transformers writes, from a fixed seed."""

import json
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file

_EXPERTS: Final = 8
_TOP_K: Final = 2
_HIDDEN: Final = 256
_INTER: Final = 128
_LAYERS: Final = 2


def write_demo_checkpoint(folder: Path, seed: int = 0) -> None:
    """Write config.json, two shards and their index into an existing folder. Weights are bfloat16 and scaled as an initialised model's."""
    generator = torch.Generator().manual_seed(seed)

    def weight(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator).mul(columns**-0.5).to(torch.bfloat16)

    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": _HIDDEN,
        "intermediate_size": 2 * _HIDDEN,
        "moe_intermediate_size": _INTER,
        "num_hidden_layers": _LAYERS,
        "num_experts": _EXPERTS,
        "num_experts_per_tok": _TOP_K,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))

    index: dict[str, str] = {}
    total = 0
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}.mlp"
        tensors = {f"{prefix}.gate.weight": weight(_EXPERTS, _HIDDEN)}
        for expert in range(_EXPERTS):
            tensors[f"{prefix}.experts.{expert}.gate_proj.weight"] = weight(_INTER, _HIDDEN)
            tensors[f"{prefix}.experts.{expert}.up_proj.weight"] = weight(_INTER, _HIDDEN)
            tensors[f"{prefix}.experts.{expert}.down_proj.weight"] = weight(_HIDDEN, _INTER)
        shard = f"model-{layer + 1:05d}-of-{_LAYERS:05d}.safetensors"
        save_file(tensors, folder / shard, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, shard)
        total += sum(tensor.nbytes for tensor in tensors.values())
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
    (folder / "model.safetensors.index.json").write_text(text)
