"""The gate before reading passages apart: how much of a drafter's agreement with its target stays.

A drafter that reads each passage by itself (`rapid.engines.kv.passages`) sees no link between two.
What that costs depends on both models, so each pair is measured when it starts, on generated
questions. With answers y drawn from the target's p, the mean of min(1, q(y) / p(y)) estimates the
overlap sum min(p, q), which is the acceptance rate of speculative sampling (Leviathan et al., arXiv
2211.17192, theorem 3.5). It is compared for q read apart and q read together, over the same y.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rapid.answering.leases.pair_pools import Pools
from rapid.answering.leases.session import Holding, Role, Session
from rapid.answering.prompt.prompting import RequestPrompts
from rapid.chat_messages import Document, Message
from rapid.config import OwnDrafting, SamplingConfig, SpeculationConfig
from rapid.embedded.generator import generate_document
from rapid.embedded.wording import DocumentKind
from rapid.errors import RapidError
from rapid.messages import GenerateRequest, Int32Array, Terms
from rapid.ports import EnginePool

logger = logging.getLogger(__name__)

LEAST_KEPT = 0.97  # of the overlap; what is lost beyond costs more rounds than reading saves
MOST_QUESTIONS = 60  # of 24 tokens: a share near the bound is then known to about half a percent
_LEAST_QUESTIONS = 12  # before the mean of so few is taken for sure
_SURE = 3.0  # standard errors between the mean and the bound that settle it early
_DOCUMENT_TOKENS = 1000  # of which retrieval leaves out the greater part
_ANSWER_TOKENS = 24  # longer than most answers to generated questions
_KINDS: tuple[DocumentKind, ...] = ("chronicle", "clinical", "contract", "ledger")
_TENANT = "passage gate"  # a caller of this name would share generated text alone
_WAIT_S = 60.0  # for a lease
_AGAIN_S = 60.0  # after a failure, before the pair is measured again
_Overlaps = tuple[float, float, int]  # sums over an answer, apart and together, and its length


@dataclass
class PassageGate:
    """The gate of a pair of models: whether its drafter may read each passage by itself, and why.

    Attributes:
        is_wanted: Whether the drafter's engine has room for passages (`passage_cache_tokens`).
        is_open: Whether it may; False until it was measured.
        reason: Why, in a sentence.
    """

    is_wanted: bool = False
    is_open: bool = False
    reason: str = "passage_cache_tokens is 0"
    _task: asyncio.Task[None] | None = None
    _again_at: float | None = None  # by the event loop's clock

    def begin(self, prompts: RequestPrompts, pools: Pools) -> None:
        """Measure in the background if it is wanted and was not begun, or failed a while ago."""
        now = asyncio.get_running_loop().time()
        is_due = self._task is None or (self._again_at is not None and now >= self._again_at)
        if self.is_wanted and is_due:
            self._again_at = None
            self.reason = "the pair is being measured"
            self._task = asyncio.create_task(self._measure(prompts, pools))

    async def end(self) -> None:
        """Stop measuring."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def wait(self) -> None:
        """Wait until it was measured."""
        if self._task is not None:
            await self._task

    async def _measure(self, prompts: RequestPrompts, pools: Pools) -> None:
        found: list[_Overlaps] = []
        try:
            while not is_settled(found):
                asked = ask_generated(len(found))
                found.append(await measure_overlaps(prompts, pools, asked, seed=len(found)))
        except Exception as error:  # read together as ever, whatever it was
            logger.warning("passages are read together: the pair was not measured", exc_info=True)
            self.reason = f"the pair could not be measured ({type(error).__name__})"
            self._again_at = asyncio.get_running_loop().time() + _AGAIN_S
            return
        share = compute_share_kept(found)
        self.is_open = share >= LEAST_KEPT
        self.reason = f"{share:.3f} of the overlap stays over {len(found)} generated questions"
        if not self.is_open:
            self.reason += f"; at least {LEAST_KEPT} is asked"
        logger.info(
            "passages are read %s: %s", "apart" if self.is_open else "together", self.reason
        )


def compute_share_kept(found: Sequence[_Overlaps]) -> float:
    """Return the overlap of reading apart as a share of that of reading together."""
    return sum(each[0] for each in found) / max(sum(each[1] for each in found), 1e-9)


def is_settled(found: Sequence[_Overlaps]) -> bool:
    """Return whether more questions would hardly change on which side of the bound the share is."""
    if len(found) < _LEAST_QUESTIONS:
        return False
    surplus = [apart - LEAST_KEPT * together for apart, together, _ in found]
    mean = sum(surplus) / len(surplus)
    variance = sum((each - mean) ** 2 for each in surplus) / (len(surplus) - 1)
    return len(found) >= MOST_QUESTIONS or abs(mean) > _SURE * math.sqrt(variance / len(surplus))


def ask_generated(number: int) -> GenerateRequest:
    """Return a question about a generated document."""
    kind = _KINDS[number % len(_KINDS)]
    document = generate_document(f"gate {number}", _DOCUMENT_TOKENS, kind=kind)
    return GenerateRequest(
        f"gate-{number}",
        _TENANT,
        (Message("user", document.questions[0].question),),
        (Document(document.name, document.text),),
    )


async def measure_overlaps(
    prompts: RequestPrompts, pools: Pools, request: GenerateRequest, seed: int
) -> _Overlaps:
    """Return the overlaps for one question, summed over the tokens of an answer drawn with a seed.

    Raises:
        RapidError: The question has no passages, or an engine cannot be had or cannot score.
    """
    assert not isinstance(pools.drafter, OwnDrafting)
    prompt = await prompts.target_prompt(request, pools.max_context["target"])
    read = await prompts.drafter_prompt(request, num_tokens=len(prompt), ignores_drafts=True)
    if not read.passages:
        raise RapidError("nothing was retrieved for the question")
    sampling = SamplingConfig(temperature=1.0, seed=seed)
    terms = Terms(request.tenant, sampling, SpeculationConfig(eta=0.0), _ANSWER_TOKENS)
    async with Session(terms) as session:
        answer = await _draw(session, pools.target, prompt)
        own = await _score(session, pools.target, "target", prompt, answer)
        others = [
            await _score(session, pools.drafter, "drafter", read.prompt_ids, answer, passages)
            for passages in (read.passages, ())
        ]
    apart, together = (
        sum(min(1.0, math.exp(q - p)) for p, q in zip(own, each, strict=True)) for each in others
    )
    return apart, together, len(answer)


async def _draw(session: Session, pool: EnginePool, prompt_ids: Int32Array) -> list[int]:
    """Return an answer of the target's own."""
    held = await session.take(pool, "target", prompt_ids, timeout_s=_WAIT_S)
    await held.prefill
    verdict = await held.lease.verifier(0, _no_lease, _no_lease).decode(_ANSWER_TOKENS)
    await held.release()
    return [*verdict.token_ids]


async def _score(
    session: Session,
    pool: EnginePool,
    role: Role,
    prompt_ids: Int32Array,
    answer: list[int],
    passages: Sequence[tuple[int, int]] = (),
) -> Sequence[float]:
    """Return the log-probability of each token of an answer to a prompt."""
    held: Holding = await session.take(
        pool,
        role,
        prompt_ids,
        timeout_s=_WAIT_S,
        committed=[answer],
        masks=[(0, 0)],
        passages=passages,
        terms=replace(session.terms, max_tokens=len(answer)),
    )
    receipt = await held.prefill
    await held.release()
    if not receipt.scores or bool(passages) != receipt.reads_apart:
        raise RapidError("an engine does not score answers, or does not read passages apart")
    return receipt.scores[0]


def _no_lease() -> None:
    """Stand for the lease of a drafter or witness where there is none."""
