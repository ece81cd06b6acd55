"""Scores: what a gate makes of a router logit, shared by the gates."""

from typing import Literal, TypeAlias

Score: TypeAlias = Literal["softmax", "sigmoid", "sqrt_softplus"]
"""softmax over all experts of the row; 1 / (1 + exp(-z)); sqrt(log(1 + exp(z))), which is sqrt(z) above z = 20."""
