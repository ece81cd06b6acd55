"""The installed operators. Nothing of a backend is imported before one of these functions is called."""

import importlib
import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Final, NoReturn, Protocol, cast

import torch

from .activation import ActivationOps
from .distribute import DistributeOps
from .extension import AscendExtensionOps
from .grouped_matmul import GroupedMatmulOps
from .packing import PackingOps
from .quantise import QuantiseOps
from .routing import RoutingOps

_TORCH_NPU: Final = "torch_npu"
_EXTENSION: Final = "sgl_kernel_npu"
_EXTENSION_MODULES: Final = {
    "swiglu_quant": "sgl_kernel_npu.activation.swiglu_quant",
    "swiglu_oai_quant": "sgl_kernel_npu.activation.swiglu_oai_quant",
    "swiglu_oai_triton": "sgl_kernel_npu.activation.swiglu_oai",
    "situ": "sgl_kernel_npu.activation.situ",
    "situ_mxfp8_quant": "sgl_kernel_npu.activation.situ_mxfp8_quant",
    "l1_norm": "sgl_kernel_npu.norm.l1_norm",
}  # where sgl-kernel-npu of August 2026 has each function


class AscendOps(RoutingOps, GroupedMatmulOps, ActivationOps, QuantiseOps, PackingOps, DistributeOps, Protocol):
    """All operators of ``torch.ops.npu`` that the backend calls, with the names, order and defaults of their schemas in torch_npu 2.14."""


def load_ops() -> AscendOps:
    """Import torch_npu, which registers its operators with torch, and return them.

    Raises: ImportError when torch_npu is not installed.
    """
    try:
        importlib.import_module(_TORCH_NPU)
    except ModuleNotFoundError as error:
        if error.name != _TORCH_NPU:
            raise
        raise ImportError(
            f"the Ascend backend needs torch_npu, which is not installed; install CANN and the torch-npu of torch {torch.__version__}",
            name=_TORCH_NPU,
        ) from error
    return cast(AscendOps, torch.ops.npu)


def load_extension_ops() -> AscendExtensionOps:
    """Import sgl_kernel_npu and return its operators. One that the installed version lacks raises ImportError when it is called.

    Raises: ImportError when torch_npu or sgl_kernel_npu is not installed.
    """
    load_ops()
    if importlib.util.find_spec(_EXTENSION) is None:
        raise ImportError("these activations need sgl_kernel_npu, which is not installed; build it from sgl-project/sgl-kernel-npu", name=_EXTENSION)
    importlib.import_module(_EXTENSION)
    functions = {name: _function(module, name) for name, module in _EXTENSION_MODULES.items()}
    return cast(AscendExtensionOps, SimpleNamespace(**functions, swiglu_group_quant=_operator("swiglu_group_quant")))


def _function(module: str, name: str) -> Callable[..., object]:
    """Return a function of a module, or one that raises ImportError where the module does not exist."""
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise
        return _absent(name)
    return cast(Callable[..., object], vars(found).get(name) or _absent(name))


def _absent(name: str) -> Callable[..., NoReturn]:
    def raise_import_error(*_: object, **__: object) -> NoReturn:
        raise ImportError(f"the installed sgl_kernel_npu has no {name}; install a newer one", name=_EXTENSION)

    return raise_import_error


def _operator(name: str) -> Callable[..., object]:
    """Return an operator of ``torch.ops.npu``, or a function that raises ImportError where the extension did not register it."""
    try:
        return cast(Callable[..., object], getattr(torch.ops.npu, name))
    except AttributeError:
        return _absent(name)
