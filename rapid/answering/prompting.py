"""The two prompts of a request as token ids, with retrieval between them.

Tokenizing a long document takes a while and runs in threads. This is the one place where the tenant
of a request reaches retrieval.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from ray.serve.handle import DeploymentHandle

from cluster.failures import as_rapid_error
from rapid.answering.resolution import Evidence
from rapid.checkpoints.text import ChatText
from rapid.errors import DrafterUnavailable, RapidError
from rapid.messages import GenerateRequest, Int32Array, as_prompt
from rapid.prompts import DrafterPlan, drafter_messages, plan_drafter_chat, target_messages
from retrieval import Query, RetrievalConfig, RetrievedChunk, RetrievedContext, choose_query

logger = logging.getLogger(__name__)

_NOTHING = Evidence(0, "there is nothing to retrieve from")
_BELOW_FLOOR = Evidence(0, "retrieval found nothing above its floor")
_LOST = Evidence(0, "retrieval did not answer", is_lost=True)
_NO_ROOM = Evidence(0, "no retrieved chunk fits the budget")


@dataclass(frozen=True, slots=True)
class DrafterPrompt:
    """What the drafter reads, and the evidence that it is worth reading."""

    prompt_ids: Int32Array
    chunks: tuple[RetrievedChunk, ...]
    evidence: Evidence


class Prompter:
    """Makes both prompts; shared by all requests."""

    def __init__(
        self,
        target: ChatText,
        drafter: ChatText,
        retriever: DeploymentHandle | None,
        retrieval: RetrievalConfig,
        timeout_s: float,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self._retriever = retriever
        self._retrieval = retrieval
        self._timeout_s = timeout_s

    async def target_prompt(self, request: GenerateRequest) -> Int32Array:
        """The whole chat with its documents, for the target."""
        chat = target_messages(request.messages, request.documents)
        return as_prompt(await asyncio.to_thread(self.target.encode_chat, chat, day=request.date))

    async def drafter_prompt(self, request: GenerateRequest) -> DrafterPrompt:
        """The chat with what retrieval found in place of its long parts, for the drafter.

        A retriever that fails is no evidence, not an error.
        """
        budget, query, plan = await asyncio.to_thread(self._plan, request)
        chunks: tuple[RetrievedChunk, ...] = ()
        evidence = _NOTHING
        if plan.documents:
            try:
                context = await self._retrieve(request, plan, query, budget)
            except RapidError as error:
                # Only for the log: a store's error can carry its address, keys and answers.
                logger.warning("request %s: no retrieval: %s", request.request_id, error)
                evidence = _LOST
            else:
                chunks = context.chunks
                evidence = _evidence_of(context)
        messages = drafter_messages(plan, chunks)
        prompt_ids = await asyncio.to_thread(self.drafter.encode_chat, messages, day=request.date)
        return DrafterPrompt(as_prompt(prompt_ids), chunks, evidence)

    def longest_drafter_prompt(self, request: GenerateRequest, target_prompt: Int32Array) -> int:
        """About how many tokens the drafter will read at most, before retrieval has spoken."""
        budget = request.retrieval_tokens or self._retrieval.budget_for(len(target_prompt))
        return min(len(target_prompt), 2 * budget)

    def _plan(self, request: GenerateRequest) -> tuple[int, Query, DrafterPlan]:
        budget = request.retrieval_tokens or self._retrieval.budget_tokens
        if budget is None:
            texts = [document.text for document in request.documents]
            texts += [message.content for message in request.messages]
            budget = self._retrieval.budget_for(sum(map(self.target.count_tokens, texts)))
        last = next(m.content for m in reversed(request.messages) if m.role == "user")
        query = choose_query(
            last, self.target.token_offsets, budget_tokens=budget, query=request.query
        )
        plan = plan_drafter_chat(
            request.messages,
            request.documents,
            budget_tokens=budget,
            count_tokens=self.target.count_tokens,
            question=query.question,
        )
        return budget, query, plan

    async def _retrieve(
        self, request: GenerateRequest, plan: DrafterPlan, query: Query, budget: int
    ) -> RetrievedContext:
        if self._retriever is None:
            raise DrafterUnavailable("no retriever is deployed")
        response = self._retriever.retrieve.remote(
            request.tenant, plan.documents, query.text, budget
        )
        try:
            async with asyncio.timeout(self._timeout_s):
                context: RetrievedContext = await response
        except TimeoutError:
            response.cancel()
            raise DrafterUnavailable(f"no answer within {self._timeout_s:g} s") from None
        except Exception as error:
            raise as_rapid_error(error, "retriever", DrafterUnavailable) from None
        except asyncio.CancelledError:
            response.cancel()
            raise
        return context


def _evidence_of(context: RetrievedContext) -> Evidence:
    if context.chunks:
        return Evidence(len(context.chunks))
    return _NO_ROOM if context.cleared_floor else _BELOW_FLOOR
