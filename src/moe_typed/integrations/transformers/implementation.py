"""The experts implementation: what transformers calls in place of a module's own forward."""

from collections.abc import Callable
from typing import Final, Protocol, TypeAlias, cast, final

import attrs
import torch
from torch import Tensor, nn

from .layers import Found, Held, hold
from .options import Options

_HELD: Final = "_moe_typed_held"
_FOUND: Final = "_moe_typed_found"
_OWN: Final = "_moe_typed_options"

_Prepare: TypeAlias = Callable[[nn.Module, torch.dtype, int, Options], Held]


@final
@attrs.frozen(eq=False)
class ExpertsImplementation:
    """Run an experts module through the layer that it holds, which is prepared when it is first needed.

    A module holds its layer itself, so that both end together. ``options``: for every module that has none of its own.
    """

    options: Options

    def __call__(self, module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the experts' weighted sum (rows, hidden) in the dtype of ``hidden_states`` (rows, hidden); routes are (rows, k).

        Raises: UnsupportedError, with the reason, for a module that cannot be run.
        """
        options = options_of(module) or self.options
        held = held_by(module)
        if held is None or not held.serves(module, hidden_states, options):
            held = _prepare(module, hidden_states.dtype, top_k_index.shape[1], options)
        return held.run(hidden_states, top_k_index, top_k_weights)


def held_by(module: nn.Module) -> Held | None:
    """Return the layer that a module holds."""
    return cast("Held | None", getattr(module, _HELD, None))


def options_of(module: nn.Module) -> Options | None:
    """Return a module's own options."""
    return cast("Options | None", getattr(module, _OWN, None))


def give_options(module: nn.Module, options: Options) -> None:
    """Give a module options of its own; a layer that it holds is prepared again with them."""
    setattr(module, _OWN, options)


def found_by(module: nn.Module) -> Found | None:
    """Return what was found out of a module when its layer was last prepared."""
    return cast("Found | None", getattr(module, _FOUND, None))


def brought(module: nn.Module) -> bool:
    """Say whether accelerate brings a module's weights for each forward and takes them away after it (``device_map`` with offload)."""
    hook: object = getattr(module, "_hf_hook", None)
    hooks: tuple[object, ...] = getattr(hook, "hooks", (hook,))
    return any(bool(getattr(each, "offload", False)) for each in hooks)


def prepare(module: nn.Module, rows: torch.dtype, top_k: int, options: Options) -> Held:
    """Prepare a module's layer and let the module hold it, unless its weights are to go again: then it holds what was found out alone.

    Raises: UnsupportedError.
    """
    held = hold(module, rows, top_k, options, found_by(module))
    setattr(module, _FOUND, held.found)
    setattr(module, _HELD, None if brought(module) else held)
    return held


# Planning reads modules and tables in ways that dynamo does not trace; the graph breaks here once, and holds the layer ever after.
_REASON: Final = "an expert layer is prepared here: call moe_typed.integrations.transformers.prepare(model) before torch.compile(fullgraph=True)"


class _Disable(Protocol):
    def __call__(self, fn: _Prepare, /, *, reason: str) -> _Prepare: ...


_prepare = cast("_Disable", torch.compiler.disable)(prepare, reason=_REASON)  # pyright: ignore[reportUnknownMemberType]  torch types it by halves
