"""Consecutive forwards that draft, each fed on the device with what was drawn before.

What was drawn is read once, after the last forward. Until then nothing is known here of the tokens,
so rows may be computed behind one that ends its block: they are discarded, as rejected drafts are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, cast

import torch

from rapid.engines.attention.batch import Feed
from rapid.engines.execution.scheduling import Scheduled
from rapid.engines.work.base import Work
from rapid.engines.work.drafting import Draft, Drafting
from rapid.speculation.fast.step import DrawnDrafts, draw_drafts, read_drafts
from rapid.speculation.questions import Answer, Proposed

# Forwards that may be launched before the first of them is done: the device then does not wait for
# the host between two, and a call that arrives waits for two at most.
_LAUNCHED_AHEAD = 2

Answers: TypeAlias = Mapping[Work, Answer | Exception]
Run = Callable[[Scheduled], list[torch.Tensor]]
"""Runs one forward, and returns the wanted logits of each of its feeds."""


@dataclass(frozen=True, slots=True)
class ComputedForward:
    """The rows of one forward, their wanted logits, and what was drawn if that is known."""

    scheduled: Scheduled
    logits: list[torch.Tensor]  # of each feed [num_wanted, vocab]
    answers: Answers | None = None
    fed: Mapping[Work, int] | None = None  # the tokens that the next forward was fed with

    @property
    def works(self) -> set[Work]:
        """The work that has rows in it."""
        return {work for work, _ in self.scheduled}

    def is_fed_right(self, work: Work) -> bool:
        """Return whether the next forward was fed with the token that the work drafted."""
        if self.answers is None or self.fed is None:
            return False
        answer = self.answers[work]
        return isinstance(answer, Proposed) and answer.token == self.fed[work]


def count_forwards(scheduled: Scheduled) -> int:
    """Return how many forwards may follow each other on the device; 1 where the host is needed.

    No draft block waits for tokens that are drafted for another one, or ahead.
    """
    if not all(_is_fed_on_device(work, feed) for work, feed in scheduled):
        return 1
    works = [cast(Drafting, work) for work, _ in scheduled]
    blocks = [work.num_left for work in works if isinstance(work, Draft)]
    return min(blocks) if blocks else max(work.num_left for work in works)


def run_chain(
    scheduled: Scheduled, most: int, run: Run, is_interrupted: Callable[[], bool]
) -> list[ComputedForward]:
    """Run up to `most` forwards, or until `is_interrupted` after one of them."""
    ran: list[tuple[Scheduled, list[torch.Tensor], DrawnDrafts]] = []
    ends: list[torch.cuda.Event] = []
    while True:
        logits = run(scheduled)
        works = [cast(Drafting, work) for work, _ in scheduled]
        asked = [work.ask_after(len(ran), rows) for work, rows in zip(works, logits, strict=True)]
        drawn = draw_drafts(asked)
        ran.append((scheduled, logits, drawn))
        if len(ran) == most or is_interrupted() or _is_known_to_end(works, drawn.tokens):
            break
        if drawn.tokens.is_cuda:
            ends.append(torch.cuda.current_stream(drawn.tokens.device).record_event())
            if len(ends) >= _LAUNCHED_AHEAD:
                ends[-_LAUNCHED_AHEAD].synchronize()
        scheduled = [
            (work, cast(Drafting, work).follow(feed, token))
            for (work, feed), token in zip(scheduled, torch.split(drawn.tokens, 1), strict=True)
            if cast(Drafting, work).num_left > len(ran)
        ]
    forwards = []
    for (rows, logits, _), told in zip(ran, read_drafts([each for *_, each in ran]), strict=True):
        by_work = dict(zip((work for work, _ in rows), told, strict=True))
        answers = {work: answer for work, (_, answer) in by_work.items()}
        fed = {work: token for work, (token, _) in by_work.items()}
        forwards.append(ComputedForward(rows, logits, answers, fed))
    return forwards


def _is_fed_on_device(work: Work, feed: Feed) -> bool:
    return isinstance(work, Drafting) and work.is_fed_on_device and feed.num_wanted == 1


def _is_known_to_end(works: list[Drafting], tokens: torch.Tensor) -> bool:
    """Return whether a block ends with one of the tokens, where looking at them costs nothing."""
    if tokens.is_cuda:
        return False
    return any(map(Drafting.ends_with, works, tokens.tolist()))
