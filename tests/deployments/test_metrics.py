"""What is counted of a request: by the events that go by, into instruments that are read here."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, ClassVar, get_args

import pytest

from deployments import metrics
from deployments.metrics import EngineMetrics, IngressMetrics, RequestMetrics, RetrieverMetrics
from rapid.answering.mode.decisions import decide_by_reading, without_drafter
from rapid.engine_status import EngineStatus
from rapid.errors import RetrievalPending, TargetUnavailable, UnknownDocument
from rapid.events import Finished, GenerationEvent, Started, TextDelta
from rapid.messages import PrefillReceipt
from rapid.receipt import Cause, ChoiceStatistics
from tests.deployments.scripted import receipt

STARTED = Started("lossless", "asked for", "target", "asked for")
TIMES = dict.fromkeys(("retrieval", "drafter_prefill"), 0.0) | {
    "queue": 100.0, "target_prefill": 400.0, "draft": 30.0, "verify": 60.0
}  # fmt: skip
ANSWERED = replace(
    receipt(),
    mode="lossless",
    reason="asked for",
    cause="asked for",
    prompt_tokens=100,
    timings_ms=TIMES,
    choices=(ChoiceStatistics(4, 9, 6, 2, 0, 18, {3: (0, 1, 1, 1)}, forced=2),),
)


class Instrument:
    """Remembers what it is told, by name and labels."""

    read: ClassVar[dict[str, Any]] = {}

    def __init__(self, name: str, what: str, *rest: Any) -> None:
        self.name, self.labels, self.default = name, rest[-1], {}
        assert what

    def set_default_tags(self, tags: dict[str, str]) -> None:
        self.default = tags

    def inc(self, number: float, tags: dict[str, str] | None = None) -> None:
        assert number > 0
        self.read[self._key(tags)] += number

    def set(self, number: float, tags: dict[str, str] | None = None) -> None:
        self.read[self._key(tags)] = number

    def observe(self, number: float, tags: dict[str, str] | None = None) -> None:
        self._key(tags)
        self.read.setdefault(self.name, []).append(round(number, 6))

    def _key(self, tags: dict[str, str] | None) -> str:
        given = self.default | (tags or {})
        assert given["model_name"] == "m"
        assert set(given) == set(self.labels)
        shown = [f'{k}="{v}"' for k, v in given.items() if k not in ("model_name", "pool")]
        return self.name + (f"{{{','.join(shown)}}}" if shown else "")


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the instruments were told."""
    for kind in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(metrics, kind, Instrument)
    Instrument.read = defaultdict(int)
    return Instrument.read


class Script:
    """Events at their seconds; the clock stands where the latest was."""

    def __init__(self, *timed: tuple[float, GenerationEvent | Exception]) -> None:
        self.timed, self.now = timed, 0.0

    async def events(self) -> AsyncIterator[GenerationEvent]:
        for now, event in self.timed:
            self.now = now
            if isinstance(event, Exception):
                raise event
            yield event


async def watch(script: Script) -> RequestMetrics:
    counted = RequestMetrics("m", clock=lambda: script.now)
    async for _ in counted.watch(script.events()):  # type: ignore[arg-type]
        pass
    return counted


async def test_an_answer_is_counted_as_vllm_counts_it(read: dict[str, Any]) -> None:
    await watch(
        Script(
            (0.25, STARTED),
            (1.0, TextDelta(0, "a")),
            (1.05, TextDelta(0, "b")),
            (1.15, TextDelta(0, "c", (), "length")),
            (2.7, Finished(ANSWERED)),
        )
    )
    assert read["vllm_time_to_first_token_seconds"] == [1.0]
    assert read["vllm_inter_token_latency_seconds"] == [0.05, 0.1]
    assert read["vllm_e2e_request_latency_seconds"] == [2.7]
    assert read["vllm_request_time_per_output_token_seconds"] == [0.1]
    assert read["vllm_request_queue_time_seconds"] == [0.1]
    assert read["vllm_request_prefill_time_seconds"] == [0.4]
    assert read['vllm_request_success_total{finished_reason="length"}'] == 1
    assert (read["vllm_prompt_tokens_total"], read["vllm_generation_tokens_total"]) == (100, 18)
    assert read["vllm_spec_decode_num_drafts_total"] == 3
    assert read["vllm_spec_decode_num_draft_tokens_total"] == 9
    assert read["rapid_forced_tokens_total"] == 2
    assert read["vllm_spec_decode_num_accepted_tokens_total"] == 6
    by_place = [
        read[f'vllm_spec_decode_num_accepted_tokens_per_pos_total{{position="{i}"}}']
        for i in range(4)
    ]
    assert by_place == [3, 2, 1, 0]
    assert read['rapid_mode_total{mode="lossless",reason="asked for"}'] == 1
    assert read["rapid_plain_rounds_total"] == 1
    assert (read["rapid_draft_seconds"], read["rapid_verify_seconds"]) == ([0.03], [0.06])
    assert "rapid_retrieval_seconds" not in read
    assert not any(name.startswith("rapid_fallback") for name in read)


async def test_requests_wait_until_they_hold_their_leases(read: dict[str, Any]) -> None:
    script = Script((0.1, STARTED), (0.2, TextDelta(0, "a")), (0.3, Finished(ANSWERED)))
    counted = RequestMetrics("m", clock=lambda: script.now)
    seen = [
        (read["vllm_num_requests_waiting"], read["vllm_num_requests_running"])
        async for _ in counted.watch(script.events())  # type: ignore[arg-type]
    ]
    assert seen == [(0, 1)] * 3
    assert (read["vllm_num_requests_waiting"], read["vllm_num_requests_running"]) == (0, 0)


async def test_what_was_given_up_is_an_abort_and_runs_no_longer(read: dict[str, Any]) -> None:
    with pytest.raises(TargetUnavailable):
        await watch(Script((0.1, TargetUnavailable("gone"))))
    script = Script((0.1, STARTED), (0.2, TextDelta(0, "a")), (0.3, Finished(ANSWERED)))
    events = RequestMetrics("m").watch(script.events())  # type: ignore[arg-type]
    await anext(events)
    assert read["vllm_num_requests_running"] == 1
    await events.aclose()
    assert (read["vllm_num_requests_waiting"], read["vllm_num_requests_running"]) == (0, 0)
    assert read['vllm_request_success_total{finished_reason="abort"}'] == 2
    assert "vllm_generation_tokens_total" not in read


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"plain_from": (12,)}, "drafter lost"),
        (
            {
                "mode": "plain",
                "reason": without_drafter("no drafter").reason,
                "cause": "no drafter",
                "is_fallback": True,
            },
            "no drafter",
        ),
    ],
)
async def test_an_answer_without_its_drafter_is_a_fallback(
    read: dict[str, Any], changed: dict[str, Any], reason: str
) -> None:
    await watch(Script((0.1, STARTED), (0.2, Finished(replace(ANSWERED, **changed)))))
    assert read[f'rapid_fallback_total{{reason="{reason}"}}'] == 1


async def test_what_differs_with_every_request_is_no_label(read: dict[str, Any]) -> None:
    for log_odds in range(-100, 100):
        made = decide_by_reading(log_odds / 7, least=0.5)
        started = Started(made.mode, made.reason, made.contract, made.cause)
        ended = replace(ANSWERED, reason=made.reason, cause=made.cause, is_fallback=True)
        await watch(Script((0.1, started), (0.2, Finished(ended))))
    series = {name for name in read if name.startswith(("rapid_mode", "rapid_fallback"))}
    assert series == {
        'rapid_mode_total{mode="fused",reason="drafter can answer"}',
        'rapid_mode_total{mode="plain",reason="drafter cannot answer"}',
        'rapid_fallback_total{reason="drafter can answer"}',
        'rapid_fallback_total{reason="drafter cannot answer"}',
    }


def test_a_cause_is_a_few_plain_words() -> None:
    for cause in get_args(Cause):
        assert len(cause) < 30
        assert not any(character.isdigit() for character in cause)


async def test_the_targets_second_reading_is_counted_once_it_was_read(
    read: dict[str, Any],
) -> None:
    witnessed = replace(ANSWERED, witness_tokens=320, timings_ms=TIMES | {"witness_prefill": 250.0})
    lost = replace(ANSWERED, witness_tokens=320)  # the drafter was lost before
    for each in (witnessed, lost, ANSWERED):
        await watch(Script((0.1, STARTED), (0.2, Finished(each))))
    assert read["rapid_witness_prompt_tokens_total"] == 320
    assert read["rapid_witness_prefill_seconds"] == [0.25]


async def test_what_an_answer_went_on_after_is_counted_by_its_kind(read: dict[str, Any]) -> None:
    lost = replace(ANSWERED, failovers=("target lost", "target lost", "drafter hung"))
    await watch(Script((0.1, STARTED), (0.2, Finished(lost))))
    assert read['rapid_failover_total{reason="target lost"}'] == 2
    assert read['rapid_failover_total{reason="drafter hung"}'] == 1


def test_an_ingress_counts_ends_and_waits(read: dict[str, Any]) -> None:
    ingress = IngressMetrics("m")
    ingress.count_end("ok", "")
    for wait_s in (0.0, 2.5):
        ingress.count_end("refused", "server full")
        ingress.observe_wait(wait_s)
    assert read['rapid_request_end_total{outcome="ok",cause=""}'] == 1
    assert read['rapid_request_end_total{outcome="refused",cause="server full"}'] == 2
    assert read["rapid_admission_wait_seconds"] == [0.0, 2.5]
    ingress.report(is_ready=True)
    assert read["rapid_ready"] == 1


def test_of_several_models_an_ingress_names_the_one_that_is_known(read: dict[str, Any]) -> None:
    ingress = IngressMetrics("")
    ingress.count_end("ok", "", "m")
    ingress.observe_wait(1.0, "m")
    ingress.report(is_ready=True, model="m")
    assert read['rapid_request_end_total{outcome="ok",cause=""}'] == 1
    assert read["rapid_ready"] == 1
    assert ingress._ends.default == {"model_name": ""}


def test_an_engine_counts_its_pages_and_its_cache(read: dict[str, Any]) -> None:
    engine = EngineMetrics("m", "target")
    engine.report(EngineStatus(1, 8, 60, 120, 16, 1024, ahead_hits=2))
    engine.report(EngineStatus(1, 8, 30, 120, 16, 1024, ahead_hits=5, ahead_misses=1))
    for cached in (0, 80):
        engine.count(PrefillReceipt("a", 100, cached))
    assert read["vllm_kv_cache_usage_perc"] == 0.25
    assert read["vllm_prefix_cache_queries_total"] == 200
    assert read["vllm_prefix_cache_hits_total"] == 80
    assert (read["rapid_draft_ahead_hit_total"], read["rapid_draft_ahead_miss_total"]) == (5, 1)


def test_an_engine_counts_its_steps(read: dict[str, Any]) -> None:
    engine = EngineMetrics("m", "drafter")
    status = EngineStatus(1, 8, 60, 120, 16, 1024)
    for steps, steps_s, calls, tokens in ((10, 0.5, 20, 300), (30, 1.0, 60, 400)):
        engine.report(
            replace(
                status,
                steps=steps,
                steps_s=steps_s,
                step_calls=calls,
                step_tokens=tokens,
                tokens_drawn=3 * steps,
                tokens_specified=steps,
            )
        )
    assert (read["rapid_tokens_drawn_total"], read["rapid_tokens_specified_total"]) == (90, 30)
    assert read["rapid_engine_steps_total"] == 30
    assert read["rapid_engine_step_seconds_total"] == 1.0
    assert (read["rapid_engine_step_calls_total"], read["rapid_engine_step_tokens_total"]) == (
        60,
        400,
    )


def test_an_engine_counts_what_is_below_its_pool(read: dict[str, Any]) -> None:
    engine = EngineMetrics("m", "target")
    status = EngineStatus(1, 8, 60, 120, 16, 1024, host_tokens=640, disk_tokens=6400)
    engine.report(replace(status, host_tokens_restored=160))
    engine.report(replace(status, host_tokens=320, host_tokens_restored=480, disk_tokens_read=320))
    assert read['rapid_kv_tier_tokens{tier="host"}'] == 320
    assert read['rapid_kv_tier_tokens{tier="disk"}'] == 6400
    assert read['rapid_kv_tier_hit_tokens_total{tier="host"}'] == 480
    assert read['rapid_kv_tier_hit_tokens_total{tier="disk"}'] == 320


def test_a_retriever_counts_its_questions(read: dict[str, Any]) -> None:
    retriever = RetrieverMetrics("m")
    with retriever.question():
        assert read["rapid_retriever_waiting"] == 1
    errors = RetrievalPending("later"), UnknownDocument("?"), KeyError("bug")
    for error in (*errors, asyncio.CancelledError()):
        with pytest.raises(type(error)), retriever.question():
            raise error
    retriever.observe(1.5, 0.25)
    retriever.report(2, 1024, is_away=True)
    assert read["rapid_retriever_waiting"] == 0
    assert [
        read[f'rapid_retriever_end_total{{outcome="{each}"}}']
        for each in ("ok", "pending", "unknown", "failed", "left")
    ] == [1] * 5
    assert read["rapid_retriever_index_seconds"] == [1.5]
    assert read["rapid_retriever_search_seconds"] == [0.25]
    assert (read["rapid_retriever_indexing"], read["rapid_retriever_points"]) == (2, 1024)
    assert read["rapid_retriever_away"] == 1
