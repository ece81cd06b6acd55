"""Scores in torch operations. All of them rise with the logit, are never negative, and keep NaN."""

import torch
from torch import Tensor

from . import Score

# Added to the sum before dividing by it, as DeepSeek-V3's router does, so that a row of zeros does not divide by zero.
EPSILON = 1e-20


def score(logits: Tensor, kind: Score) -> Tensor:
    """Return the scores of float32 ``logits`` (rows, experts)."""
    if kind == "softmax":
        return torch.softmax(logits, 1)
    if kind == "sigmoid":
        return torch.sigmoid(logits)
    return torch.nn.functional.softplus(logits).sqrt()  # softplus(z) is z above 20, where log(1 + exp(z)) rounds to it


def renormalize(weights: Tensor) -> Tensor:
    """Return each row divided by its sum."""
    return weights / (weights.sum(1, keepdim=True) + EPSILON)
