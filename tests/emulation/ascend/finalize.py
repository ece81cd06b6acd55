"""From rows sorted by expert back to tokens, and rows sorted without a gate."""

import torch
from torch import Tensor

from moe_typed.runners.ascend.ops import FinalizeMode

from .base import Emulation
from .dtypes import FLOATS
from .misuse import Reason, require

_ROW_MAJOR = (FinalizeMode.ROW_MAJOR, FinalizeMode.ROW_MAJOR_PADDED)
_PADDED = (FinalizeMode.K_MAJOR_PADDED, FinalizeMode.ROW_MAJOR_PADDED)


class FinalizeEmulation(Emulation):
    """Finalisation, and permute with its reverse."""

    def npu_moe_token_permute(
        self, tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Sort rows by expert; the index is row-major."""
        require(not padded_mode, "padded_mode is off")
        k = 1 if indices.dim() == 1 else indices.shape[1]
        order = indices.flatten().argsort(stable=True)
        index = torch.empty_like(order)
        index[order] = torch.arange(len(order))
        self.indices.remember(FinalizeMode.ROW_MAJOR, index)
        return tokens[order // k][: num_out_tokens or None], index.int()

    def npu_moe_token_unpermute(
        self,
        permuted_tokens: Tensor,
        sorted_indices: Tensor,
        probs: Tensor | None = None,
        padded_mode: bool = False,
        restore_shape: list[int] | None = None,
    ) -> Tensor:
        """Return the weighted sum of each token's rows."""
        require(not padded_mode, "padded_mode is off")
        require(sorted_indices.dtype == torch.int32, f"sorted_indices is int32, not {sorted_indices.dtype}")
        if self.indices.contradicts(FinalizeMode.ROW_MAJOR, sorted_indices):
            self.judge.silent(Reason.INDEX_ORDER, "sorted_indices is row-major")
        k = 1 if probs is None else probs.shape[1]
        rows = self._rows(permuted_tokens, sorted_indices).view(-1, k, permuted_tokens.shape[1])
        weights = torch.ones(rows.shape[:2]) if probs is None else probs.float()
        return (rows * weights[..., None]).sum(1).to(permuted_tokens.dtype)

    def npu_moe_finalize_routing(
        self,
        expanded_permuted_rows: Tensor,
        skip1: Tensor | None,
        skip2: Tensor | None,
        bias: Tensor | None,
        scales: Tensor | None,
        expanded_src_to_dst_row: Tensor,
        export_for_source_row: Tensor | None,
        drop_pad_mode: FinalizeMode | None = FinalizeMode.K_MAJOR,
        k: int | None = 1,
    ) -> Tensor:
        """Return the weighted sum of each token's rows, and what is added to it."""
        rows, index = expanded_permuted_rows, expanded_src_to_dst_row
        mode = FinalizeMode(drop_pad_mode or 0)
        require(rows.dtype in FLOATS, f"rows are fp16, bf16 or fp32, not {rows.dtype}")
        require(index.dtype == torch.int32 and index.dim() == 1, f"the row index is int32 [R], not {index.dtype} {list(index.shape)}")
        require(
            scales is None or scales.dtype == rows.dtype,
            f"scales and rows have one dtype, not {scales.dtype if scales is not None else None} and {rows.dtype}",
        )
        require(skip1 is not None or skip2 is None, "skip2 needs skip1")
        require(bias is None or export_for_source_row is not None, "a bias needs the ids of its experts")
        require(rows.dim() == (3 if mode in _PADDED else 2), f"rows of {mode!r} have {3 if mode in _PADDED else 2} axes, not {rows.dim()}")
        if self.indices.contradicts(mode, index):
            self.judge.silent(Reason.INDEX_ORDER, f"this index is not of {mode!r}")
        slots = (k or 1) if scales is None else scales.shape[1]
        tokens = len(index) // slots
        index = index.view(tokens, slots) if mode in _ROW_MAJOR else index.view(slots, tokens).T
        found = self._rows(rows.flatten(0, 1) if mode in _PADDED else rows, index)
        if bias is not None and export_for_source_row is not None:
            found = found + bias.float()[export_for_source_row.long()]
        weights = torch.ones(tokens, slots) if scales is None else scales.float()
        total = (found * weights[..., None]).sum(1)
        for skip in (skip1, skip2):
            total = total if skip is None else total + skip.float()
        return total.to(rows.dtype)

    def _rows(self, rows: Tensor, index: Tensor) -> Tensor:
        """Return the rows of an index, float32; -1 is a row of zeros."""
        if bool(((index < -1) | (index >= len(rows))).any()):
            self.judge.silent(Reason.INDEX_RANGE, f"{int(index.min())} to {int(index.max())} of {len(rows)} rows")
        inside = (index >= 0) & (index < len(rows))
        found = rows.float()[torch.where(inside, index, 0).long()]
        found = torch.where(inside[..., None], found, torch.nan)
        return torch.where((index == -1)[..., None], 0.0, found)
