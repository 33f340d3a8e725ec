"""Prometheus metrics of the application, with vLLM's names and meanings where vLLM has them.

Instruments are Ray's: the processes of a node report to its Ray agent, which serves all of them on
one port (``docs/operations.md``), so replicas and engines come and go without ports of their own.
Ray prefixes every name with ``ray_`` and allows no colon: ``vllm:num_requests_running`` becomes
``ray_vllm_num_requests_running``, as when vLLM runs under Ray.

Every label has few values: a configured name, a mode, one of the fixed sentences of
`rapid.answering`, or a position in a block. Labels never hold a tenant, a request or its
content.
"""

from __future__ import annotations

import time
from collections import Counter as Counts
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

from ray.util.metrics import Counter, Gauge, Histogram

from rapid.messages import (
    ChoiceStatistics,
    EngineStatus,
    Finished,
    GenerationEvent,
    PrefillReceipt,
    Receipt,
    Started,
    TextDelta,
)
from rapid.ports import Clock

Instrument = TypeVar("Instrument", Gauge, Counter, Histogram)

_TOKEN_S = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0]
_REQUEST_S = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0]
_LOST = "the drafter was lost"


class RequestMetrics:
    """Metrics of an orchestrator's requests, collected from their events.

    Times are measured in the orchestrator and exclude the transfer to the client. Counters of
    tokens and drafts are incremented when an answer is complete, so aborted requests add nothing to
    them.
    """

    def __init__(self, model: str, *, clock: Clock = time.monotonic) -> None:
        """Create the instruments.

        Args:
            model: The model name that requests give, the label ``model_name``.
            clock: Monotonic seconds.
        """
        self._clock = clock
        self._num_waiting = self._num_running = 0

        def gauge(name: str, what: str) -> Gauge:
            return _labelled(Gauge(name, what, ("model_name",)), model)

        def counter(name: str, what: str, *labels: str) -> Counter:
            return _labelled(Counter(name, what, ("model_name", *labels)), model)

        def histogram(name: str, what: str, boundaries: list[float]) -> Histogram:
            return _labelled(Histogram(name, what, boundaries, ("model_name",)), model)

        self._waiting = gauge("vllm_num_requests_waiting", "Requests that wait for their leases.")
        self._running = gauge("vllm_num_requests_running", "Requests that are being answered.")
        self._success = counter(
            "vllm_request_success_total", "Answers by how they ended.", "finished_reason"
        )
        self._prompt_tokens = counter("vllm_prompt_tokens_total", "Tokens of prompts read.")
        self._generation_tokens = counter("vllm_generation_tokens_total", "Tokens of answers.")
        self._first_token = histogram(
            "vllm_time_to_first_token_seconds", "From the request to its first text.", _REQUEST_S
        )
        self._inter_token = histogram(
            "vllm_inter_token_latency_seconds", "Between two rounds of a choice.", _TOKEN_S
        )
        self._per_token = histogram(
            "vllm_request_time_per_output_token_seconds",
            "Of a request: time after the first text, by tokens of its longest answer.",
            _TOKEN_S,
        )
        self._end_to_end = histogram(
            "vllm_e2e_request_latency_seconds", "From the request to the end.", _REQUEST_S
        )
        self._queue = histogram(
            "vllm_request_queue_time_seconds", "Waiting for leases.", _REQUEST_S
        )
        self._prefill = histogram(
            "vllm_request_prefill_time_seconds", "Reading the target's prompt.", _REQUEST_S
        )
        self._drafts = counter("vllm_spec_decode_num_drafts_total", "Blocks that were judged.")
        self._draft_tokens = counter("vllm_spec_decode_num_draft_tokens_total", "Drafted tokens.")
        self._accepted = counter(
            "vllm_spec_decode_num_accepted_tokens_total", "Drafted tokens that were kept."
        )
        self._accepted_at = counter(
            "vllm_spec_decode_num_accepted_tokens_per_pos_total",
            "Drafted tokens that were kept, by their place in the block.",
            "position",
        )
        self._modes = counter(
            "rapid_mode_total", "Requests by their mode and why they have it.", "mode", "reason"
        )
        self._fallbacks = counter(
            "rapid_fallback_total",
            "Answers without the drafter or the text they were for.",
            "reason",
        )
        self._failovers = counter(
            "rapid_failover_total", "Losses that an answer went on after.", "reason"
        )
        self._plain_rounds = counter(
            "rapid_plain_rounds_total", "Rounds that the target decoded alone."
        )
        self._retrieval = histogram(
            "rapid_retrieval_seconds", "Of a request: finding what the drafter reads.", _REQUEST_S
        )
        self._witness_tokens = counter(
            "rapid_witness_prompt_tokens_total",
            "Tokens of retrieved text that the target read beside its own prompt.",
        )
        self._witness_prefill = histogram(
            "rapid_witness_prefill_seconds", "Of a request: that second reading.", _REQUEST_S
        )
        self._draft = histogram(
            "rapid_draft_seconds", "Of a request: drafting, over all rounds.", _REQUEST_S
        )
        self._verify = histogram(
            "rapid_verify_seconds", "Of a request: judging and decoding.", _REQUEST_S
        )

    async def watched(
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
                        self._modes.inc(1, {"mode": event.mode, "reason": event.reason})
                    elif isinstance(event, TextDelta):
                        if first is None:
                            first = now
                            self._first_token.observe(now - began)
                        if event.choice in latest:
                            self._inter_token.observe(now - latest[event.choice])
                        latest[event.choice] = now
                        ends.update([event.finish_reason] if event.finish_reason else [])
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
        """Count the tokens, times and drafts of a complete answer."""
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
        _raise(self._accepted, sum(each.accepted for each in choices))
        for position, number in accepted_by_position(choices).items():
            self._accepted_at.inc(number, {"position": str(position)})
        for reason, number in Counts(receipt.failovers).items():
            self._failovers.inc(number, {"reason": reason})
        if receipt.is_fallback:
            self._fallbacks.inc(1, {"reason": receipt.reason})
        elif any(position is not None for position in receipt.plain_from):
            self._fallbacks.inc(1, {"reason": _LOST})


class EngineMetrics:
    """Metrics of an engine; the label ``pool`` is ``target`` or ``drafter``."""

    def __init__(self, model: str, pool: str) -> None:
        """Create the instruments.

        Args:
            model: The model name that requests give, the label ``model_name``; the drafter's engine
                has it too, as it works for the answers of that name.
            pool: The pool that the engine belongs to.
        """
        labels = ("model_name", "pool")
        self._usage = Gauge("vllm_kv_cache_usage_perc", "KV pages in use, 1 is all.", labels)
        self._queries = Counter(
            "vllm_prefix_cache_queries_total", "Prompt tokens looked for in the cache.", labels
        )
        self._hits = Counter(
            "vllm_prefix_cache_hits_total", "Prompt tokens found in the cache.", labels
        )
        self._ahead_hits = Counter(
            "rapid_draft_ahead_hit_total",
            "Blocks that began with what was drafted ahead.",
            labels,
        )
        self._ahead_misses = Counter(
            "rapid_draft_ahead_miss_total", "Blocks that found it to be wrong.", labels
        )
        counters = (self._queries, self._hits, self._ahead_hits, self._ahead_misses)
        for each in (self._usage, *counters):
            each.set_default_tags({"model_name": model, "pool": pool})
        self._reported: EngineStatus | None = None

    def report(self, status: EngineStatus) -> None:
        """Update the metrics from the engine's status."""
        self._usage.set(status.kv_pages_in_use / status.kv_pages_total)
        before = self._reported
        _raise(self._ahead_hits, status.ahead_hits - (before.ahead_hits if before else 0))
        _raise(self._ahead_misses, status.ahead_misses - (before.ahead_misses if before else 0))
        self._reported = status

    def count(self, receipt: PrefillReceipt) -> None:
        """Count the tokens of a prefilled prompt."""
        _raise(self._queries, receipt.num_tokens)
        _raise(self._hits, receipt.num_cached_tokens)


def accepted_by_position(choices: Sequence[ChoiceStatistics]) -> Counts[int]:
    """Return how many drafted tokens were accepted at each position of a block."""
    kept = Counts[int]()
    for choice in choices:
        for counts in choice.histogram.values():
            for num_accepted, number in enumerate(counts):
                kept.update(dict.fromkeys(range(num_accepted), number) if number else {})
    return kept


def _labelled(instrument: Instrument, model: str) -> Instrument:
    instrument.set_default_tags({"model_name": model})
    return instrument


def _raise(counter: Counter, number: int) -> None:
    if number:  # Ray rejects an increment of zero
        counter.inc(number)
