"""Registering the implementation with transformers, and asking things of one model's layers."""

from collections.abc import Iterable, Iterator
from typing import Final, cast

import torch
from torch import nn

from .implementation import ExpertsImplementation, brought, found_by, give_options, held_by, options_of
from .implementation import prepare as prepare_module
from .layers import Found, Held
from .mxfp4 import MxFp4Experts
from .options import NAME, DebugChoice, Options, RunnerChoice, WireChoice

_MISSING: Final = "the integration needs transformers 5.17 or later: pip install 'moe-typed[transformers]'"
_FLAGS: Final = ("has_gate", "has_bias", "is_transposed", "is_concatenated")


def register(*, runner: RunnerChoice = "auto", wire: WireChoice = "auto", debug: DebugChoice | None = None, relay: bool = True) -> Options:
    """Add the experts implementation ``moe_typed`` to transformers, for dense and for fp8 experts; return the options that models then have.

    The arguments are those of Options. Registering again replaces the options of every model without its own. Raises: ImportError where
    transformers is missing or too old; as Options.
    """
    options = Options(runner=runner, wire=wire, debug=debug, relay=relay)
    try:
        from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as error:
        if error.name is not None and error.name.partition(".")[0] != "transformers":
            raise  # transformers is there, and lacks something itself
        raise ImportError(_MISSING) from error
    implementation = ExpertsImplementation(options)
    for interface in (ALL_EXPERTS_FUNCTIONS, ALL_FP8_EXPERTS_FUNCTIONS):
        interface.register(NAME, implementation)
    return options


def registered() -> ExpertsImplementation:
    """Return the implementation that is registered. Raises: RuntimeError where none is."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    found = ALL_EXPERTS_FUNCTIONS.get(NAME)
    if not isinstance(found, ExpertsImplementation):
        raise RuntimeError("the implementation is not registered: call moe_typed.integrations.transformers.register() first")
    return found


def experts_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module of a model that honours the experts interface, with its name."""
    modules = cast("Iterable[tuple[str, nn.Module]]", model.named_modules())
    for name, module in modules:
        if all(flag in vars(module) for flag in _FLAGS):
            yield name, module


def configure(
    model: nn.Module, *, runner: RunnerChoice = "auto", wire: WireChoice = "auto", debug: DebugChoice | None = None, relay: bool = True
) -> Options:
    """Give every expert layer of one model options of its own, whatever is registered. The arguments are those of Options."""
    options = Options(runner=runner, wire=wire, debug=debug, relay=relay)
    for _, module in experts_of(model):
        give_options(module, options)
    return options


def prepare(model: nn.Module) -> tuple[Held, ...]:
    """Prepare every expert layer of a model now: before ``torch.compile(fullgraph=True)``, or to meet a refusal before any numbers.

    A layer that holds what the module has is kept; one whose weights are brought for each forward is left to its forward. Raises: UnsupportedError,
    with the reason, for the first layer that cannot be run; RuntimeError before ``register``.
    """
    return tuple(_held_now(module) for _, module in experts_of(model) if not brought(module))


def find_out(module: nn.Module) -> Found:
    """Return what becomes of an experts module, whose layer is prepared for it unless its weights are away. Raises: as ``prepare``."""
    found = found_by(module)
    away = any(parameter.is_meta for parameter in module.parameters())
    return found if found is not None and away else _held_now(module).found


def _held_now(module: nn.Module) -> Held:
    options, held = options_of(module) or registered().options, held_by(module)
    dtype = rows_dtype(module)
    if held is not None and held.serves(module, torch.empty(0, dtype=dtype), options):
        return held
    return prepare_module(module, dtype, _top_k(module), options)


def rows_dtype(module: nn.Module) -> torch.dtype:
    """Return the dtype that a module's rows will have, as far as it can be known before they come: that of its config."""
    config: object = getattr(module, "config", None)
    dtype: object = getattr(config, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.get_default_dtype()


def _top_k(module: nn.Module) -> int:
    config: object = getattr(module, "config", None)
    return cast("int", getattr(config, "num_experts_per_tok", None) or 1)


def hold_mxfp4(model: nn.Module) -> tuple[str, ...]:
    """Replace the experts of a gpt-oss model by experts that hold mxfp4 under the names of its checkpoints; return the names of their modules.

    Their weights are zero until a state dict is loaded. Raises: ValueError for a model without gpt-oss experts; UnsupportedError for widths that
    mxfp4 does not divide; ImportError as ``register``.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    found = tuple((name, module) for name, module in experts_of(model) if type(module).__name__ == "GptOssExperts")
    if not found:
        raise ValueError("the model has no experts of gpt-oss")
    for name, module in found:
        model.set_submodule(name, MxFp4Experts(module, ALL_EXPERTS_FUNCTIONS).train(module.training))
    return tuple(name for name, _ in found)
