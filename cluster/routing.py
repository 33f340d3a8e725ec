"""The choice of a replica for a lease: where its document is and there is room.

`rank_candidates` is a pure function with these rules, first to last:

1. A replica is full when the pages or places that the lease needs are not free, or a lease already
   waits there. It is no choice while another one has room.
2. The replica that holds most of the document takes the request if what is new fits, even if it is
   crowded, unless it would miss the goal for the first token and another replica would be faster.
3. Otherwise the replicas are tried in the order of their hash with the document's name (rendezvous
   hashing, Thaler and Ravishankar 1998), which is the same for all routers: after the others those
   that would evict a document for it, and last those that are crowded. A replica counts as crowded
   from half of the goal on, which leaves the other half to questions about what it holds.
4. A request without a document goes to the better of two random replicas.

Reports are a second or two old, so the router adds what it has assigned meanwhile. A replica whose
report is stale is judged by the number of its requests alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from cluster.reports import EngineReport, document_name
from rapid.messages import LeaseRequest

_TAIL_TOKENS = 512  # as `_MAX_QUESTION_TOKENS`; a shorter end makes documents look dearer
_CALM = 0.5

Draw = Callable[[Sequence["_Standing"], int], list["_Standing"]]


@dataclass(frozen=True, slots=True)
class Need:
    """What a lease takes of an engine.

    Attributes:
        document: Short name of what the prompt is about; empty if nothing.
        answer_tokens: Longest answer of one choice, with a last block beyond its end.
        companion_tokens: Prompt of a second lease that will follow on the same engine; 0 if none.
    """

    document: str = ""
    prompt_tokens: int = 0
    answer_tokens: int = 0
    num_choices: int = 1
    companion_tokens: int = 0

    @classmethod
    def of(cls, request: LeaseRequest) -> Need:
        """Return what a request for a lease needs."""
        return cls(
            document_name(request.affinity) if request.affinity else "",
            len(request.prompt_ids),
            request.terms.max_tokens + request.terms.speculation.max_draft,
            request.terms.num_choices,
            request.companion_tokens,
        )

    @property
    def num_leases(self) -> int:
        """The number of leases, with the companion."""
        return 1 + (self.companion_tokens > 0)

    def num_shared(self, held_tokens: int) -> int:
        """Return how many tokens of the prompt are there, of a document held with `held_tokens`."""
        # A held prompt and this one may end in different questions.
        return max(min(self.prompt_tokens, held_tokens) - _TAIL_TOKENS, 0)

    def num_pages(self, page_tokens: int, held_tokens: int = 0) -> int:
        """Return the pages that the lease takes beside those that others have in use."""
        shared = self.prompt_tokens // page_tokens
        whole = -(-(self.prompt_tokens + self.answer_tokens) // page_tokens)
        num_pages = whole + (self.num_choices - 1) * (whole - shared)
        if self.companion_tokens:
            num_pages += -(-(self.companion_tokens + self.answer_tokens) // page_tokens)
        return num_pages - self.num_shared(held_tokens) // page_tokens


@dataclass(frozen=True, slots=True)
class Candidate:
    """A running replica, as a router knows it.

    Attributes:
        num_ongoing: Requests that Serve counts there; None if it does not know.
        report: The latest report; None if there is none or it is stale.
        assigned: What the router assigned to the replica after the report, the oldest first.
    """

    replica: str
    num_ongoing: int | None = None
    report: EngineReport | None = None
    assigned: Sequence[Need] = ()


@dataclass(frozen=True, slots=True)
class _Standing:
    """How a candidate stands for one request.

    Attributes:
        has_room: Whether the lease would open at once.
        holds: Whether the document is there, or is being read, in part at least.
        num_missing: Tokens of the document that are not there.
        evicts_none: Whether the prompt fits beside all documents that are there.
        first_token_s: Seconds until the prompt would be read, beside all that waits; 0 if unknown.
        num_waiting: Leases that would be before this one in the queue.
    """

    replica: str
    has_room: bool
    num_requests: int
    num_waiting: int
    holds: bool = False
    num_missing: int = 0
    evicts_none: bool = True
    first_token_s: float = 0.0


def rank_candidates(
    need: Need,
    candidates: Sequence[Candidate],
    *,
    target_ongoing: float,
    first_token_goal_s: float,
    draw: Draw = random.sample,
) -> list[str]:
    """Return the replicas in the order in which to try them; full ones only if all are.

    Args:
        target_ongoing: Requests from which a replica counts as crowded.
        first_token_goal_s: Seconds to the first token from which a replica that holds the document
            is given up for a faster one.
        draw: Sample without replacement, for requests without a document.
    """
    standings = [_standing(need, each, target_ongoing) for each in candidates]
    if need.document:
        standings.sort(key=lambda each: weight(need.document, each.replica), reverse=True)
    roomy = [each for each in standings if each.has_room]
    if not roomy:
        waiting = sorted(standings, key=lambda each: (each.num_waiting, not each.holds))
        return [each.replica for each in waiting]
    least_s = min(each.first_token_s for each in roomy)
    limit_s = max(first_token_goal_s, least_s)
    calm_s = max(_CALM * first_token_goal_s, least_s)

    def is_crowded(each: _Standing) -> bool:
        return each.num_requests >= target_ongoing or each.first_token_s > calm_s

    if need.document:
        held = [each for each in roomy if each.holds and each.first_token_s <= limit_s]
        held.sort(key=lambda each: each.num_missing)
        calm = [each for each in roomy if not each.holds and not is_crowded(each)]
        calm.sort(key=lambda each: not each.evicts_none)
        chosen = held + calm
    else:
        calm = [each for each in roomy if not is_crowded(each)] or roomy
        chosen = sorted(draw(calm, min(2, len(calm))), key=_load)
    first = {each.replica for each in chosen}
    rest = sorted((each for each in roomy if each.replica not in first), key=_load)
    return [each.replica for each in chosen + rest]


def has_room(need: Need, candidate: Candidate, target_ongoing: float) -> bool:
    """Return whether a lease would open on a replica at once; False if nothing is known of it."""
    return candidate.report is not None and _standing(need, candidate, target_ongoing).has_room


def seems_free(candidate: Candidate, target_ongoing: float) -> bool:
    """Return whether a replica that reports no room has fewer requests than it is meant to."""
    return _standing(Need(), candidate, target_ongoing).has_room


def _load(standing: _Standing) -> tuple[float, int]:
    return standing.first_token_s, standing.num_requests


def _standing(need: Need, candidate: Candidate, target_ongoing: float) -> _Standing:
    report = candidate.report
    if report is None:
        num_ongoing = candidate.num_ongoing
        if num_ongoing is None:
            num_ongoing = len(candidate.assigned)
        is_free = num_ongoing < target_ongoing
        return _Standing(
            candidate.replica, is_free, num_requests=num_ongoing, num_waiting=num_ongoing
        )
    after = _After(report, candidate.assigned) if candidate.assigned else None
    documents, in_use = (after or report).documents, (after or report).in_use
    held_tokens = documents.get(need.document, 0)
    shared_tokens = held_tokens if need.document in in_use else 0
    leases_free, pages_free = report.leases_free, report.pages_free
    own_unread = need.prompt_tokens - need.num_shared(held_tokens)
    num_unread = report.tokens_waiting + own_unread
    if after is not None:
        leases_free -= after.num_leases
        pages_free -= after.num_pages
        num_unread += after.num_unread
    has_room = (
        not report.leases_waiting
        and need.num_leases <= leases_free
        and need.num_pages(report.page_tokens, shared_tokens) <= pages_free
    )
    # Prompts are read in turns: a short one is through before the long ones beside it.
    num_beside = report.num_requests - report.leases_waiting + len(candidate.assigned)
    num_unread = min(num_unread, (1 + num_beside) * own_unread)
    speed = report.prefill_tokens_per_s
    return _Standing(
        candidate.replica,
        has_room,
        holds=held_tokens > 0,
        num_missing=max(need.prompt_tokens - _TAIL_TOKENS - held_tokens, 0),
        evicts_none=sum(documents.values()) + need.prompt_tokens - held_tokens
        <= report.pages_total * report.page_tokens,
        first_token_s=num_unread / speed if speed else 0.0,
        num_requests=report.num_requests + len(candidate.assigned),
        num_waiting=report.leases_waiting + len(candidate.assigned),
    )


class _After:
    """What leases add to a replica that its report does not know yet."""

    def __init__(self, report: EngineReport, assigned: Sequence[Need]) -> None:
        self.documents = dict(report.documents)
        self.in_use = set(report.in_use)
        self.num_leases = self.num_pages = self.num_unread = 0
        for need in assigned:
            held_tokens = self.documents.get(need.document, 0)
            shared_tokens = held_tokens if need.document in self.in_use else 0
            self.num_leases += need.num_leases
            self.num_pages += need.num_pages(report.page_tokens, shared_tokens)
            self.num_unread += need.prompt_tokens - need.num_shared(held_tokens)
            if need.document:
                self.documents[need.document] = max(held_tokens, need.prompt_tokens)
                self.in_use.add(need.document)


def weight(name: str, replica: str) -> bytes:
    """Return the hash of a name and a replica; replicas are preferred from the highest down."""
    return blake2b(f"{name} {replica}".encode(), digest_size=8).digest()
