"""What a top-k gate is told."""

from typing import Literal, NamedTuple, TypeAlias

from ..scores import Score

GateScore: TypeAlias = Score | Literal["selected_softmax"]


class GateRule(NamedTuple):
    """Say how a row's ``top_k`` experts are chosen and weighed.

    An expert's score is ``score`` of its logit. A bias is added for the choice alone: the weight is the score without it. "selected_softmax"
    chooses by the logit itself (plus bias) and weighs by a softmax over the chosen (gpt-oss). ``renormalize`` divides a row's weights by their
    sum + 1e-20, and ``factor`` multiplies them after that. Llama 4's rule is sigmoid with neither: the largest logits, weighed by their sigmoid.

    ``num_groups`` > 1 splits the experts into equal runs, of which the ``topk_group`` best stay. A group's score is the largest of its biased
    scores, or the sum of its two largest (the same value twice counts twice; a group of one counts it once).
    """

    top_k: int
    score: GateScore
    renormalize: bool = False
    factor: float = 1.0
    num_groups: int = 1
    topk_group: int = 1
    group_score: Literal["max", "top2_sum"] = "max"

    def check(self, num_experts: int) -> None:
        """Raise ValueError unless ``num_experts`` experts fall into the groups and those that stay hold ``top_k``."""
        if num_experts % self.num_groups or not 0 < self.topk_group <= self.num_groups:
            raise ValueError(f"{num_experts} experts do not fall into {self.num_groups} equal groups of which {self.topk_group} stay")
        candidates = num_experts // self.num_groups * self.topk_group
        if not 0 < self.top_k <= candidates:
            raise ValueError(f"top_k is {self.top_k}, but {candidates} of the {num_experts} experts can be chosen")

    def ranks_logits(self, biased: bool) -> bool:
        """Say whether logits are ranked instead of scores; see ranks_logits_of."""
        return ranks_logits_of(self.score, biased, self.num_groups, self.group_score)


def ranks_logits_of(score: str, biased: bool, num_groups: int, group_score: str) -> bool:
    """Say whether logits are ranked instead of scores. Scores rise with them, so it is the same choice, but for scores that round to equals."""
    return score == "selected_softmax" or not (biased or (num_groups > 1 and group_score == "top2_sum"))
