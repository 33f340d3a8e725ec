"""Response bodies of the HTTP API: OpenAI's shapes, vLLM's metrics and the receipt.

They are plain dictionaries, since OpenAI's clients define the schema.
``metrics.speculative_decoding`` has vLLM's names with one difference of meaning: blocks have no
bonus token (except in mode `paper`), so ``mean_acceptance_length`` is committed tokens per round.
It sums over all choices; with more than one, its ``choices`` has an entry for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import singledispatch
from itertools import zip_longest
from types import MappingProxyType
from typing import Any

from rapid.events import (
    CallDelta,
    ChoiceDelta,
    FinishReason,
    Reading,
    TextDelta,
    ThinkingDelta,
    TokenText,
)
from rapid.receipt import ChoiceStatistics, Explanation, Receipt

Json = dict[str, Any]
Cards = Mapping[str, Json]  # of models, by name

LEAST_LOGPROB = -9999.0  # for minus infinity, which JSON lacks, as in the API of OpenAI


@dataclass(slots=True)
class Timing:
    """Times of a request, in seconds of one monotonic clock.

    Attributes:
        began: When the request arrived.
        first_token: When its first text reached the ingress.
        done: When its answer was complete.
    """

    began: float
    first_token: float | None = None
    done: float | None = None

    def observe(self, now: float) -> None:
        """Note that something came of the answer, of which the first counts."""
        self.first_token = now if self.first_token is None else self.first_token


@dataclass(slots=True)
class GrowingChoice:
    """A choice whose message is collected for a response that is not streamed."""

    message: Json = field(default_factory=lambda: {"role": "assistant", "content": ""})
    logprobs: list[TokenText] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def add(self, delta: ChoiceDelta) -> None:
        """Append what is new, as clients do with the chunks of a stream."""
        if isinstance(delta, CallDelta):
            return self._add_call(delta)
        for name, new in render_delta(delta).items():
            self.message[name] = self.message[name] + new if name in self.message else new
        if isinstance(delta, TextDelta):
            self.logprobs.extend(delta.logprobs)
            self.finish_reason = delta.finish_reason or self.finish_reason

    def _add_call(self, delta: CallDelta) -> None:
        calls: list[Json] = self.message.setdefault("tool_calls", [])
        if delta.begins:
            function = {"name": delta.name, "arguments": ""}
            calls.append({"id": delta.id, "type": "function", "function": function})
        calls[delta.index]["function"]["arguments"] += delta.arguments


@dataclass(frozen=True, slots=True)
class ReplyFrame:
    """The fields that all parts of one response share."""

    id: str
    created: int
    model: str
    fingerprint: str
    has_logprobs: bool
    includes_usage: bool

    def completion(
        self, choices: Sequence[GrowingChoice], receipt: Receipt, timing: Timing
    ) -> Json:
        """Return the whole response."""
        return self._envelope("chat.completion") | {
            "choices": [self._choice(index, choice) for index, choice in enumerate(choices)],
            "usage": usage(receipt),
            "metrics": metrics(receipt, timing),
            "rapid": rapid_receipt(receipt),
        }

    def role_chunk(self, choice: int) -> Json:
        """Return the first stream chunk of a choice, which has only its role."""
        return self._chunk(choice, {"role": "assistant", "content": ""}, None, None)

    def delta_chunk(self, delta: ChoiceDelta) -> Json:
        """Return the stream chunk with what is new in a choice."""
        if isinstance(delta, TextDelta):
            logprobs, finish_reason = self._logprobs(delta.logprobs), delta.finish_reason
        else:
            logprobs, finish_reason = None, None
        return self._chunk(delta.choice, render_delta(delta), logprobs, finish_reason)

    def progress_chunk(self, read: Reading, time_s: float) -> Json:
        """Return llama.cpp's stream chunk that says how much of the prompt is read."""
        progress = {
            "total": read.num_all,
            "cache": read.num_cached,
            "processed": read.num_read,
            "time_ms": round(1000 * time_s),
        }
        return self._empty_chunk() | {"prompt_progress": progress}

    def _empty_chunk(self) -> Json:
        return self._chunk(0, {"role": "assistant", "content": None}, None, None)

    def usage_chunk(self, receipt: Receipt, timing: Timing) -> Json:
        """Return the stream chunk with the token usage, sent after the last choice has ended."""
        return self._envelope("chat.completion.chunk") | {
            "choices": [],
            "usage": usage(receipt),
            "metrics": metrics(receipt, timing),
        }

    def _envelope(self, kind: str) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def _choice(self, index: int, choice: GrowingChoice) -> Json:
        message = choice.message | {"refusal": None}
        if "tool_calls" in message and not message["content"]:
            message["content"] = None
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
        }

    def _chunk(
        self, choice: int, delta: Json, logprobs: Json | None, finish_reason: str | None
    ) -> Json:
        chunk = self._envelope("chat.completion.chunk")
        chunk["choices"] = [
            {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        ]
        if self.includes_usage:
            chunk["usage"] = None
        return chunk

    def _logprobs(self, tokens: Iterable[TokenText]) -> Json | None:
        if not self.has_logprobs:
            return None
        content = render_tokens(tokens)
        return {"content": content, "refusal": None}


@singledispatch
def render_delta(delta: ChoiceDelta) -> Json:
    """Return the ``delta`` object of a stream chunk; each kind of delta registers its own.

    Raises:
        TypeError: This dialect has no words for such a delta.
    """
    raise TypeError(f"a {type(delta).__name__} has no place in a chat completion")


@render_delta.register
def _render_text(delta: TextDelta) -> Json:
    return {"content": delta.text} if delta.text or not delta.finish_reason else {}


def render_tokens(tokens: Iterable[TokenText]) -> list[Json]:
    """Return the log-probabilities of tokens, each with its best alternatives."""
    return [
        _token(token.text, token.logprob)
        | {"top_logprobs": [_token(text, logprob) for text, logprob in token.top]}
        for token in tokens
    ]


@render_delta.register
def _render_thinking(delta: ThinkingDelta) -> Json:
    # DeepSeek's name, which vLLM and SGLang took over, and OpenRouter's, which vLLM has now.
    return {"reasoning_content": delta.text, "reasoning": delta.text}


@render_delta.register
def _render_call(delta: CallDelta) -> Json:
    call: Json = {"index": delta.index, "function": {"arguments": delta.arguments}}
    if delta.begins:
        call |= {"id": delta.id, "type": "function"}
        call["function"] = {"name": delta.name, "arguments": delta.arguments}
    return {"tool_calls": [call]}


def usage(receipt: Receipt) -> Json:
    """Return the numbers of prompt and completion tokens, over all choices."""
    completion_tokens = sum(choice.completion_tokens for choice in receipt.choices)
    return {
        "prompt_tokens": receipt.prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": receipt.prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": receipt.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": count_thinking(receipt)},
    }


def count_thinking(receipt: Receipt) -> int:
    """Return the number of tokens of thinking, over all choices."""
    return sum(choice.thinking_tokens for choice in receipt.choices)


def metrics(receipt: Receipt, timing: Timing) -> Json:
    """Return vLLM's ``metrics``; the ingress measures all times except that of the queue."""
    done = timing.began if timing.done is None else timing.done
    first = done if timing.first_token is None else timing.first_token
    num_tokens = sum(choice.completion_tokens for choice in receipt.choices)
    longest = max((choice.completion_tokens for choice in receipt.choices), default=0)
    generation_s = done - first
    return {
        "queue_time_ms": receipt.timings_ms.get("queue", 0.0),
        "time_to_first_token_ms": round(1000 * (first - timing.began), 3),
        "generation_time_ms": round(1000 * generation_s, 3),
        "mean_itl_ms": round(1000 * generation_s / (longest - 1), 3) if longest > 1 else 0.0,
        "tokens_per_second": round(num_tokens / (done - timing.began), 3)
        if done > timing.began
        else 0.0,
        "speculative_decoding": _speculative_decoding(receipt),
    }


def rapid_receipt(receipt: Receipt) -> Json:
    """Return the ``rapid`` object of a response: resolved settings, statistics and timings."""
    rounds = sum(choice.rounds for choice in receipt.choices)
    drafted_rounds = sum(choice.drafted_rounds for choice in receipt.choices)
    drafted = sum(choice.drafted for choice in receipt.choices)
    places = receipt.places
    body: Json = {
        "mode": receipt.mode,
        "reason": receipt.reason,
        "contract": receipt.contract,
        "seed": receipt.seed,
        "is_fallback": receipt.is_fallback,
        "date": receipt.date.isoformat(),
        "coupling": receipt.coupling,
        "transfer": receipt.transfer,
        "eta": receipt.eta,
        "max_draft": receipt.max_draft,
        "plausibility": receipt.plausibility,
        "draft_top_k": receipt.draft_top_k,
        "transfer_temperature": receipt.transfer_temperature,
        "rounds": rounds,
        "plain_rounds": rounds - drafted_rounds,
        "mean_draft_length": round(drafted / drafted_rounds, 3) if drafted_rounds else 0.0,
        "drafted": drafted,
        "accepted": sum(choice.accepted for choice in receipt.choices),
        "forced": sum(choice.forced for choice in receipt.choices),
        "bonus": sum(choice.bonus for choice in receipt.choices),
        "refreshes": sum(choice.refreshes for choice in receipt.choices),
        "witness_tokens": receipt.witness_tokens,
        "plain_from": list(receipt.plain_from),
        "failovers": list(receipt.failovers),
        "chunks": [
            asdict(chunk) | dict(places.get((chunk.document, chunk.start, chunk.end), {}))
            for chunk in receipt.chunks
        ],
        "timings_ms": dict(receipt.timings_ms),
    }
    if receipt.joined_query is not None:
        body["query"] = receipt.joined_query
    if receipt.passages is not None:
        body["passages"] = asdict(receipt.passages)
    if any(choice.cut_by for choice in receipt.choices):
        body["cut_by"] = [choice.cut_by for choice in receipt.choices]
    if receipt.ignored:
        body["ignored"] = list(receipt.ignored)
    if receipt.left_out:
        body["left_out"] = list(receipt.left_out)
    if receipt.sections:
        body["sections"] = [
            asdict(each) | dict(places.get((each.document, each.start, each.end), {}))
            for each in receipt.sections
        ]
    if receipt.kv_cache_dtype:
        body["kv_cache_dtype"] = dict(receipt.kv_cache_dtype)
    if (cited := receipt.citations) is not None:
        body["citations"] = [
            asdict(each)
            | dict(places.get((each.document, each.document_start, each.document_end), {}))
            for each in cited.found
        ]
        body["unsupported"] = [
            {"choice": choice, "start": start, "end": end, "no_source": True}
            for choice, start, end in cited.unsupported
        ]
        body["needed"] = cited.needed
    if receipt.application is not None:
        body["application"] = receipt.application
    if receipt.explanation is not None:
        body["explain"] = _explain(receipt.explanation)
    return body


def model_card(
    model: str,
    created: int,
    max_model_len: int | None,
    *,
    is_embedded: bool,
    silence_s: float | None = None,
    limits: Mapping[str, int] = MappingProxyType({}),
) -> Json:
    """Return an entry of ``GET /v1/models``.

    `max_model_len`, in tokens, is vLLM's field. Its ``rapid`` says how many seconds may pass before
    an answer's first byte, where that is known, and the `limits` of a request.
    """
    card: Json = {"id": model, "object": "model", "created": created, "owned_by": "rapid"}
    if max_model_len is not None:
        card["max_model_len"] = max_model_len
    waits = {} if silence_s is None else {"silence_s": silence_s}
    return card | {"rapid": {"embedded": is_embedded} | waits | dict(limits)}


def _explain(explanation: Explanation) -> Json:
    """Return `explain` of a receipt; prompts may be long, so that none of it is copied."""
    names = ("target_prompt_ids", "drafter_prompt_ids", "witness_prompt_ids")
    return {
        **{name: getattr(explanation, name) for name in (*names, "token_ids", "origins")},
        "tokens": [[asdict(token) for token in tokens] for tokens in explanation.tokens],
        "truncated": explanation.truncated,
    }


def _token(text: str, logprob: float) -> Json:
    """Return a token's log-probability entry.

    Bytes that are not a whole character become U+FFFD in ``token``; ``bytes`` has them unchanged.
    """
    spelled = text.encode("utf-8", "surrogateescape")
    return {
        "token": spelled.decode("utf-8", "replace"),
        "logprob": max(logprob, LEAST_LOGPROB),
        "bytes": list(spelled),
    }


def _speculative_decoding(receipt: Receipt) -> Json | None:
    if not any(choice.drafted for choice in receipt.choices):
        return None
    counters = _acceptance(receipt.choices) | {"num_spec_tokens": receipt.max_draft}
    if len(receipt.choices) > 1:
        counters["choices"] = [_acceptance([choice]) for choice in receipt.choices]
    return counters


def _acceptance(choices: Sequence[ChoiceStatistics]) -> Json:
    """Return the counters of the drafted rounds, without rounds that the target decoded alone."""
    drafted = sum(choice.drafted for choice in choices)
    accepted = sum(choice.accepted for choice in choices)
    committed = accepted + sum(choice.corrected + choice.bonus for choice in choices)
    lengths = sorted({length for choice in choices for length in choice.histogram})
    by_length = {
        length: _add(c.histogram[length] for c in choices if length in c.histogram)
        for length in lengths
    }
    histogram = _add(by_length.values())
    steps = sum(histogram)
    return {
        "mean_acceptance_length": committed / steps if steps else 0.0,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "acceptance_histogram": histogram,
        "acceptance_histogram_by_draft_length": {str(k): v for k, v in by_length.items()},
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
    }


def _add(histograms: Iterable[Sequence[int]]) -> list[int]:
    return [sum(counts) for counts in zip_longest(*histograms, fillvalue=0)]
