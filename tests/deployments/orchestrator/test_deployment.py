"""The life of a request on a real Ray with engines that have ledgers but no models."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import date
from typing import Any

import httpx
import pytest
import ray

from deployments.orchestrator.deployment import Refusal
from rapid.chat_messages import Document
from rapid.errors import PromptTooLong
from rapid.events import Finished, GenerationEvent, Started, TextDelta
from rapid.messages import GenerateRequest
from rapid.receipt import Receipt
from tests.fakes import scripted_token
from tests.ray_cluster import BEFORE_EXPIRY_S, BLOCKS_OPENED, Fakes, question, wait_until

pytestmark = pytest.mark.ray

LIGHTHOUSE = Document("atlas", "The lighthouse of Varo guards the northern strait.\n\n" * 8)


def stream(fakes: Fakes, request: GenerateRequest) -> Any:
    generate = fakes.orchestrator.options(stream=True, method_name="generate", _by_reference=False)
    return generate.remote(request)


async def answered(fakes: Fakes, request: GenerateRequest) -> list[GenerationEvent | Refusal]:
    return [event async for event in stream(fakes, request)]


def text(events: Iterable[GenerationEvent | Refusal], choice: int = 0) -> str:
    deltas = [event for event in events if isinstance(event, TextDelta)]
    return "".join(delta.text for delta in deltas if delta.choice == choice)


def receipt(events: Sequence[GenerationEvent | Refusal]) -> Receipt:
    assert isinstance(events[-1], Finished)
    return events[-1].receipt


@pytest.mark.parametrize(
    ("mode", "documents", "resolved", "contract"),
    [
        ("auto", (LIGHTHOUSE,), "fused", "fused"),
        ("auto", (), "plain", "target"),
        ("lossless", (LIGHTHOUSE,), "lossless", "target"),
        ("lossless", (), "lossless", "target"),
        ("fused", (LIGHTHOUSE,), "fused", "fused"),
        ("fused", (), "fused", "target"),
        ("plain", (LIGHTHOUSE,), "plain", "target"),
        ("rag", (LIGHTHOUSE,), "rag", "drafter"),
    ],
)
async def test_a_request_is_answered_under_its_contract(
    fakes: Fakes, mode: str, documents: tuple[Document, ...], resolved: str, contract: str
) -> None:
    events = await answered(
        fakes, question("r1", mode=mode, documents=documents, seed=5, explain=True)
    )
    started, end = events[0], receipt(events)
    assert started == Started(end.mode, end.reason, end.contract, end.cause)
    assert started.prompt_tokens == end.prompt_tokens  # type: ignore[union-attr]
    assert sum(event.num_tokens for event in events[1:-1]) == 24  # type: ignore[union-attr]
    assert (end.mode, end.contract) == (resolved, contract)
    assert end.explanation is not None
    # Whoever drafts, the script's tokens come out: wrong drafts are corrected.
    assert end.explanation.token_ids == (tuple(scripted_token(5, 0, i) for i in range(24)),)
    is_drafted = mode == "lossless" or contract == "fused"
    assert bool(end.choices[0].drafted) == is_drafted
    assert bool(end.chunks) == (bool(documents) and resolved != "plain")
    assert [event.finish_reason for event in events[1:-1]][-1] == "length"  # type: ignore[union-attr]
    wait_until(lambda: fakes.held() == (0, 0), BEFORE_EXPIRY_S)


async def test_wrong_drafts_are_counted_and_corrected(fakes: Fakes) -> None:
    end = receipt(
        await answered(fakes, question("r2", mode="lossless", seed=1, max_tokens=21, explain=True))
    )
    (choice,) = end.choices
    assert (choice.completion_tokens, choice.accepted) == (21, 18)  # wrong at 6, 13 and 20
    assert end.explanation is not None
    assert end.explanation.origins[0].count("corrected") == 3
    assert end.plain_from == (None,)


async def test_the_receipt_names_the_requests_day(fakes: Fakes) -> None:
    day = date(2025, 3, 7)
    assert receipt(await answered(fakes, question("r2d", mode="plain", date=day))).date == day


async def test_all_choices_share_one_lease_and_each_ends_once(fakes: Fakes) -> None:
    events = await answered(fakes, question("r3", mode="lossless", seed=2, num_choices=3))
    ends = [e.choice for e in events if isinstance(e, TextDelta) and e.finish_reason]
    assert sorted(ends) == [0, 1, 2]
    assert len({text(events, choice) for choice in range(3)}) == 3


async def test_an_answer_ends_at_a_stop_string_in_every_mode_alike(fakes: Fakes) -> None:
    whole = text(await answered(fakes, question("r4", mode="plain", seed=111, max_tokens=60)))
    stop = whole[len(whole) // 2 :][:3]
    answers = []
    for mode in ("plain", "lossless"):
        events = await answered(
            fakes, question(f"r4{mode}", mode=mode, seed=111, max_tokens=60, stop=(stop,))
        )
        answers.append((text(events), receipt(events).choices[0].completion_tokens))
    assert answers[0] == answers[1]
    assert answers[0][0] == whole[: whole.index(stop)]


async def test_logprobs_come_with_their_tokens(fakes: Fakes) -> None:
    events = await answered(fakes, question("r5", mode="lossless", max_tokens=9, num_logprobs=2))
    tokens = [t for e in events if isinstance(e, TextDelta) for t in e.logprobs]
    assert len(tokens) == 9
    assert all(len(token.top) == 2 for token in tokens)


async def test_a_prompt_that_is_too_long_is_refused_with_numbers(fakes: Fakes) -> None:
    (refused,) = await answered(fakes, question("r6", text="word " * 3000))
    assert isinstance(refused, PromptTooLong)
    assert refused.param == "messages"
    assert "more than the 1024 tokens of the target's context" in str(refused)
    assert "mode: rag" in str(refused)
    assert fakes.held() == (0, 0)


async def test_an_answer_without_a_length_is_cut_to_the_context(fakes: Fakes) -> None:
    end = receipt(await answered(fakes, question("r7", text="a " * 700, max_tokens=None)))
    assert end.prompt_tokens + end.choices[0].completion_tokens == 1024


@pytest.mark.parametrize("after", [0, 1, 3])
async def test_a_cancelled_request_holds_nothing(fakes: Fakes, after: int) -> None:
    request = question("r8", mode="fused", documents=(LIGHTHOUSE,), seed=50_000, max_tokens=400)
    events = stream(fakes, request)
    for _ in range(after):
        await anext(events)
    events.cancel()
    wait_until(lambda: fakes.held() == (0, 0), BEFORE_EXPIRY_S)


async def test_a_drafter_that_dies_leaves_the_answer_to_the_target(fakes: Fakes) -> None:
    request = question("r9", mode="lossless", seed=60_003, max_tokens=60, explain=True)
    events: list[GenerationEvent] = []
    async for event in stream(fakes, request):
        events.append(event)
        if len(events) == 3:
            for engine in fakes.engines("Drafter"):
                ray.kill(engine)
    end = receipt(events)
    assert end.explanation is not None
    assert end.explanation.token_ids[0] == tuple(scripted_token(3, 0, i) for i in range(60))
    assert end.plain_from[0] is not None
    assert 0 < end.plain_from[0] < 60
    assert end.failovers == ("drafter lost",)
    # The next request waits for the drafter that replaces it.
    end = receipt(await answered(fakes, question("r10", mode="lossless", seed=3)))
    assert end.mode == "lossless"
    assert end.choices[0].drafted


async def test_a_drafter_that_hangs_leaves_the_answer_to_the_target(fakes: Fakes) -> None:
    """Its process is stopped, and woken when the answer is complete."""
    request = question("r14", mode="lossless", seed=60_003, max_tokens=60, explain=True)
    stopped: list[int] = []
    events: list[GenerationEvent] = []
    try:
        async for event in stream(fakes, request):
            events.append(event)
            if len(events) == 3:
                stopped = ray.get([engine.ping.remote() for engine in fakes.engines("Drafter")])
                for process in stopped:
                    os.kill(process, signal.SIGSTOP)
    finally:
        for process in stopped:
            os.kill(process, signal.SIGCONT)
    end = receipt(events)
    assert end.failovers == ("drafter hung",)
    assert end.explanation is not None
    assert end.explanation.token_ids[0] == tuple(scripted_token(3, 0, i) for i in range(60))
    assert end.plain_from[0] is not None
    assert 0 < end.plain_from[0] < 60
    wait_until(lambda: fakes.held() == (0, 0), 20)


async def test_a_target_that_dies_is_replaced_and_the_answer_goes_on(fakes: Fakes) -> None:
    request = question(
        "r11", mode="lossless", seed=60_004, max_tokens=60, num_choices=2, explain=True
    )
    events: list[GenerationEvent] = []
    async for event in stream(fakes, request):
        events.append(event)
        if len(events) == 4:
            for engine in fakes.engines("Target"):
                ray.kill(engine)
    end = receipt(events)
    assert end.explanation is not None
    for choice in range(2):
        script = tuple(scripted_token(4, choice, i) for i in range(60))
        assert end.explanation.token_ids[choice] == script
    wait_until(lambda: fakes.held() == (0, 0), BEFORE_EXPIRY_S)


async def test_many_at_once_get_what_each_gets_alone(fakes: Fakes) -> None:
    async def ask(index: int) -> str:
        mode = ("auto", "lossless", "plain", "rag")[index % 4]
        request = question(
            f"r12-{index}", mode=mode, documents=(LIGHTHOUSE,), seed=5_000 + index, max_tokens=40
        )
        return text(await answered(fakes, request))

    together = await asyncio.gather(*(ask(index) for index in range(24)))
    alone = [await ask(index) for index in range(24)]
    assert together == alone
    wait_until(lambda: fakes.held() == (0, 0), BEFORE_EXPIRY_S)


async def test_blocks_are_opened_by_targets_only(fakes: Fakes) -> None:
    BLOCKS_OPENED.unlink(missing_ok=True)
    end = receipt(await answered(fakes, question("r13", mode="lossless", max_tokens=50)))
    opened = BLOCKS_OPENED.read_text().split()
    assert len(opened) == end.choices[0].rounds
    targets = {str(ray.get(engine.ping.remote())) for engine in fakes.engines("Target")}
    assert set(opened) <= targets


async def test_readiness_lists_every_engine_of_every_pool(fakes: Fakes) -> None:
    def state() -> dict[str, Any]:
        return dict(httpx.get(f"{fakes.url}/ready", timeout=10).json())

    def is_seen() -> bool:
        seen = state()
        engines = seen["engines"]
        is_idle = not any(each.get("leases_open", 0) for each in engines)
        return seen["ready"] and len(engines) > 1 and is_idle

    await asyncio.to_thread(wait_until, is_seen, 20, 0.2)
    seen = state()
    assert set(seen["pools"]) == {"ingress", "orchestrator", "retriever", "target", "drafter"}
    assert {engine["pool"] for engine in seen["engines"]} == {"target", "drafter"}
    assert seen["ready"]


OURS = {
    "cause",
    "outcome",
    "tier",
    "model_name",
    "pool",
    "mode",
    "reason",
    "position",
    "finished_reason",
    "le",
}
RAYS = {"Component", "NodeAddress", "SessionName", "Version", "WorkerId"}


async def test_a_scrape_shows_what_was_answered(fakes: Fakes) -> None:
    """Every process of a node reports to one address, which ``GET /ready`` names."""
    request = question("r20", mode="lossless", documents=(LIGHTHOUSE,), seed=5)
    await answered(fakes, request)
    await asyncio.to_thread(check_scrape, fakes.url)


def check_scrape(url: str) -> None:
    (scraped,) = httpx.get(f"{url}/ready", timeout=10).json()["metrics"]
    assert scraped.startswith("http://127.0.0.1:")
    shown = {
        "ray_vllm_generation_tokens_total": 'model_name="fakes"',
        "ray_vllm_spec_decode_num_accepted_tokens_per_pos_total": 'position="5"',
        "ray_vllm_time_to_first_token_seconds_bucket": 'le="0.5"',
        "ray_vllm_num_requests_running": 'model_name="fakes"',
        "ray_vllm_kv_cache_usage_perc": 'pool="drafter"',
        "ray_vllm_prefix_cache_queries_total": 'pool="target"',
        "ray_rapid_mode_total": 'mode="lossless"',
        "ray_rapid_kv_tier_tokens": 'tier="host"',
        "ray_rapid_retriever_away": 'model_name="fakes"',
        "ray_rapid_ready": 'model_name="fakes"',
    }

    def lines() -> list[str]:
        text = httpx.get(scraped, timeout=10).text
        return [line for line in text.splitlines() if line.startswith(("ray_vllm_", "ray_rapid_"))]

    def are_shown() -> bool:
        seen = lines()
        return all(any(name in x and label in x for x in seen) for name, label in shown.items())

    wait_until(are_shown, 30, every_s=1)
    for line in lines():
        assert 'model_name="' in line
        labels = set(re.findall(r'(\w+)="', line))
        assert {each for each in labels - RAYS if not each.startswith("otel_")} <= OURS


async def test_a_crowd_of_one_tenant_does_not_stand_before_another(fakes: Fakes) -> None:
    """Sixty requests for eight leases; first come, first served, a guest would be the last."""
    num_done = 0

    async def ask(tenant: str, number: int) -> None:
        nonlocal num_done
        asked = question(f"{tenant}-{number}", mode="plain", seed=200_005)  # 200 ms a step
        await answered(fakes, replace(asked, tenant=tenant))
        num_done += tenant == "crowd"

    crowd = [asyncio.create_task(ask("crowd", number)) for number in range(60)]
    await asyncio.to_thread(wait_until, lambda: fakes.held()[0] >= 8, 30)
    await ask("guest", 0)
    assert num_done < 40
    await asyncio.gather(*crowd)
    await asyncio.to_thread(wait_until, lambda: fakes.held() == (0, 0), 20)
