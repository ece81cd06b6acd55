"""``moe-typed demo``: the main job on a checkpoint that it writes itself, and then a mismatch being refused."""

import tempfile
from contextlib import nullcontext
from pathlib import Path

import torch
from rich.console import Console
from rich.panel import Panel

from ..boundary import BoundaryError, debug
from ..formats import Bf16Rows, MxFp8Rows, quantize_fp8_block128
from .demo_checkpoint import write_demo_checkpoint
from .options import RunOptions
from .run import run_checkpoint


def _show_refusal(console: Console) -> None:
    """Give float32 block scales where e8m0 scales are declared, with debug on, and print what comes of it."""
    block = quantize_fp8_block128.run(Bf16Rows(torch.randn(4, 256).to(torch.bfloat16)))
    try:
        with debug("layout"):
            MxFp8Rows(block.data, block.scale)
    except BoundaryError as error:
        console.print(Panel(str(error), title="MxFp8Rows(data, fp32_scale) with debug on", title_align="left"), markup=False)
        return
    raise RuntimeError("a float32 scale was accepted where an e8m0 scale is declared: the debug checks are broken")


def run_demo(keep: Path | None, options: RunOptions, console: Console) -> bool:
    """Write the demo checkpoint (into ``keep``, or into a folder that goes afterwards), run it, show a refusal; as ``run_layer``."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="moe-typed-") if keep is None else nullcontext(str(keep)) as folder:
        write_demo_checkpoint(Path(folder))
        within = run_checkpoint(Path(folder), options, console)
    _show_refusal(console)
    return within
