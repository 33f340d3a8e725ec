"""A drafter's engine that vLLM computes: it draws by itself, and says from what.

A lease is its prompt, what is committed and the request's terms, in the ledger of all engines; its
pages stand for nothing, as vLLM finds in its own cache of prefixes what a lease has read before.
Every block is one request to vLLM, for the tokens after all of them.

vLLM draws a token from the softmax of the logits at the request's temperature, cut to its `top_k`,
then to its `top_p`. With ``logprobs_mode="processed_logprobs"`` it returns the logarithms of just
these probabilities, so that q is what was drawn from (read in vLLM 0.30.0 and 0.33.0:
``vllm/v1/sample/sampler.py``, ``vllm/v1/worker/gpu/sample/sampler.py``).
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import logging
import math
import os
import secrets
import time
from collections.abc import Collection, Mapping
from typing import Any, cast

import numpy as np

from rapid.checkpoints.facts import check_vllm
from rapid.checkpoints.files import checkpoint_source, load_tokenizer, read_eos_ids
from rapid.checkpoints.vocabulary import num_ids
from rapid.engine_status import EngineStatus, Erasure, LeaseUsage
from rapid.engines.execution.replies import Reply
from rapid.engines.execution.state import Ending
from rapid.engines.kv.cache import PagePool
from rapid.engines.kv.leases.lease import Lease
from rapid.engines.kv.leases.lease_ledger import LeaseLedger
from rapid.engines.kv.leases.lines import Waiter
from rapid.engines.kv.sequences import Proposal, Sequence
from rapid.engines.work.drafting import draft_block
from rapid.errors import EngineFailed, LeaseNotFound, OutOfStep
from rapid.messages import (
    DraftBlock,
    LeaseRequest,
    PrefillReceipt,
    ReadSoFar,
    TokenLogprobs,
    Verdict,
)
from rapid.speculation.sampling import as_sent
from rapid.vllm_config import VLLM_TOP_K, VllmConfig

logger = logging.getLogger(__name__)

_PAGE_TOKENS = 16  # of the pages that the ledger counts
# vLLM keeps every token whose logit equals that of the last one within `top_k`; so many more are
# asked for.
_TIES = 16
_UNKNOWN_MASS = 1e-4  # of a proposal; rounding alone leaves less


def open_vllm(config: VllmConfig) -> VllmEngine:
    """Load a model with vLLM.

    Raises:
        ConfigurationError: vLLM is not installed, or too old.
    """
    check_vllm()
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # it would report its use to its makers
    vllm = importlib.import_module("vllm")
    settings = vllm.AsyncEngineArgs(
        model=checkpoint_source(config.model),
        dtype=config.dtype,
        max_model_len=config.max_context,
        tensor_parallel_size=config.tensor_parallel,
        # Within an actor it would ask Ray for GPUs beside those that the actor has.
        distributed_executor_backend="mp" if config.tensor_parallel > 1 else None,
        quantization=config.quantization,
        gpu_memory_utilization=config.gpu_memory_share,
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",
        max_logprobs=VLLM_TOP_K + _TIES,
        generation_config="vllm",  # no settings of the checkpoint's: requests have their own
        seed=secrets.randbits(31),  # replicas draw different numbers
        disable_log_stats=True,
    )
    return VllmEngine(vllm, vllm.AsyncLLMEngine.from_engine_args(settings), config)


class VllmEngine:
    """Leases, prefill, drafting and plain decoding, as `rapid.engines.engine.Engine` has them.

    All methods are called on one event loop. It neither verifies nor scores.
    """

    def __init__(self, vllm: Any, llm: Any, config: VllmConfig) -> None:
        """Store vLLM's module and its engine with the model."""
        source, tokenizer = checkpoint_source(config.model), load_tokenizer(config.model)
        self._vllm, self._llm = vllm, llm
        self._final_only = importlib.import_module("vllm.sampling_params").RequestOutputKind
        self._eos_ids = read_eos_ids(source, tokenizer)
        # Rows of the logits that stand for no token, and that the target does not have.
        padding = range(num_ids(tokenizer), llm.model_config.get_vocab_size())
        self._bias = dict.fromkeys(padding, -math.inf)
        self._max_context = config.max_context
        num_pages = config.max_leases * -(-config.max_context // _PAGE_TOKENS)
        self._ledger = LeaseLedger(
            PagePool(num_pages),
            _PAGE_TOKENS,
            config.max_leases,
            config.max_context,
            config.lease_ttl_s,
            time.monotonic,
        )
        self._calls: dict[Lease, set[asyncio.Task[Any]]] = {}
        self._endings: dict[Lease, list[Reply]] = {}
        self._closed = asyncio.Event()
        self._numbers = itertools.count()

    # --- leases ---------------------------------------------------------------------------------

    async def open(self, request: LeaseRequest, *, expires: bool = True) -> None:
        """Open a lease, queueing until there is room; see `Engine.open`."""
        self.check_running()
        reply = Reply()

        def answer(opened: Lease | Exception) -> None:
            if isinstance(opened, Lease):
                opened.expires = expires
            reply.settle(None, opened if isinstance(opened, Exception) else None)

        waiter = Waiter(request, answer, [])
        self._ledger.submit(waiter)
        try:
            await reply.future
        except asyncio.CancelledError:
            if not self._ledger.withdraw(waiter):
                self.release(request.lease_id)
            raise

    def renew(self, lease_id: str) -> None:
        """Restart the time-to-live of a lease, or raise LeaseNotFound."""
        self._ledger.touch(self._ledger.get(lease_id))

    def release(self, lease_id: str) -> None:
        """End a lease and abort its requests. No-op if it is not open."""
        self._end(lease_id, "released")

    def _end(self, lease_id: str, ending: Ending) -> None:
        lease = self._ledger.release(lease_id)
        if lease is not None:
            for call in self._calls.pop(lease, ()):
                call.cancel()
            for reply in self._endings.pop(lease, ()):
                reply.settle(ending)

    def settle(self, lease_id: str) -> LeaseUsage:
        """Return what a lease used since this was last asked; see `Engine.settle`."""
        return self._ledger.settle(lease_id)

    def forgo_companion(self, lease_id: str) -> None:
        """Give back the room kept for a companion of this lease. No-op if it is not open."""
        self._ledger.forgo_companion(lease_id)

    async def wait_closed(self, lease_id: str) -> Ending:
        """Wait until a lease ends and return how it ended; see `Engine.wait_closed`."""
        self.check_running()
        reply = Reply()
        self._endings.setdefault(self._ledger.get(lease_id), []).append(reply)
        return cast(Ending, await reply.future)

    def status(self) -> EngineStatus:
        """Return the counts of leases, after ending expired ones."""
        for lease in self._ledger.find_expired():
            self._end(lease.lease_id, "expired")
        return self._ledger.status()

    async def forget(self, documents: Collection[str]) -> tuple[Erasure, ...]:
        """Have vLLM forget all prompts, as it knows no documents; see `Engine.forget`.

        It overwrites nothing: what its pages held stays in memory until others are computed there.
        """
        had_readers = self._ledger.has_readers(documents)
        is_forgotten = await self._llm.reset_prefix_cache()
        is_in_use = had_readers or self._ledger.has_readers(documents)
        pending = "in use" if is_in_use or not is_forgotten else None
        return (Erasure("vLLM's cache of prefixes (not overwritten)", pending=pending),)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every lease is accounted for."""
        self._ledger.check_integrity()

    # --- calls on a lease -------------------------------------------------------------------------

    async def prefill(self, lease_id: str) -> PrefillReceipt:
        """Have vLLM read the prompt into its cache, and draw one token that nobody uses."""
        lease = self._ledger.get(lease_id)
        prompt = lease.request.prompt_ids.tolist()
        output = await self._generate(lease, 0, prompt, 1, temperature=0.0)
        num_cached = output.num_cached_tokens or 0
        lease.read_so_far = ReadSoFar(len(prompt) - 1, num_cached)
        return PrefillReceipt(lease_id, len(prompt), num_cached)

    def read_so_far(self, lease_id: str) -> ReadSoFar:
        """Return how many tokens of a lease's prompt have been read: none before all are."""
        self.check_running()
        return self._ledger.get(lease_id).read_so_far

    async def draft(
        self, lease_id: str, choice: int, verdict: Verdict | None, num_tokens: int
    ) -> DraftBlock:
        """Commit the tokens of `verdict`, then draft up to `num_tokens` after them.

        The block is shorter after an end-of-sequence token and where the lease's room ends, and
        ends before a token whose proposal vLLM did not tell whole.
        """
        began = time.perf_counter()
        lease, sequence = self._find(lease_id, choice)
        if verdict is not None:
            if (verdict.position, verdict.choice) != (sequence.num_generated, choice):
                raise OutOfStep(
                    f"verdict of choice {verdict.choice} for position {verdict.position}; lease "
                    f"{lease_id!r} has choice {choice} at position {sequence.num_generated}"
                )
            sequence.commit(verdict.token_ids)
        sampling = lease.request.terms.sampling
        top_k = lease.request.terms.speculation.draft_top_k or VLLM_TOP_K
        top_k = min(top_k, sampling.top_k or top_k)
        output = await self._generate(
            lease,
            choice,
            sequence.token_ids,
            self._within_room(sequence, num_tokens),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=top_k,
            logprobs=top_k if sampling.temperature == 0 else top_k + _TIES,
        )
        drafted = output.outputs[0]
        proposals: list[Proposal] = []
        for logprobs in drafted.logprobs:
            proposal = _proposal(logprobs, top_k, is_drawn=sampling.temperature > 0)
            if proposal is None:
                break
            proposals.append(proposal)
        token_ids = list(drafted.token_ids)[: len(proposals)]
        draft_ms = (time.perf_counter() - began) * 1e3
        return draft_block(lease_id, choice, sequence, token_ids, proposals, draft_ms)

    async def decode(self, lease_id: str, choice: int, num_tokens: int) -> Verdict:
        """Commit up to `num_tokens` of the model's own distribution, until the answer ends."""
        lease, sequence = self._find(lease_id, choice)
        terms, start = lease.request.terms, sequence.num_generated
        num_tokens = min(num_tokens, terms.max_tokens - start)
        output = await self._generate(
            lease,
            choice,
            sequence.token_ids,
            self._within_room(sequence, num_tokens),
            temperature=terms.sampling.temperature,
            top_p=terms.sampling.top_p,
            top_k=terms.sampling.top_k or 0,
            logprobs=terms.num_logprobs,
        )
        token_ids = tuple(output.outputs[0].token_ids)
        sequence.commit(token_ids)
        rows = zip(token_ids, output.outputs[0].logprobs or (), strict=False)
        return Verdict(
            lease_id=lease_id,
            choice=choice,
            position=start,
            token_ids=token_ids,
            num_drafted=0,
            num_accepted=0,
            is_finished=token_ids[-1] in terms.sampling.ends(self._eos_ids),
            logprobs=tuple(
                TokenLogprobs(token, row[token].logprob, tuple(_best(row, terms.num_logprobs or 0)))
                for token, row in rows
            ),
        )

    def _find(self, lease_id: str, choice: int) -> tuple[Lease, Sequence]:
        lease = self._ledger.get(lease_id)
        if not 0 <= choice < len(lease.sequences):
            raise OutOfStep(f"lease {lease_id!r} has no choice {choice}")
        if choice in lease.busy:
            raise OutOfStep(f"lease {lease_id!r} has another call in progress on this choice")
        return lease, lease.sequences[choice]

    def _within_room(self, sequence: Sequence, num_tokens: int) -> int:
        room = min(num_tokens, self._max_context - len(sequence.token_ids))
        if room < 1:
            raise OutOfStep("a lease has no room for another token")
        return room

    async def _generate(
        self, lease: Lease, choice: int, token_ids: list[int], num_tokens: int, **sampling: Any
    ) -> Any:
        """Return vLLM's answer; its request is aborted if the caller or the lease gives it up.

        Raises:
            LeaseNotFound: The lease ended meanwhile.
            EngineFailed: vLLM failed.
        """
        self.check_running()
        terms = lease.request.terms
        asked = self._vllm.SamplingParams(
            max_tokens=num_tokens,
            logit_bias=(self._bias | dict(terms.sampling.logit_bias)) or None,
            min_p=terms.sampling.min_p,
            stop_token_ids=sorted(terms.sampling.ends(self._eos_ids)),
            ignore_eos=True,  # those of `stop_token_ids` are all
            detokenize=False,
            output_kind=self._final_only.FINAL_ONLY,
            **sampling,
        )
        # Only requests with the same salt share what is cached.
        salt = f"{terms.tenant}\0{terms.cache_salt}"
        prompt = self._vllm.TokensPrompt(prompt_token_ids=list(token_ids), cache_salt=salt)
        name = f"{lease.lease_id}/{next(self._numbers)}"
        call = asyncio.ensure_future(self._answer(prompt, asked, name, terms.tenant))
        began = time.perf_counter()
        lease.busy.add(choice)
        self._calls.setdefault(lease, set()).add(call)
        try:
            return await call
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is not None and caller.cancelling():
                raise
            self.check_running()
            raise LeaseNotFound(f"lease {lease.lease_id!r} has ended") from None
        finally:
            # vLLM does not tell its steps: its requests share the time that they take.
            num_calls = sum(map(len, self._calls.values())) or 1
            self._ledger.spending.charge(lease, (time.perf_counter() - began) / num_calls)
            lease.busy.discard(choice)
            self._calls.get(lease, set()).discard(call)
            self._ledger.touch(lease)

    async def _answer(self, prompt: Any, asked: Any, name: str, tenant: str) -> Any:
        try:
            async for output in self._llm.generate(prompt, asked, name):
                last = output
            return last
        except Exception as error:
            logger.exception("vLLM failed at request %s", name, extra={"tenant": tenant})
            self.check_running()
            raise EngineFailed("vLLM failed at a request: its log says why") from error

    # --- the engine -------------------------------------------------------------------------------

    def check_running(self) -> None:
        """Raise EngineFailed if the engine is closed, or if vLLM's has died, which closes it."""
        if self._llm.errored:
            self.close()
        if self._closed.is_set():
            raise EngineFailed("the engine is closed")

    async def until_closed(self) -> None:
        """Wait until the engine is closed, by `close` or by a failure of its own."""
        await self._closed.wait()

    def close(self) -> None:
        """End all leases and vLLM's processes."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._ledger.close()
        for lease in self._ledger.leases():
            self._end(lease.lease_id, "closed")
        self._llm.shutdown()


def _best(logprobs: Mapping[int, Any], count: int) -> list[tuple[int, float]]:
    """Return the most likely tokens with their log-probabilities, best first."""
    told = sorted((-each.logprob, token) for token, each in logprobs.items())
    return [(token, -negated) for negated, token in told[:count]]


def _proposal(logprobs: Mapping[int, Any], top_k: int, *, is_drawn: bool) -> Proposal | None:
    """Return the candidates of a token and their probabilities, as they are sent.

    They are None if so many tokens are equal to the last candidate that vLLM did not tell them all.
    That depends on the distribution alone, and not on the token that was drawn. vLLM filters
    nothing where it takes the best token: then its first `top_k` tokens are the candidates.
    """
    best = _best(logprobs, top_k + _TIES if is_drawn else top_k)
    ids = np.array([token for token, _ in best], dtype=np.int32)
    probs = np.exp(np.array([logprob for _, logprob in best], dtype=np.float32))
    if is_drawn and probs.sum() < 1 - _UNKNOWN_MASS:
        return None
    return as_sent(ids, probs)
