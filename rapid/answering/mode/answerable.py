"""Whether what was retrieved answers the question, by the drafter's own reading.

A retriever's score says what a passage is about, and not whether it answers. The drafter is about
to read the passages anyway, so it is asked first, for one word: its log odds of yes against no.
They are a function of its prompt alone, so `auto` decides the same on an idle and a busy system.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import exp, inf, log

from rapid.answering.leases.session import Holding
from rapid.chat_messages import Message
from rapid.config import SamplingConfig
from rapid.messages import Terms, TokenLogprobs

ALTERNATIVES = 20  # tokens among which yes and no are looked for
_ASKED = (
    "Before answering: can this question be answered from the text above alone, without guessing? "
    "Reply with one word, yes or no."
)


def append_question(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the drafter's chat with its last message, the question, followed by ours."""
    if messages[-1].role == "tool":  # whose text is not the user's
        return (*messages, Message("user", _ASKED))
    *before, question = messages
    return (*before, replace(question, content=f"{question.text}\n\n{_ASKED}"))


def terms_of(terms: Terms) -> Terms:
    """Return the settings of the lease on which the drafter says its word, from a request's."""
    sampling = SamplingConfig(temperature=0.0, seed=0)
    return replace(terms, sampling=sampling, max_tokens=1, num_choices=1, num_logprobs=ALTERNATIVES)


async def read_log_odds(held: Holding, decode: Callable[[Sequence[int]], str]) -> float:
    """Return the log odds that the drafter says on a lease with the terms of `terms_of`.

    Args:
        held: The lease, whose prompt ends with our question.
        decode: Function from token ids to their text.

    Raises:
        RapidError: The lease or its engine is lost.
    """
    await held.prefill
    verdict = await held.lease.verifier(0, _no_lease, _no_lease).decode(1)
    return log_odds(verdict.logprobs[0], decode)


def log_odds(word: TokenLogprobs, decode: Callable[[Sequence[int]], str]) -> float:
    """Return log P(yes) / P(no) of the drafter's first token.

    Spellings are added up: `Yes`, ` yes`, and a first piece such as `y`. What is not among the
    alternatives has at most the probability of the last of them. If neither word is, the drafter
    does not do what it is asked, and the result is -inf.

    Args:
        word: The first token, with its alternatives.
        decode: Function from token ids to their text.
    """
    told = dict(word.top) | {word.token_id: word.logprob}
    chances = {"yes": 0.0, "no": 0.0}
    for token_id, logprob in told.items():
        piece = decode([token_id]).strip().casefold()
        for whole in chances:
            if piece and whole.startswith(piece):
                chances[whole] += exp(logprob)
    if not any(chances.values()):
        return -inf
    least = exp(min(told.values()))
    return log(chances["yes"] or least) - log(chances["no"] or least)


def _no_lease() -> None:
    """Stand for the lease of a drafter or witness where there is none."""
