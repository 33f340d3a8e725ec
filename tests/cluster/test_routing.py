"""Where a lease goes, from what replicas reported: a table of stories."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cluster.reports import EngineReport, document_name
from cluster.routing import Candidate, Need, has_room, rank_candidates, weight
from rapid.config import SamplingConfig, SpeculationConfig
from rapid.messages import LeaseRequest, Terms, as_prompt

EMPTY = EngineReport(0.0, 256, 256, 16, 16, prefill_tokens_per_s=1000)
FULL = replace(EMPTY, pages_free=5, leases_free=15, num_requests=1)  # one lease has 251 of 256
SMALL = Need("", 100, 60)  # ten pages
DOCUMENT = document_name("a document")
QUESTION = Need(DOCUMENT, 2000, 60)  # 129 pages, and 36 of them where the document is
HELD = replace(
    EMPTY,
    pages_free=131,
    leases_free=15,
    num_requests=1,
    documents={DOCUMENT: 2000},
    in_use=[DOCUMENT],
)
NAMES = sorted("abcd", key=lambda name: weight(DOCUMENT, name), reverse=True)
"""The replicas in the document's order."""


def order(
    need: Need, reports: dict[str, EngineReport | None] | None = None, **settings: Any
) -> list[str]:
    """The order in which replicas are tried; those without a report here are empty."""
    ongoing = settings.pop("ongoing", {})
    assigned = settings.pop("assigned", {})
    names = settings.pop("names", NAMES)
    known: dict[str, EngineReport | None] = dict.fromkeys(names, EMPTY) | (reports or {})
    candidates = [
        Candidate(name, ongoing.get(name), known[name], assigned.get(name, ())) for name in names
    ]
    return rank_candidates(need, candidates, target_ongoing=4, first_token_goal_s=10, **settings)


def first(samples: Any, number: int) -> Any:
    return samples[:number]


def test_a_small_request_never_goes_behind_a_lease_that_fills_its_replica() -> None:
    for _ in range(50):
        assert order(SMALL, {"a": FULL}, names=["a", "b"]) == ["b"]


@pytest.mark.parametrize(
    "full",
    [
        replace(EMPTY, pages_free=9),
        replace(EMPTY, leases_free=0),
        replace(EMPTY, leases_waiting=1),
    ],
)
def test_pages_places_and_whoever_waits_make_a_replica_full(full: EngineReport) -> None:
    assert order(SMALL, {"a": full}, names=["a", "b"]) == ["b"]
    assert not has_room(SMALL, Candidate("a", report=full), 4)
    assert has_room(SMALL, Candidate("a", report=EMPTY), 4)


def test_a_second_lease_needs_a_place_and_pages_too() -> None:
    drafting = replace(SMALL, companion_tokens=100)
    one_place = {"a": replace(EMPTY, leases_free=1)}
    assert order(drafting, one_place, names=["a", "b"]) == ["b"]
    assert "a" in order(SMALL, one_place, names=["a", "b"])
    few_pages = {"a": replace(EMPTY, pages_free=19)}
    assert order(drafting, few_pages, names=["a", "b"]) == ["b"]
    assert "a" in order(SMALL, few_pages, names=["a", "b"])


def test_a_question_goes_where_its_document_is_and_costs_its_own_tail() -> None:
    holder = NAMES[2]
    assert order(QUESTION, {holder: HELD})[0] == holder
    assert order(QUESTION, {holder: replace(HELD, pages_free=36)})[0] == holder
    assert holder not in order(QUESTION, {holder: replace(HELD, pages_free=35)})


def test_a_document_that_is_only_cached_is_read_but_its_pages_are_needed() -> None:
    holder = NAMES[2]
    cached = replace(HELD, in_use=[], num_requests=0)
    assert order(QUESTION, {holder: replace(cached, pages_free=129)})[0] == holder
    assert holder not in order(QUESTION, {holder: replace(cached, pages_free=128)})
    assigned = {holder: [QUESTION]}  # which has it in use from then on
    enough = {holder: replace(cached, pages_free=129 + 36)}
    assert order(QUESTION, enough, assigned=assigned)[0] == holder


def test_a_document_that_nobody_holds_is_read_in_the_order_of_its_name() -> None:
    assert order(QUESTION) == NAMES
    full = {NAMES[0]: FULL}
    assert order(QUESTION, full) == NAMES[1:]
    crowded = {NAMES[0]: replace(EMPTY, num_requests=4)}
    assert order(QUESTION, crowded) == [*NAMES[1:], NAMES[0]]


def test_what_holds_the_document_may_be_crowded() -> None:
    assert order(QUESTION, {NAMES[1]: replace(HELD, num_requests=15)})[0] == NAMES[1]


def test_a_question_is_read_before_the_long_prompts_beside_it() -> None:
    reading = replace(HELD, tokens_waiting=100_000, num_requests=15)
    assert order(QUESTION, {NAMES[2]: reading})[0] == NAMES[2]  # its own 512 in 16 turns: 8.2 s


def test_a_document_is_read_again_where_that_is_faster_than_the_goal_allows() -> None:
    holder = NAMES[0]
    slow = replace(HELD, num_requests=30)  # they take turns
    assert order(QUESTION, {holder: replace(slow, tokens_waiting=9_000)})[0] == holder  # 9.5 s
    slow = replace(slow, tokens_waiting=10_000)
    assert order(QUESTION, {holder: slow})[0] == NAMES[1]
    everybody = dict.fromkeys(NAMES, replace(EMPTY, num_requests=30, tokens_waiting=20_000))
    assert order(QUESTION, everybody | {holder: slow})[0] == holder


def test_what_holds_most_of_the_document_is_asked() -> None:
    ends = {NAMES[1]: replace(HELD, documents={DOCUMENT: 900}), NAMES[3]: HELD}
    assert order(QUESTION, ends)[:2] == [NAMES[3], NAMES[1]]
    both = {NAMES[1]: replace(HELD, documents={DOCUMENT: 1990}), NAMES[3]: HELD}
    assert order(QUESTION, both)[0] == NAMES[1]  # questions differ in length: both hold it whole


def test_a_new_document_goes_where_nothing_is_evicted_for_it() -> None:
    others = replace(EMPTY, documents={"another": 2500})
    assert order(QUESTION, {NAMES[0]: others}) == [*NAMES[1:], NAMES[0]]
    assert order(QUESTION, dict.fromkeys(NAMES, others)) == NAMES
    fits = replace(EMPTY, documents={"another": 2096})  # of 4096
    assert order(QUESTION, {NAMES[0]: fits}) == NAMES


def test_a_new_document_leaves_half_of_the_goal_to_what_a_replica_holds() -> None:
    first_one = replace(EMPTY, num_requests=3)
    assert order(QUESTION, {NAMES[0]: replace(first_one, tokens_waiting=3000)})[0] == NAMES[0]
    assert order(QUESTION, {NAMES[0]: replace(first_one, tokens_waiting=3001)})[0] == NAMES[1]


def test_what_was_assigned_since_the_report_counts() -> None:
    first_one = {NAMES[0]: [QUESTION]}  # not in its report yet
    assert order(QUESTION, {NAMES[0]: EMPTY}, assigned=first_one)[0] == NAMES[0]
    other = replace(QUESTION, document=document_name("another"))
    assert order(SMALL, assigned={"a": [other, other]}, names=["a", "b"])[0] in "ab"
    large = replace(other, prompt_tokens=4000)
    assert order(SMALL, assigned={"a": [large]}, names=["a", "b"]) == ["b"]


def test_24_questions_on_one_document_are_read_by_as_few_replicas_as_they_need() -> None:
    """Each takes 36 pages beside the document's: four fit beside it, so 24 need six replicas."""
    names = [f"replica {number}" for number in range(20)]
    assigned: dict[str, list[Need]] = {}
    for _ in range(24):
        taker = order(QUESTION, names=names, assigned=assigned)[0]
        assigned.setdefault(taker, []).append(QUESTION)
    ranks = sorted(names, key=lambda name: weight(DOCUMENT, name), reverse=True)
    assert list(assigned) == ranks[:6]
    assert {len(questions) for questions in assigned.values()} == {4}


def test_a_request_without_a_document_goes_to_the_less_loaded_of_two() -> None:
    busy = {"a": replace(EMPTY, num_requests=2)}
    assert order(SMALL, busy, names=["a", "b", "c"], draw=first) == ["b", "a", "c"]
    reading = {"a": replace(EMPTY, num_requests=1, tokens_waiting=5000)}
    assert order(SMALL, reading, names=["a", "b", "c"], draw=first) == ["b", "a", "c"]
    crowded = {"a": replace(EMPTY, num_requests=4)}
    assert order(SMALL, crowded, names=["a", "b", "c"], draw=first) == ["b", "c", "a"]


def test_where_all_are_full_the_shortest_queue_is_first() -> None:
    waiting = {"a": 2, "b": 1, "c": 3}
    reports = {name: replace(FULL, leases_waiting=number) for name, number in waiting.items()}
    assert order(SMALL, reports, names=["a", "b", "c"]) == ["b", "a", "c"]


def test_a_stale_report_is_replaced_by_the_number_of_requests() -> None:
    silent: dict[str, EngineReport | None] = dict.fromkeys(NAMES)
    assert order(QUESTION, silent) == NAMES
    assert order(QUESTION, silent, ongoing={NAMES[0]: 3})[0] == NAMES[0]
    assert order(QUESTION, silent, ongoing={NAMES[0]: 4}) == NAMES[1:]
    busy = dict(zip(NAMES, (6, 4, 5, 7), strict=True))
    assert order(QUESTION, silent, ongoing=busy)[0] == NAMES[1]
    assert not has_room(SMALL, Candidate("a"), 4)


def test_a_request_needs_what_the_engine_would_reserve() -> None:
    request = LeaseRequest(
        "lease",
        Terms("tenant", SamplingConfig(), SpeculationConfig(max_draft=10), 50, num_choices=3),
        as_prompt(range(100)),
        companion_tokens=30,
        affinity="a document",
    )
    need = Need.of(request)
    assert (need.document, need.num_leases) == (DOCUMENT, 2)
    assert need.num_pages(16) == 6 + 3 * 4 + 6
    assert replace(need, companion_tokens=0, num_choices=1).num_pages(16) == 10
    assert replace(need, prompt_tokens=1000, companion_tokens=0).num_pages(16, 900) == (
        62 + 3 * 5 - 388 // 16
    )
