"""Prometheus metrics of the application, with vLLM's names and meanings where vLLM has them.

Ray prefixes every name with ``ray_`` and allows no colon: ``vllm:num_requests_running`` becomes
``ray_vllm_num_requests_running``, as when vLLM runs under Ray. The label ``model_name`` is the name
that requests give. Labels have few values each: never a tenant, a request or its content, nor the
sentence of a receipt.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter as Counts
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

from ray.util.metrics import Counter, Gauge, Histogram

from rapid.engine_status import EngineStatus
from rapid.errors import RetrievalPending, UnknownDocument
from rapid.events import ChoiceDelta, Finished, GenerationEvent, Started, TextDelta
from rapid.messages import PrefillReceipt
from rapid.ports import Clock
from rapid.receipt import ChoiceStatistics, Receipt

# Upper bounds of the histograms of times per token.
_TOKEN_S = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0]
# Upper bounds of the histograms of times of requests.
_REQUEST_S = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0]


class _Instruments:
    """A maker of instruments with the same labels, which are set once, and perhaps others."""

    def __init__(self, **labels: str) -> None:
        self._labels = labels

    def gauge(self, name: str, what: str, *others: str) -> Gauge:
        return self._label(Gauge(name, what, (*self._labels, *others)))

    def counter(self, name: str, what: str, *others: str) -> Counter:
        return self._label(Counter(name, what, (*self._labels, *others)))

    def histogram(self, name: str, what: str, boundaries: list[float] = _REQUEST_S) -> Histogram:
        return self._label(Histogram(name, what, boundaries, (*self._labels,)))

    def _label(self, instrument: Any) -> Any:
        instrument.set_default_tags(self._labels)
        return instrument


class RequestMetrics:
    """Metrics of an orchestrator's requests, collected from their events.

    Times exclude the transfer to the client. Counters of tokens and drafts are incremented when an
    answer is complete, so aborted requests add nothing to them.
    """

    def __init__(self, model: str, *, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._num_waiting = self._num_running = 0
        make = _Instruments(model_name=model)
        self._waiting = make.gauge(
            "vllm_num_requests_waiting", "Requests that wait for their leases."
        )
        self._running = make.gauge("vllm_num_requests_running", "Requests that are being answered.")
        self._success = make.counter(
            "vllm_request_success_total", "Answers by how they ended.", "finished_reason"
        )
        self._prompt_tokens = make.counter("vllm_prompt_tokens_total", "Tokens of prompts read.")
        self._generation_tokens = make.counter("vllm_generation_tokens_total", "Tokens of answers.")
        self._first_token = make.histogram(
            "vllm_time_to_first_token_seconds", "From the request to its first text."
        )
        self._inter_token = make.histogram(
            "vllm_inter_token_latency_seconds", "Between two rounds of a choice.", _TOKEN_S
        )
        self._per_token = make.histogram(
            "vllm_request_time_per_output_token_seconds",
            "Of a request: time after the first text, by tokens of its longest answer.",
            _TOKEN_S,
        )
        self._end_to_end = make.histogram(
            "vllm_e2e_request_latency_seconds", "From the request to the end."
        )
        self._queue = make.histogram("vllm_request_queue_time_seconds", "Waiting for leases.")
        self._prefill = make.histogram(
            "vllm_request_prefill_time_seconds", "Reading the target's prompt."
        )
        self._drafts = make.counter("vllm_spec_decode_num_drafts_total", "Blocks that were judged.")
        self._draft_tokens = make.counter(
            "vllm_spec_decode_num_draft_tokens_total", "Drafted tokens."
        )
        self._forced = make.counter(
            "rapid_forced_tokens_total", "Drafted tokens that a grammar left no choice about."
        )
        self._accepted = make.counter(
            "vllm_spec_decode_num_accepted_tokens_total", "Drafted tokens that were kept."
        )
        self._accepted_at = make.counter(
            "vllm_spec_decode_num_accepted_tokens_per_pos_total",
            "Drafted tokens that were kept, by their place in the block.",
            "position",
        )
        self._modes = make.counter(
            "rapid_mode_total", "Requests by their mode and why they have it.", "mode", "reason"
        )
        self._fallbacks = make.counter(
            "rapid_fallback_total",
            "Answers without the drafter or the text they were for.",
            "reason",
        )
        self._failovers = make.counter(
            "rapid_failover_total", "Losses that an answer went on after.", "reason"
        )
        self._plain_rounds = make.counter(
            "rapid_plain_rounds_total", "Rounds that the target decoded alone."
        )
        self._retrieval = make.histogram(
            "rapid_retrieval_seconds", "Of a request: finding what the drafter reads."
        )
        self._witness_tokens = make.counter(
            "rapid_witness_prompt_tokens_total",
            "Tokens of retrieved text that the target read beside its own prompt.",
        )
        self._witness_prefill = make.histogram(
            "rapid_witness_prefill_seconds", "Of a request: reading that text."
        )
        self._draft = make.histogram(
            "rapid_draft_seconds", "Of a request: drafting, over all rounds."
        )
        self._verify = make.histogram("rapid_verify_seconds", "Of a request: judging and decoding.")

    async def watch(
        self, events: AsyncGenerator[GenerationEvent]
    ) -> AsyncGenerator[GenerationEvent]:
        """Yield `events` unchanged and count them; closing this generator closes them."""
        began = self._clock()
        latest: dict[int, float] = {}
        first: float | None = None
        ends = Counts[str]()
        self._move(waiting=1)
        is_running = is_done = False
        try:
            async with aclosing(events):
                async for event in events:
                    now = self._clock()
                    if isinstance(event, Started):
                        is_running = True
                        self._move(waiting=-1, running=1)
                        self._modes.inc(1, {"mode": event.mode, "reason": event.cause})
                    elif isinstance(event, ChoiceDelta):
                        if first is None:
                            first = now
                            self._first_token.observe(now - began)
                        if event.choice in latest:
                            self._inter_token.observe(now - latest[event.choice])
                        latest[event.choice] = now
                        if isinstance(event, TextDelta) and event.finish_reason:
                            ends.update([event.finish_reason])
                    elif isinstance(event, Finished):
                        is_done = True
                        self._end_to_end.observe(now - began)
                        self._count(event.receipt, now - (first or now))
                    yield event
        finally:
            self._move(**{"running" if is_running else "waiting": -1})
            for reason, number in ends.items() if is_done else [("abort", 1)]:
                self._success.inc(number, {"finished_reason": reason})

    def _move(self, waiting: int = 0, running: int = 0) -> None:
        self._num_waiting += waiting
        self._num_running += running
        self._waiting.set(self._num_waiting)
        self._running.set(self._num_running)

    def _count(self, receipt: Receipt, generating_s: float) -> None:
        choices, seconds = receipt.choices, {k: v / 1e3 for k, v in receipt.timings_ms.items()}
        _raise(self._prompt_tokens, receipt.prompt_tokens)
        _raise(self._generation_tokens, sum(each.completion_tokens for each in choices))
        longest = max(each.completion_tokens for each in choices)
        if longest > 1:
            self._per_token.observe(generating_s / (longest - 1))
        self._queue.observe(seconds["queue"])
        self._prefill.observe(seconds["target_prefill"])
        if seconds["retrieval"]:
            self._retrieval.observe(seconds["retrieval"])
        if "witness_prefill" in seconds:
            _raise(self._witness_tokens, receipt.witness_tokens)
            self._witness_prefill.observe(seconds["witness_prefill"])
        if seconds["draft"]:
            self._draft.observe(seconds["draft"])
        self._verify.observe(seconds["verify"])
        num_drafts = sum(each.drafted_rounds for each in choices)
        _raise(self._drafts, num_drafts)
        _raise(self._plain_rounds, sum(each.rounds for each in choices) - num_drafts)
        _raise(self._draft_tokens, sum(each.drafted for each in choices))
        _raise(self._forced, sum(each.forced for each in choices))
        _raise(self._accepted, sum(each.accepted for each in choices))
        for position, number in count_accepted(choices).items():
            self._accepted_at.inc(number, {"position": str(position)})
        for reason, number in Counts(receipt.failovers).items():
            self._failovers.inc(number, {"reason": reason})
        if receipt.is_fallback:
            self._fallbacks.inc(1, {"reason": receipt.cause})
        elif any(position is not None for position in receipt.plain_from):
            self._fallbacks.inc(1, {"reason": "drafter lost"})


class IngressMetrics:
    """Metrics of the requests that reach an ingress, those that it refuses included."""

    def __init__(self, model: str) -> None:
        """Create the instruments; `model` labels what belongs to none, as an unreadable request."""
        make = _Instruments(model_name=model)
        self._ends = make.counter(
            "rapid_request_end_total",
            "Requests by how they ended, and by the cause of a refusal or failure.",
            "outcome",
            "cause",
        )
        self._waits = make.histogram(
            "rapid_admission_wait_seconds", "Waiting for a place, to be let in or refused."
        )
        self._ready = make.gauge("rapid_ready", "1 while a request would be answered.")

    def count_end(self, outcome: str, cause: str, model: str | None = None) -> None:
        """Count a request by its outcome and cause, both of closed sets."""
        self._ends.inc(1, {"outcome": outcome, "cause": cause} | _name(model))

    def observe_wait(self, seconds: float, model: str | None = None) -> None:
        """Note how long a request waited for its place."""
        self._waits.observe(seconds, _name(model))

    def report(self, *, is_ready: bool, model: str | None = None) -> None:
        """Update whether a request would be answered, as this ingress sees it."""
        self._ready.set(int(is_ready), _name(model))


class EngineMetrics:
    """Metrics of an engine; the label ``pool`` is ``target`` or ``drafter``."""

    def __init__(self, model: str, pool: str) -> None:
        """Create the instruments; the drafter's engine has the name of the answers it works for."""
        make = _Instruments(model_name=model, pool=pool)
        self._usage = make.gauge("vllm_kv_cache_usage_perc", "KV pages in use, 1 is all.")
        self._queries = make.counter(
            "vllm_prefix_cache_queries_total", "Prompt tokens looked for in the cache."
        )
        self._hits = make.counter(
            "vllm_prefix_cache_hits_total", "Prompt tokens found in the cache."
        )
        self._totals = {  # by the status's field
            "ahead_hits": make.counter(
                "rapid_draft_ahead_hit_total", "Blocks that began with what was drafted ahead."
            ),
            "ahead_misses": make.counter(
                "rapid_draft_ahead_miss_total", "Blocks that found that to be wrong."
            ),
            "steps": make.counter("rapid_engine_steps_total", "Forwards."),
            "steps_s": make.counter("rapid_engine_step_seconds_total", "Time of the forwards."),
            "step_calls": make.counter(
                "rapid_engine_step_calls_total", "Calls with rows in a forward."
            ),
            "step_tokens": make.counter("rapid_engine_step_tokens_total", "Rows in the forwards."),
            "tokens_drawn": make.counter("rapid_tokens_drawn_total", "Tokens drawn or judged."),
            "tokens_specified": make.counter(
                "rapid_tokens_specified_total", "Of them, those that no fast form was sure of."
            ),
        }
        self._tier_tokens = make.gauge(
            "rapid_kv_tier_tokens", "Tokens with KV below the pool.", "tier"
        )
        self._tier_hits = make.counter(
            "rapid_kv_tier_hit_tokens_total", "Tokens with KV that came back from there.", "tier"
        )
        self._reported: EngineStatus | None = None

    def report(self, status: EngineStatus) -> None:
        """Update the metrics from the engine's status."""
        self._usage.set(status.kv_pages_in_use / status.kv_pages_total)
        for name, counter in self._totals.items():
            _raise(counter, self._growth(status, name))
        for tier, held, came_back in (
            ("host", status.host_tokens, "host_tokens_restored"),
            ("disk", status.disk_tokens, "disk_tokens_read"),
            ("passages", status.passage_tokens, "passage_tokens_placed"),
        ):
            self._tier_tokens.set(held, {"tier": tier})
            _raise(self._tier_hits, self._growth(status, came_back), {"tier": tier})
        self._reported = status

    def _growth(self, status: EngineStatus, name: str) -> float:
        before = getattr(self._reported, name) if self._reported else 0
        growth: float = getattr(status, name) - before
        return growth

    def count(self, receipt: PrefillReceipt) -> None:
        """Count the tokens of a prefilled prompt."""
        _raise(self._queries, receipt.num_tokens)
        _raise(self._hits, receipt.num_cached_tokens)


class RetrieverMetrics:
    """Metrics of a replica of the retriever."""

    def __init__(self, model: str) -> None:
        make = _Instruments(model_name=model)
        self._num_waiting = 0
        self._waiting = make.gauge("rapid_retriever_waiting", "Questions that wait.")
        self._indexing = make.gauge("rapid_retriever_indexing", "Documents being indexed.")
        self._points = make.gauge("rapid_retriever_points", "Chunks of documents in use.")
        self._away = make.gauge("rapid_retriever_away", "1 while nothing can be retrieved.")
        self._index = make.histogram(
            "rapid_retriever_index_seconds", "Of a question: its documents."
        )
        self._search = make.histogram(
            "rapid_retriever_search_seconds", "Of a question: finding chunks."
        )
        self._ends = make.counter("rapid_retriever_end_total", "Questions by outcome.", "outcome")

    @contextmanager
    def question(self) -> Iterator[None]:
        """Count a question, which waits for the duration of the context."""
        self._move(1)
        outcome = "failed"
        try:
            yield
            outcome = "ok"
        except RetrievalPending:
            outcome = "pending"
            raise
        except UnknownDocument:
            outcome = "unknown"
            raise
        except (asyncio.CancelledError, GeneratorExit):
            outcome = "left"
            raise
        finally:
            self._move(-1)
            self._ends.inc(1, {"outcome": outcome})

    def observe(self, index_s: float, search_s: float) -> None:
        """Note how long a question's documents and its search took, in seconds."""
        self._index.observe(index_s)
        self._search.observe(search_s)

    def report(self, num_indexing: int, num_points: int, *, is_away: bool) -> None:
        """Update what the replica holds and does."""
        self._indexing.set(num_indexing)
        self._points.set(num_points)
        self._away.set(int(is_away))

    def _move(self, number: int) -> None:
        self._num_waiting += number
        self._waiting.set(self._num_waiting)


def count_accepted(choices: Sequence[ChoiceStatistics]) -> Counts[int]:
    """Return how many drafted tokens were accepted at each position of a block."""
    kept = Counts[int]()
    for choice in choices:
        for counts in choice.histogram.values():
            for num_accepted, number in enumerate(counts):
                kept.update(dict.fromkeys(range(num_accepted), number) if number else {})
    return kept


def _name(model: str | None) -> dict[str, str]:
    """Return the label of a model; none leaves that of the instrument."""
    return {} if model is None else {"model_name": model}


def _raise(counter: Counter, number: float, labels: dict[str, str] | None = None) -> None:
    if number:  # Ray rejects an increment of zero
        counter.inc(number, labels)
