"""Open a checkpoint directory, and load one MoE layer of it."""

import re
from pathlib import Path
from typing import final

import attrs
import torch

from ..formats import GateUp
from .assembly import Assembler, Assembly, Planner, ProgressCallback
from .documents import Section, read_object
from .errors import CheckpointError
from .families import Family, Rules, SharedRule, find_family
from .layer import LayerWeights, SharedExpert
from .quantization import DenseStorage, Quantization, Storage, read_quantization
from .stack import Experts, StackPlan, plan_stack
from .tensors import DTYPES, TensorIndex, TensorReader, read_index

_DENSE = ("BF16", "F16", "F32")
_SHOWN = 4  # names listed in one error


@final
@attrs.frozen(eq=False)
class Checkpoint:
    """An opened checkpoint: what its config says, and where its tensors are. No tensor has been read.

    ``model_dtype`` is None where the config of an unquantised model does not say; the tensors do then.
    """

    directory: Path
    family: Family
    rules: Rules
    quantization: Quantization | None
    model_dtype: torch.dtype | None
    index: TensorIndex = attrs.field(repr=False)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Return the numbers of the layers that are MoE."""
        return self.rules.moe_layers

    def load_layer(self, layer: int, progress: ProgressCallback | None = None, device: torch.device | str = "cpu") -> LayerWeights:
        """Return one MoE layer in checkpoint layout, on ``device``.

        Every tensor is checked by its header before any data is read; stacked tensors are allocated once and filled piece by piece, each of
        which ``progress`` is told of.
        Raises: CheckpointError for a layer that is not MoE, and for tensors that are missing, damaged, left over, or of the wrong shape or dtype.
        """
        if layer not in self.moe_layers:
            raise CheckpointError(
                f"layer {layer} is not a MoE layer", file=self.directory, expected=f"one of {_ranges(self.moe_layers) or 'none'}", got=str(layer)
            )
        with TensorReader(self.index) as reader:
            plan = _plan_layer(self, Planner(self.index, reader), layer)
            return plan.build(self, Assembler(reader, torch.device(device), plan.nbytes, progress))


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Return the checkpoint in a directory, its config and its tensor index validated.

    The directory holds ``config.json`` and ``model.safetensors``, or shards with ``model.safetensors.index.json``.
    Raises: CheckpointError for anything that is missing, damaged, contradictory, or not supported.
    """
    directory = Path(path)
    try:
        return _open(directory)
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror or error}", file=directory) from error


def _open(directory: Path) -> Checkpoint:
    if not directory.is_dir():
        raise CheckpointError(
            "is not a directory" if directory.exists() else "does not exist",
            file=directory,
            expected="a directory with config.json and safetensors",
            hint="" if directory.exists() else "a model on the Hugging Face hub must be downloaded first",
        )
    config = Section(directory / "config.json", read_object(directory / "config.json"))
    family, text = find_family(config)
    layers = text.integer("num_hidden_layers")
    quantization = read_quantization(config) or read_quantization(text)
    if quantization is not None and not family.quantized:
        raise CheckpointError(
            f"quantised weights of {family.name} are not supported", file=config.file, subject="quantization_config", expected="bf16, fp16 or fp32"
        )
    dtype = _read_dtype(text) or _read_dtype(config)
    if dtype is None and quantization is not None:
        raise text.fault("dtype", "the dtype of the hidden states, which quantised weights do not tell", None)
    index = read_index(directory)
    if layers > len(index.files):
        raise text.fault("num_hidden_layers", f"at most the number of tensors, {len(index.files)}", layers)
    return Checkpoint(directory, family, family.read(text), quantization, dtype, index)


def _read_dtype(config: Section) -> torch.dtype | None:
    names = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    found: torch.dtype | None = None
    for name in ("dtype", "torch_dtype"):
        text = config.text(name)
        if text is None:
            continue
        dtype = names.get(text.removeprefix("torch."))
        if dtype is None or found not in (None, dtype):
            raise config.fault(name, " or ".join(names) if dtype is None else f"the same as dtype, {found}", text)
        found = dtype
    return found


@final
@attrs.frozen(eq=False)
class _LayerPlan:
    """All tensors of one layer, checked by their headers and not yet read."""

    dtype: torch.dtype
    experts: StackPlan
    router: Assembly
    router_bias: Assembly | None
    correction: Assembly | None
    shared: StackPlan | None
    shared_gate: Assembly | None

    @property
    def nbytes(self) -> int:
        """Return the bytes that the layer will hold."""
        parts = (self.experts, self.router, self.router_bias, self.correction, self.shared, self.shared_gate)
        return sum(part.nbytes for part in parts if part is not None)

    def build(self, checkpoint: Checkpoint, assembler: Assembler) -> LayerWeights:
        """Read the tensors."""
        rules = checkpoint.rules
        shared = None
        if self.shared is not None:
            gate = assembler.make_optional(self.shared_gate)
            shared = SharedExpert(self.shared.build(assembler, GateUp), rules.activation, gate)
        return LayerWeights(
            experts=self.experts.build(assembler, checkpoint.family.order),
            activation=rules.activation,
            selection=rules.select(assembler.make_optional(self.correction)),
            router_weight=assembler.make(self.router),
            router_bias=assembler.make_optional(self.router_bias),
            router_fp32=rules.router_fp32,
            shared=shared,
            model_dtype=self.dtype,
        )


def _plan_layer(checkpoint: Checkpoint, planner: Planner, layer: int) -> _LayerPlan:
    family, rules = checkpoint.family, checkpoint.rules
    block, names = _find_block(checkpoint, layer)
    root = f"{block}.experts"
    stacked = _is_stacked(planner, root, names)
    experts = Experts(
        root, rules.num_experts, rules.inter, rules.hidden, family.projections, stacked=stacked, transposed=family.transposed, biased=family.biased
    )
    first = next(experts.first_matrices()).tensor
    dtype = checkpoint.model_dtype or planner.dtype(first, _DENSE)
    floats = tuple(name for name in _DENSE if DTYPES[name] in (dtype, torch.float32))
    hint = f"config.json says {rules.num_experts} experts, width {rules.hidden}" + (
        "" if checkpoint.model_dtype is None else f", dtype {_short(dtype)}"
    )
    router = planner.whole(f"{block}.{family.router}.weight", (rules.num_experts, rules.hidden), floats, hint)
    router_bias = planner.whole(f"{block}.{family.router}.bias", (rules.num_experts,), floats, hint) if family.biased else None
    correction = None
    if rules.corrected:
        bias = planner.whole(f"{block}.{family.router}.e_score_correction_bias", (rules.num_experts,), floats, hint)
        correction = attrs.evolve(bias, dtype=torch.float32)
    stack = plan_stack(planner, experts, *_storage(checkpoint.quantization, first, dtype))
    shared = gate = None
    if rules.shared is not None:
        shared = _plan_shared(checkpoint, planner, f"{block}.{rules.shared.module}", rules.shared, dtype)
        gate = planner.whole(f"{block}.{rules.shared.gate}.weight", (1, rules.hidden), floats, hint) if rules.shared.gate is not None else None
    _refuse_leftovers(checkpoint, planner, names)
    return _LayerPlan(dtype, stack, router, router_bias, correction, shared, gate)


def _plan_shared(checkpoint: Checkpoint, planner: Planner, root: str, rule: SharedRule, dtype: torch.dtype) -> StackPlan:
    experts = Experts(root, 1, rule.inter, checkpoint.rules.hidden, ("gate_proj", "up_proj", "down_proj"), numbered=False)
    return plan_stack(planner, experts, *_storage(checkpoint.quantization, next(experts.first_matrices()).tensor, dtype))


def _storage(quantization: Quantization | None, weight: str, dtype: torch.dtype) -> tuple[Storage, str]:
    """Return how a weight is stored, and what to say where it is not."""
    if quantization is not None and quantization.covers(weight.removesuffix(".weight")):
        return quantization.storage, "config.json says in quantization_config that this module is quantised"
    plain = "is not quantised" if quantization is None else "lists this module as not quantised"
    return DenseStorage(dtype), f"config.json {plain}, and the model's dtype is {_short(dtype)}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _find_block(checkpoint: Checkpoint, layer: int) -> tuple[str, list[str]]:
    """Return the module of a layer's MoE block, and the tensors within it.

    The block is ``PREFIX.layers.N.BLOCK``, where BLOCK is a name that the family uses, and PREFIX whatever stands before it: ``model`` in most
    checkpoints, ``language_model.model`` in others. Two blocks for one layer are refused.
    """
    family = checkpoint.family
    pattern = re.compile(rf"((?:.*\.)?layers\.{layer}\.(?:{'|'.join(family.blocks)}))\.(?:experts|{family.router})\.")
    marker = f"layers.{layer}."
    matches = (pattern.match(name) for name in checkpoint.index.files if marker in name)
    blocks = sorted({match.group(1) for match in matches if match is not None})
    if len(blocks) != 1:
        raise CheckpointError(
            f"layer {layer} has {'two MoE blocks' if blocks else 'no tensors of a MoE block'}",
            file=checkpoint.index.source,
            expected=f"tensors such as model.layers.{layer}.{family.blocks[0]}.{family.router}.weight ({family.name})",
            got=", ".join(blocks) or "nothing",
        )
    block = blocks[0]
    return block, [name for name in checkpoint.index.files if name.startswith(f"{block}.")]


def _is_stacked(planner: Planner, root: str, names: list[str]) -> bool:
    stacked = planner.has(f"{root}.gate_up_proj") or planner.has(f"{root}.down_proj")
    single = [name for name in names if re.match(rf"{re.escape(root)}\.\d+\.", name)]
    if stacked and single:
        raise CheckpointError(
            "there are both stacked and single experts", file=planner.index.source, subject=root, got=f"{root}.gate_up_proj and {single[0]}"
        )
    return stacked


def _refuse_leftovers(checkpoint: Checkpoint, planner: Planner, names: list[str]) -> None:
    """Refuse tensors of the block that nothing reads: they would change its mathematics, or belong to experts that the config does not count."""
    left = sorted(set(names) - planner.asked)
    if left:
        shown = ", ".join(left[:_SHOWN]) + (f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else "")
        raise CheckpointError(
            "the MoE block holds tensors that nothing reads",
            file=planner.file(left[0]),
            subject=left[0],
            expected=f"the tensors of {checkpoint.family.name} with {checkpoint.rules.num_experts} experts",
            got=shown,
        )


def _ranges(numbers: tuple[int, ...]) -> str:
    """Return numbers with runs shortened: ``0, 3-60``."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
