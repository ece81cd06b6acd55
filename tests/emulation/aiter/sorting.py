"""``moe_sorting``: ids, weights, mask and row count become the routes of this rank."""

from typing import final

import attrs
import torch
from torch import Tensor

from .library import Library
from .memory import read
from .misuse import Reason

_MAX_ROWS = 2**24  # a sorted id holds the row in 24 bits
_MAX_SLOTS = 2**8  # and the slot in 8


@final
@attrs.frozen
class Routes:
    """Routes that this rank computes; R of them, in the order of rows and slots."""

    row: Tensor  # int64 (R)
    slot: Tensor  # int64 (R)
    expert: Tensor  # int64 (R), an index of the weights
    weight: Tensor  # float32 (R)
    rows: int  # the rows that are sorted and zeroed; those after it are never written


def live_rows(library: Library, num_local_tokens: Tensor | None, rows: int) -> int:
    """Return the number of rows to compute. It is read as one int32."""
    if num_local_tokens is None:
        return rows
    live = int(read(library.judge, "num_local_tokens", num_local_tokens, torch.int32, (1,)).item())
    if not 0 <= live <= rows:
        raise library.judge.undefined(Reason.RANGE, "num_local_tokens", f"{live} of {rows} rows")
    return live


def sort_routes(
    library: Library, topk_ids: Tensor, topk_weight: Tensor, expert_mask: Tensor | None, num_local_tokens: Tensor | None, experts: int
) -> Routes:
    """Return the routes. ``experts``: how many the weights hold.

    Raises: RuntimeError for weights that are not float32.
    """
    judge = library.judge
    if topk_weight.dtype is not torch.float32:
        raise RuntimeError("topk_weights must be FP32")
    rows, slots = topk_ids.shape
    if slots >= _MAX_SLOTS or rows >= _MAX_ROWS:
        raise judge.undefined(Reason.SORT_LIMIT, "topk_ids", f"{rows} rows of {slots}")
    if topk_ids.dtype is not torch.int32 and not library.flag("AITER_USE_CK_MOE_SORTING"):
        raise judge.undefined(Reason.DTYPE, "topk_ids", f"The sort skips its kernel for {topk_ids.dtype}: nothing that it returns is written.")
    ids = read(judge, "topk_ids", topk_ids, torch.int32, (rows, slots)).long()
    weight = read(judge, "topk_weight", topk_weight, torch.float32, (rows, slots))
    live = live_rows(library, num_local_tokens, rows)
    local_id, active = _local_ids(library, expert_mask, experts)
    ids = ids[:live]
    _check_ids(library, ids, len(active))
    kept = active[ids]
    again = (ids[:, :, None] == ids[:, None, :]).triu(1).any(-1) & kept
    if again.any():
        judge.silent(Reason.DUPLICATE_EXPERT, "topk_ids")
    return _routes(library, kept & ~again, local_id[ids], weight, experts, live)


def flat_routes(
    library: Library, topk_ids: Tensor, topk_weight: Tensor, expert_mask: Tensor | None, num_local_tokens: Tensor | None, experts: int
) -> Routes:
    """Return the routes as the flat kernels take them: dtypes are converted, and neither mask nor row count is looked at."""
    for operand, ignored in (("expert_mask", expert_mask), ("num_local_tokens", num_local_tokens)):
        if ignored is not None:
            library.judge.silent(Reason.FLAT_IGNORES, operand)
    ids = topk_ids.long()
    _check_ids(library, ids, experts)
    return _routes(library, torch.ones_like(ids, dtype=torch.bool), ids, topk_weight.float(), experts, ids.shape[0])


def _local_ids(library: Library, expert_mask: Tensor | None, experts: int) -> tuple[Tensor, Tensor]:
    """Return, for every id of the space that the mask's length defines, its local id and whether it is computed here."""
    if expert_mask is None:
        return torch.arange(experts), torch.ones(experts, dtype=torch.bool)
    judge = library.judge
    mask = read(judge, "expert_mask", expert_mask, torch.int32, (expert_mask.numel(),)).long()
    if ((mask != 0) & (mask != 1)).any():
        judge.silent(Reason.MASK_VALUE, "expert_mask")
    if mask.sum() != experts:
        judge.silent(Reason.MASK_SUM, "expert_mask", f"{int(mask.sum().item())} of {experts} experts")
    return mask.cumsum(0) - mask, mask != 0


def _check_ids(library: Library, ids: Tensor, space: int) -> None:
    if (ids < 0).any():
        raise library.judge.undefined(Reason.NEGATIVE_ID, "topk_ids")
    if (ids >= space).any():
        raise library.judge.undefined(Reason.ID_RANGE, "topk_ids", f"The mask, or the weights, say {space} experts.")


def _routes(library: Library, kept: Tensor, local: Tensor, weight: Tensor, experts: int, rows: int) -> Routes:
    row, slot = kept.nonzero(as_tuple=True)
    expert = local[row, slot]
    if ((expert < 0) | (expert >= experts)).any():
        raise library.judge.undefined(Reason.LOCAL_ID, "expert_mask")
    return Routes(row, slot, expert, weight[row, slot], rows)
