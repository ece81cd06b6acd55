"""Hugging Face transformers as a client: ``register()`` adds the experts implementation ``moe_typed``.

After it, ``model.set_experts_implementation("moe_typed")``, or ``experts_implementation="moe_typed"`` when a model is loaded, runs every expert
layer of the model as routing, dispatcher, experts and combine. transformers is imported by the functions that need it, not with this package.
"""

from .mxfp4 import MxFp4Experts
from .options import NAME, DebugChoice, Options, RunnerChoice, WireChoice
from .registration import configure, hold_mxfp4, prepare, register
from .reports import LayerReport, layer_reports, report

__all__ = [
    "NAME",
    "DebugChoice",
    "LayerReport",
    "MxFp4Experts",
    "Options",
    "RunnerChoice",
    "WireChoice",
    "configure",
    "hold_mxfp4",
    "layer_reports",
    "prepare",
    "register",
    "report",
]
