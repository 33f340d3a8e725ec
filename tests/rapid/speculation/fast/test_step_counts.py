"""What a step's drawing and judging launch on a device, counted with the kernels interpreted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from rapid.config import SamplingConfig, SpeculationConfig
from rapid.speculation.draw import Draw
from rapid.speculation.fast import race_kernels, row_kernels, together
from rapid.speculation.fast.step import answer_together, draw_together
from rapid.speculation.questions import Question, ToDecode, ToPropose
from tests.rapid.speculation.drafted import blocks

KERNELS = (
    "read_rows", "settle_blocks", "fuse_rows", "cut_rows", "race_rows", "choose_tokens",
)  # fmt: skip
# Operations that launch nothing on a device.
VIEWS = {
    "_reshape_alias", "_unsafe_view", "alias", "as_strided", "chunk", "detach", "empty",
    "empty_like", "expand", "lift_fresh", "new_empty", "permute", "reshape", "resolve_conj",
    "resolve_neg", "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose",
    "unbind", "unsqueeze", "view",
}  # fmt: skip


class Launches(TorchDispatchMode):
    """Counts the operations of torch, a kernel of ours as one, and transfers to the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.sent = 0
        self.is_counting = True

    @override
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        if self.is_counting and function.overloadpacket.__name__ not in VIEWS:
            self.count += 1
        return function(*args, **(kwargs or {}))

    def counting(self, kernel: Any) -> Any:
        """Return a kernel that counts as one launch."""
        launches = self

        class Counted:
            def __getitem__(self, grid: Any) -> Callable[..., None]:
                def launch(*args: Any, **options: Any) -> None:
                    launches.count += 1
                    launches.is_counting = False
                    kernel[grid](*args, **options)
                    launches.is_counting = True

                return launch

        return Counted()


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    counted, send = Launches(), together._send
    for name in KERNELS:
        monkeypatch.setattr(row_kernels, name, counted.counting(getattr(row_kernels, name)))
    race = counted.counting(race_kernels.race_candidates)
    monkeypatch.setattr(race_kernels, "race_candidates", race)

    def count_sent(*arrays: Any) -> list[torch.Tensor]:
        counted.sent += 1
        return send(*arrays)

    monkeypatch.setattr(together, "_send", count_sent)
    return counted


def count(launches: Launches, questions: Sequence[Question]) -> int:
    with launches:
        answers = answer_together(questions)
    assert not any(isinstance(answer, Exception) for answer in answers)
    return launches.count


ANY = SpeculationConfig()


def draws(num_settings: int, speculation: SpeculationConfig = ANY, **sampling: Any) -> list[Draw]:
    return [
        Draw(SamplingConfig(temperature=0.6 + 0.1 * i, seed=i, **sampling), speculation, 0, i)
        for i in range(num_settings)
    ]


@pytest.mark.parametrize("num_settings", [1, 4])
@pytest.mark.parametrize(("filters", "most"), [({}, 12), ({"top_p": 0.9}, 20)])
def test_a_sampled_plain_step_is_a_few_launches_whatever_its_settings(
    launches: Launches, num_settings: int, filters: Any, most: int
) -> None:
    row = 3 * torch.randn(2_000, generator=torch.Generator().manual_seed(0))
    questions = [ToDecode(row, draw) for draw in draws(num_settings, **filters)]
    # 499 and 554 by operations of torch, for each setting.
    assert count(launches, questions) <= most
    assert launches.sent == 1


@pytest.mark.parametrize("num_settings", [1, 4])
@pytest.mark.parametrize("coupling", ["maximal", "shared_noise"])
def test_a_witnessed_block_is_a_few_launches_whatever_its_settings(
    launches: Launches, num_settings: int, coupling: Any
) -> None:
    given = draws(num_settings, SpeculationConfig(coupling=coupling))
    questions = blocks(np.random.default_rng(0), given, 300, is_witnessed=True)
    assert count(launches, questions) <= 12  # 633 by operations of torch, for each setting
    assert launches.sent == 1


@pytest.mark.parametrize("num_settings", [1, 4])
def test_a_proposal_is_a_few_launches_whatever_its_settings(
    launches: Launches, num_settings: int
) -> None:
    row = torch.randn(2_000, generator=torch.Generator().manual_seed(0))
    assert count(launches, [ToPropose(row, draw) for draw in draws(num_settings)]) <= 16


@pytest.mark.parametrize("num_settings", [1, 4])
def test_a_draft_that_is_fed_on_the_device_is_one_launch_more(
    launches: Launches, num_settings: int
) -> None:
    row = torch.randn(2_000, generator=torch.Generator().manual_seed(0))
    questions = [ToPropose(row, draw) for draw in draws(num_settings)]
    with launches:
        drawn = draw_together(questions)
    assert launches.count <= 12
    assert launches.sent == 1
    assert len(drawn.tokens) == num_settings
