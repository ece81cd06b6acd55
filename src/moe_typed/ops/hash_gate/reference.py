"""The hash gate in torch operations."""

import torch
from torch import Tensor

from ..scores import Score
from ..scores import reference as scores


def hash_gate(
    logits: Tensor, table: Tensor, token_ids: Tensor, score: Score, renormalize: bool, factor: float, live: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (ids int32, weights float32), both (rows, k): the experts in ``table`` of each row's token, and ``score`` of their logits.

    ``logits``: floating (rows, experts). ``table``: int32 (vocabulary, k). ``token_ids``: int32 or int64 (rows,). ``renormalize`` divides a row's
    weights by their sum + 1e-20, and ``factor`` multiplies them after that. ``live``: int32 (1,), the leading rows that count, None for all; the
    rest get ids -1 and weights 0, whatever their token is, and so does a row whose token the table does not hold.
    """
    goes = (token_ids >= 0) & (token_ids < table.shape[0])
    if live is not None:
        goes = goes & (torch.arange(token_ids.shape[0], device=token_ids.device) < live)
    ids = table[torch.where(goes, token_ids, 0)]
    weights = scores.score(logits.to(torch.float32), score).gather(1, ids.long())
    weights = (scores.renormalize(weights) if renormalize else weights) * factor
    return torch.where(goes.unsqueeze(1), ids, -1), torch.where(goes.unsqueeze(1), weights, 0.0)
