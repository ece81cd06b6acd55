"""Hugging Face transformers as a client: ``register()`` adds the experts implementation ``moe_typed``.

After it, ``model.set_experts_implementation("moe_typed")``, or ``experts_implementation="moe_typed"`` when a model is loaded, runs every expert
layer of the model as routing, dispatcher, experts and combine. transformers is imported by the functions that need it, not with this package.
"""

from .options import NAME, DebugChoice, Options, RunnerChoice, WireChoice
from .registration import configure, prepare, register
from .reports import LayerReport, layer_reports, report

__all__ = [
    "NAME",
    "DebugChoice",
    "LayerReport",
    "Options",
    "RunnerChoice",
    "WireChoice",
    "configure",
    "layer_reports",
    "prepare",
    "register",
    "report",
]
