"""The connection of ranks, here of threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from rapid.engines.forward.sharding.group import Group
from rapid.engines.forward.sharding.meeting import InFile
from rapid.errors import EngineFailed

CPU = torch.device("cpu")


@pytest.fixture
def groups(tmp_path: Path) -> list[Group]:
    """Three ranks, connected."""
    meeting = InFile(str(tmp_path / "meeting"))
    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(lambda rank: Group(meeting, rank, 3, CPU), range(3)))


def test_sums_and_columns_of_all_ranks(groups: list[Group]) -> None:
    def meet(group: Group) -> tuple[float, list[list[int]]]:
        total = group.sum(torch.tensor([float(group.rank)])).item()
        return total, group.gather(torch.tensor([[group.rank], [10 + group.rank]])).tolist()

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(meet, groups)) == [(3.0, [[0, 1, 2], [10, 11, 12]])] * 3


@pytest.mark.parametrize("claims", [(True, True, True), (True, False, True)])
def test_all_ranks_claim_it_or_none_goes_on(groups: list[Group], claims: tuple[bool, ...]) -> None:
    with ThreadPoolExecutor(3) as pool:
        agreed = list(pool.map(lambda group: group.all(claims[group.rank]), groups))
    assert agreed == [all(claims)] * 3


def test_a_rank_that_failed_alone_is_found_out(groups: list[Group]) -> None:
    """It has launched fewer sums than the others, which is a step that nobody may use."""

    def claim(group: Group) -> str:
        group._num_launched += group.rank > 0
        with pytest.raises(EngineFailed) as told:
            group.all(False)
        return str(told.value)

    with ThreadPoolExecutor(3) as pool:
        assert all("out of step" in text for text in pool.map(claim, groups))
