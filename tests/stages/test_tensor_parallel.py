"""What a rank's result is, and how a group of ``torch.distributed`` pays the sum that is owed."""

import threading
from datetime import timedelta
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore  # not exported where it is documented

from moe_typed.stages import CompleteResult, OneRank, PartialResult, ProcessGroupRanks


def on_each(size: int, directory: Path) -> list[tuple[Tensor, Tensor, int, int]]:
    """Return the completed partial and complete results, rank and size of every rank, a thread each."""
    file = str(directory / "store")
    found: dict[int, tuple[Tensor, Tensor, int, int]] = {}

    def rank_of(rank: int) -> None:
        ranks = ProcessGroupRanks(cast("dist.ProcessGroup", dist.ProcessGroupGloo(FileStore(file, size), rank, size, timedelta(seconds=20))))
        part = torch.full((2, 3), float(rank + 1))
        total = PartialResult(part).completed(ranks)
        assert bool((part == rank + 1).all())  # what was given is not written over
        whole = CompleteResult(ranks.all_gather(part)).completed(ranks)
        found[rank] = (total, whole, ranks.rank, ranks.size)

    threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [found[rank] for rank in range(size)]


def test_a_partial_result_is_summed_and_a_complete_one_is_not(tmp_path: Path) -> None:
    for rank, (total, whole, own, size) in enumerate(on_each(2, tmp_path)):
        assert (own, size) == (rank, 2)
        assert torch.equal(total, torch.full((2, 3), 3.0))
        assert torch.equal(whole, torch.tensor([[1.0, 1.0, 1.0, 2.0, 2.0, 2.0]] * 2))


def test_one_rank_owes_nothing() -> None:
    part = torch.ones(2, 3)
    ranks = OneRank()
    assert (ranks.rank, ranks.size) == (0, 1)
    assert PartialResult(part).completed(ranks) is part
    assert CompleteResult(part).completed(ranks) is part
    assert ranks.all_gather(part) is part
