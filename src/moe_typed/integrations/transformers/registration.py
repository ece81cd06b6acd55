"""Registering the implementation with transformers, and asking things of one model's layers."""

from collections.abc import Iterator
from typing import Final, cast

import torch
from torch import nn

from .implementation import ExpertsImplementation, give_options, held_by, options_of
from .implementation import prepare as prepare_module
from .layers import Held
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
    for name, module in model.named_modules():
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

    A layer that holds what the module has is kept. Raises: UnsupportedError, with the reason, for the first layer that cannot be run;
    RuntimeError before ``register``.
    """
    return tuple(held_now(module) for _, module in experts_of(model))


def held_now(module: nn.Module) -> Held:
    """Return the layer of an experts module, prepared if need be. Raises: as ``prepare``."""
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
