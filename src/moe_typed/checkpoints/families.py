"""The model families whose MoE blocks are known: what their config says, and what their tensors are called.

Each entry was compared with the modelling code of transformers. A family is only as large as that: an option that changes the mathematics and is not
implemented is refused by name.
"""

from collections.abc import Callable
from typing import Final, TypeAlias, final

import attrs
import torch
from torch import Tensor

from ..formats import GateUp, GateUpOrder, Interleaved
from ..routing import GroupedTopK, Pending, RoutedScaling, Selection, SoftmaxTopK, TopKSoftmax
from ..runners import Activation, SiluAndMul, SwigluOai
from .documents import Section
from .errors import CheckpointError

AnySelection: TypeAlias = Selection[RoutedScaling]


@final
@attrs.frozen
class SharedRule:
    """A shared expert: the module that holds it, its width, and the module of its sigmoid gate, where it has one."""

    module: str
    inter: int
    gate: str | None = None


@final
@attrs.frozen
class Rules:
    """What a config says of the MoE blocks of one model.

    ``select`` makes the selection rule from the correction bias, which is None unless ``corrected``. ``router_fp32``: whether the family
    computes router logits in float32, rather than in the dtype of the hidden states.
    """

    hidden: int
    inter: int
    num_experts: int
    top_k: int
    moe_layers: tuple[int, ...]
    activation: Activation
    select: Callable[[Tensor | None], AnySelection]
    corrected: bool = False
    router_fp32: bool = False
    shared: SharedRule | None = None


@final
@attrs.frozen
class Family:
    """One family: how it is named, how its config is read, and what its tensors are called within a decoder layer.

    ``blocks``: the names the MoE block goes by. ``projections``: gate, up and down of one expert. Stacked experts are called
    ``experts.gate_up_proj`` and ``experts.down_proj`` in every family; ``transposed`` says that they lie (experts, in, out).
    """

    name: str
    model_type: str
    stem: str
    read: Callable[[Section], Rules]
    blocks: tuple[str, ...] = ("mlp",)
    router: str = "gate"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    order: type[GateUpOrder] = GateUp
    transposed: bool = False
    biased: bool = False
    quantized: bool = True


def _sizes(config: Section) -> tuple[int, int]:
    """Return (experts, top_k)."""
    experts = config.integer("num_experts", "num_local_experts", "n_routed_experts")
    top_k = config.integer("num_experts_per_tok")
    if top_k > experts:
        raise config.fault("num_experts_per_tok", f"at most the number of experts, {experts}", top_k)
    return experts, top_k


def _softmax(top_k: int, *, renormalize: bool) -> Callable[[Tensor | None], AnySelection]:
    return lambda _: SoftmaxTopK(top_k, renormalize)


def _topk_softmax(top_k: int) -> Callable[[Tensor | None], AnySelection]:
    return lambda _: TopKSoftmax(top_k)


def _all_layers(config: Section, first: int = 0) -> tuple[int, ...]:
    return tuple(range(first, config.integer("num_hidden_layers")))


def _read_mixtral(config: Section) -> Rules:
    config.demand("hidden_act", ("silu",), required=True)
    experts, top_k = _sizes(config)
    return Rules(
        hidden=config.integer("hidden_size"),
        inter=config.integer("intermediate_size"),
        num_experts=experts,
        top_k=top_k,
        moe_layers=_all_layers(config),
        activation=SiluAndMul(),
        select=_softmax(top_k, renormalize=True),
    )


def _read_olmoe(config: Section) -> Rules:
    return attrs.evolve(_read_mixtral(config), select=_softmax(_sizes(config)[1], renormalize=config.boolean("norm_topk_prob")))


def _read_qwen3(config: Section) -> Rules:
    config.demand("hidden_act", ("silu",), required=True)
    experts, top_k = _sizes(config)
    step, dense = config.integer("decoder_sparse_step", default=1), config.integers("mlp_only_layers")
    return Rules(
        hidden=config.integer("hidden_size"),
        inter=config.integer("moe_intermediate_size"),
        num_experts=experts,
        top_k=top_k,
        moe_layers=tuple(layer for layer in _all_layers(config) if layer not in dense and (layer + 1) % step == 0),
        activation=SiluAndMul(),
        select=_softmax(top_k, renormalize=config.boolean("norm_topk_prob")),
    )


def _read_qwen2(config: Section) -> Rules:
    shared = SharedRule("shared_expert", config.integer("shared_expert_intermediate_size"), gate="shared_expert_gate")
    return attrs.evolve(_read_qwen3(config), shared=shared)


def _read_deepseek_v3(config: Section) -> Rules:
    config.demand("hidden_act", ("silu",), required=True)
    config.demand("scoring_func", ("sigmoid",))
    config.demand("topk_method", ("noaux_tc",))
    config.demand("moe_layer_freq", (1,))
    experts, top_k = _sizes(config)
    groups, taken = config.integer("n_group"), config.integer("topk_group")
    # A group's score is the sum of its two best, so that a group of one has none.
    if experts % groups or experts // groups < 2:
        raise config.fault("n_group", f"a divisor of the number of experts, {experts}, that leaves two or more to a group", groups)
    if taken > groups or taken * (experts // groups) < top_k:
        raise config.fault("topk_group", f"at most n_group, {groups}, and enough of them for {top_k} experts a token", taken)
    renormalize, factor = config.boolean("norm_topk_prob"), config.number("routed_scaling_factor")

    def select(bias: Tensor | None) -> AnySelection:
        correction = torch.zeros(experts) if bias is None else bias
        return GroupedTopK(top_k, "sigmoid", groups, taken, "top2_sum", renormalize, Pending(factor), correction)

    inter = config.integer("moe_intermediate_size")
    return Rules(
        hidden=config.integer("hidden_size"),
        inter=inter,
        num_experts=experts,
        top_k=top_k,
        moe_layers=_all_layers(config, first=config.integer("first_k_dense_replace", minimum=0)),
        activation=SiluAndMul(),
        select=select,
        corrected=True,
        router_fp32=True,
        shared=SharedRule("shared_experts", inter * config.integer("n_shared_experts")),
    )


def _read_gpt_oss(config: Section) -> Rules:
    # alpha was a constant of the modelling code before transformers made it an option.
    activation = SwigluOai(config.number("swiglu_alpha", default=SwigluOai().alpha), config.number("swiglu_limit"))
    rules = _read_mixtral(config)
    return attrs.evolve(rules, activation=activation, select=_topk_softmax(rules.top_k))


FAMILIES: Final = (
    Family("Mixtral", "mixtral", "Mixtral", _read_mixtral, blocks=("block_sparse_moe", "mlp"), projections=("w1", "w3", "w2")),
    Family("Qwen2-MoE", "qwen2_moe", "Qwen2Moe", _read_qwen2),
    Family("Qwen3-MoE", "qwen3_moe", "Qwen3Moe", _read_qwen3),
    Family("OLMoE", "olmoe", "Olmoe", _read_olmoe),
    Family("DeepSeek-V3", "deepseek_v3", "DeepseekV3", _read_deepseek_v3),
    Family("GLM-4-MoE", "glm4_moe", "Glm4Moe", _read_deepseek_v3),
    Family("gpt-oss", "gpt_oss", "GptOss", _read_gpt_oss, router="router", order=Interleaved, transposed=True, biased=True, quantized=False),
)

_HEADS: Final = ("Model", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


def find_family(config: Section) -> tuple[Family, Section]:
    """Return the family of a checkpoint and the part of its config that describes the text model.

    ``architectures`` and ``model_type``, where both are there, must name one family. A model of another kind whose ``text_config`` is of a
    known family is read as that.
    Raises: CheckpointError that lists the families.
    """
    text = config.section("text_config")
    inner = text.text("model_type") if text is not None else None
    if text is not None and inner is not None:
        family = next((family for family in FAMILIES if family.model_type == inner), None)
        if family is not None:
            return family, text
        raise _unknown(text, "model_type", inner)
    architectures, model_type = config.texts("architectures"), config.text("model_type")
    named = {family for family in FAMILIES for name in architectures if name in {family.stem + head for head in _HEADS}}
    if architectures and len(named) != 1:
        raise _unknown(config, "architectures", ", ".join(architectures))
    typed = next((family for family in FAMILIES if family.model_type == model_type), None)
    if model_type is not None and typed is None:
        raise _unknown(config, "model_type", model_type)
    family = next(iter(named), typed)
    if family is None:
        raise CheckpointError("is missing", file=config.file, subject="architectures", expected=_known(), got="nothing")
    if typed is not None and typed is not family:
        raise CheckpointError(
            f"architectures says {family.name}, but model_type says {typed.name}", file=config.file, subject="architectures", expected="one family"
        )
    return family, config


def _known() -> str:
    return ", ".join(f"{family.stem}ForCausalLM ({family.model_type})" for family in FAMILIES)


def _unknown(config: Section, name: str, value: str) -> CheckpointError:
    kind = "architecture" if name == "architectures" else name
    return CheckpointError(f"unknown {kind} {value!r}", file=config.file, subject=f"{config.place}{name}", expected=f"one of {_known()}", got=value)
