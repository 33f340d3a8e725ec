"""Response bodies of completions: OpenAI's ``text_completion`` with its older log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from typing_extensions import override

from deployments.api.dialects.chat.wire import (
    LEAST_LOGPROB,
    GrowingChoice,
    Json,
    ReplyFrame,
    Timing,
    metrics,
    rapid_receipt,
    render_delta,
    usage,
)
from rapid.events import ChoiceDelta, TextDelta, TokenText
from rapid.receipt import Receipt


@dataclass(frozen=True, slots=True)
class TextFrame(ReplyFrame):
    """The fields that all parts of one response share.

    Attributes:
        offsets: How many characters of each choice the client has, by its tokens.
    """

    offsets: list[int] = field(default_factory=list)

    @override
    def completion(
        self, choices: Sequence[GrowingChoice], receipt: Receipt, timing: Timing
    ) -> Json:
        whole = [
            self._entry(index, each.message["content"], each.logprobs, each.finish_reason)
            for index, each in enumerate(choices)
        ]
        return self._envelope("text_completion") | {
            "choices": whole,
            "usage": usage(receipt),
            "metrics": metrics(receipt, timing),
            "rapid": rapid_receipt(receipt),
        }

    @override
    def delta_chunk(self, delta: ChoiceDelta) -> Json:
        text = render_delta(delta).get("content", "")
        tokens = delta.logprobs if isinstance(delta, TextDelta) else ()
        finish = delta.finish_reason if isinstance(delta, TextDelta) else None
        chunk = self._envelope("text_completion")
        chunk["choices"] = [self._entry(delta.choice, text, tokens, finish)]
        return chunk | ({"usage": None} if self.includes_usage else {})

    @override
    def _empty_chunk(self) -> Json:
        return self._envelope("text_completion") | {"choices": [self._entry(0, "", (), None)]}

    @override
    def usage_chunk(self, receipt: Receipt, timing: Timing) -> Json:
        return self._envelope("text_completion") | {
            "choices": [],
            "usage": usage(receipt),
            "metrics": metrics(receipt, timing),
        }

    def _entry(
        self, index: int, text: str, tokens: Iterable[TokenText], finish: str | None
    ) -> Json:
        logprobs = self._older_logprobs(index, tokens) if self.has_logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _older_logprobs(self, index: int, tokens: Iterable[TokenText]) -> Json:
        """Return lists side by side; `top_logprobs` has the token itself beside the best ones."""
        told: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token in tokens:
            name, has_none = _spell(token.text), math.isnan(token.logprob)
            own = max(token.logprob, LEAST_LOGPROB)
            top = {_spell(text): max(logprob, LEAST_LOGPROB) for text, logprob in token.top}
            told["tokens"].append(name)
            told["token_logprobs"].append(None if has_none else own)
            told["top_logprobs"].append(None if has_none else top | {name: own})
            told["text_offset"].append(self.offsets[index])
            self.offsets[index] += len(token.text)
        return told


def _spell(text: str) -> str:
    """Return a token's text, or its bytes in OpenAI's form where they are no whole characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        spelled = text.encode("utf-8", "surrogateescape")
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)
    return text
