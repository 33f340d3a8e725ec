"""Limits of a lease: the tokens, choices and KV pages it needs, and those that an engine has."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from rapid.engines.kv.leases.lease import Lease
from rapid.engines.kv.leases.lines import Waiter
from rapid.errors import BadRequest, PromptTooLong
from rapid.messages import LeaseRequest


@dataclass(frozen=True, slots=True)
class LeaseLimits:
    """The sizes of an engine, and those of leases on it.

    Attributes:
        pool_pages: Pages of the KV pool.
        page_tokens: Tokens of a page.
        max_leases: Leases that may be open at once.
        max_context: Longest prompt plus answer of one sequence, in tokens.
        num_rings: Rings of layers with a sliding window; None where all layers have pages.
    """

    pool_pages: int
    page_tokens: int
    max_leases: int
    max_context: int
    num_rings: int | None

    def check(self, request: LeaseRequest, first: LeaseRequest | None) -> None:
        """Raise if a request is malformed or can never fit; `first` is what it is beside of.

        Raises:
            BadRequest: The request is malformed.
            PromptTooLong: The request can never fit.
        """
        terms, num_prompt = request.terms, len(request.prompt_ids)
        if num_prompt == 0:
            raise BadRequest("the prompt is empty", "messages")
        if terms.num_choices < 1 or terms.max_tokens < 1:
            raise BadRequest("a lease needs at least one choice and one token", "max_tokens")
        if terms.speculation.rule == "paper" and terms.sampling.temperature == 0:
            raise BadRequest(
                "the paper's rule draws at random also where a request is greedy: set a "
                "temperature (the paper used 0.1 and 1.0)",
                "temperature",
            )
        if request.committed and len(request.committed) != terms.num_choices:
            raise BadRequest("`committed` needs one entry per choice", "n")
        edges = [0, *itertools.chain.from_iterable(request.passages), num_prompt]
        if any(after < before for before, after in itertools.pairwise(edges)):
            raise BadRequest("`passages` need to be parts of the prompt, in order", "messages")
        is_within = all(0 <= start <= stop < num_prompt for start, stop in request.masks)
        if request.masks and not (is_within and len(request.masks) == len(request.committed)):
            raise BadRequest("`masks` need a part of the prompt for each entry of `committed`", "n")
        if request.log_odds and len(request.log_odds) != terms.num_choices:
            raise BadRequest("`log_odds` needs one entry per choice", "n")
        if self.num_rings is not None and terms.num_choices > self.num_rings:
            raise BadRequest(
                f"{terms.num_choices} answers are asked; this model's layers with a sliding "
                f"window have room for {self.num_rings} at once (max_leases)",
                "n",
            )
        num_rings = terms.num_choices + (first.terms.num_choices if first is not None else 0)
        if self.num_rings is not None and num_rings > self.num_rings:
            raise PromptTooLong(
                f"{num_rings} sequences, of an answer and of what drafts or witnesses it on this "
                f"engine, need as many rings of sliding layers; it has "
                f"{self.num_rings} (max_leases)"
            )
        if any(len(ids) > terms.max_tokens for ids in request.committed):
            raise BadRequest("more tokens are committed than max_tokens allows", "max_tokens")
        over = num_prompt + terms.max_tokens - self.max_context
        if over > 0:
            raise PromptTooLong.of(
                self.max_context,
                f"the prompt has {num_prompt} tokens and the answer needs room for "
                f"{terms.max_tokens}: {over} more than this model's context of {self.max_context}",
            )
        pages = self.num_pages(request, num_prompt)
        if pages > self.pool_pages:
            raise PromptTooLong.of(
                self.max_context,
                f"{num_prompt} prompt tokens with {terms.num_choices} answers of up to "
                f"{terms.max_tokens} tokens need {pages * self.page_tokens} tokens of KV; "
                f"the engine has {self.pool_pages * self.page_tokens}",
            )

    def check_companion(self, waiter: Waiter, first: Lease) -> None:
        """Raise PromptTooLong if a companion can never fit beside its first lease."""
        request = waiter.request
        held = self.num_pages(first.request, len(first.request.prompt_ids))
        num_shared = len(set(first.page_names).intersection(waiter.page_names))
        own = self.num_pages(request, len(request.prompt_ids)) - num_shared
        if held + own > self.pool_pages:
            raise PromptTooLong(
                f"what was retrieved needs {own * self.page_tokens} tokens of KV beside the "
                f"{held * self.page_tokens} of the whole text; the engine has "
                f"{self.pool_pages * self.page_tokens} (kv_cache_tokens)"
            )
        if self.max_leases < 2:
            raise PromptTooLong(
                "what was retrieved needs a second lease; the engine has one (max_leases)"
            )

    def capacity(self, request: LeaseRequest, num_prompt: int) -> int:
        """Return the most tokens of one choice: prompt, answer and a last block beyond its end."""
        terms = request.terms
        longest = num_prompt + terms.max_tokens + terms.speculation.max_draft
        return min(longest, self.max_context)

    def num_shared(self, request: LeaseRequest, num_prompt: int) -> int:
        """Return the number of full prompt pages, without the last token, that choices share."""
        return (num_prompt - 1) // self.page_tokens if request.terms.num_choices > 1 else 0

    def num_pages(self, request: LeaseRequest, num_prompt: int) -> int:
        """Return the number of pages of all choices together."""
        shared = self.num_shared(request, num_prompt)
        each = -(-self.capacity(request, num_prompt) // self.page_tokens)
        return shared + request.terms.num_choices * (each - shared)
