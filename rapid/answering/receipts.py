"""Receipts: the contract of an answer with every resolved setting, counters and timings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rapid.answering.resolution import FUSING, Decision
from rapid.answering.session import Role, Terms
from rapid.config import KVCacheDtype
from rapid.messages import GenerateRequest, Int32Array, PrefillReceipt
from rapid.ports import Passage
from rapid.receipt import ChunkUsed, Explanation, Failover, Receipt
from rapid.speculation.statistics import RoundStatistics


@dataclass(slots=True)
class Record:
    """What a receipt reports besides the timings of the session and the statistics of the answers.

    Attributes:
        prompts: Prompts of target, drafter and witness, by role.
        chunks: Retrieved chunks in the drafter's prompt.
        prefill: Prefill receipt of the model that answers.
        failovers: Failures after which the answer was continued, in order.
        retrieval_ms: Milliseconds spent on retrieval.
    """

    prompts: dict[Role, Int32Array] = field(default_factory=dict)
    chunks: tuple[Passage, ...] = ()
    prefill: PrefillReceipt | None = None
    failovers: list[Failover] = field(default_factory=list)
    retrieval_ms: float = 0.0

    def drop_drafter(self) -> None:
        """Remove what drafter and witness would have read, because no drafter is available."""
        self.prompts.pop("drafter", None)
        self.prompts.pop("witness", None)
        self.chunks = ()


def receipt_of(
    request: GenerateRequest,
    decision: Decision,
    terms: Terms,
    record: Record,
    timings_ms: Mapping[str, float],
    counters: Sequence[RoundStatistics],
    kv_cache_dtype: Mapping[str, KVCacheDtype],
) -> Receipt:
    """Build a request's receipt; its eta is 0 if nothing was fused, whatever was requested.

    Args:
        request: The request.
        decision: The resolved mode.
        terms: Resolved sampling and speculation settings.
        record: Prompts, chunks and failovers.
        timings_ms: Timings of the session, in milliseconds.
        counters: Statistics of each choice.
        kv_cache_dtype: See `Receipt`.
    """
    speculation, prefill = terms.speculation, record.prefill
    timings = {
        **timings_ms,
        "retrieval": record.retrieval_ms,
        "draft": sum(each.draft_ms for each in counters),
        "verify": sum(each.verify_ms for each in counters),
    }
    return Receipt(
        mode=decision.mode,
        reason=decision.reason,
        cause=decision.cause,
        contract=decision.contract,
        seed=terms.sampling.seed,
        date=request.date,
        coupling=speculation.coupling,
        transfer=speculation.transfer,
        eta=speculation.eta if decision.contract in FUSING else 0.0,
        max_draft=speculation.max_draft,
        plausibility=speculation.plausibility,
        draft_top_k=speculation.draft_top_k,
        transfer_temperature=speculation.transfer_temperature,
        prompt_tokens=prefill.num_tokens if prefill else 0,
        cached_tokens=prefill.num_cached_tokens if prefill else 0,
        choices=tuple(each.of_choice() for each in counters),
        chunks=tuple(ChunkUsed(c.id, c.document, c.score, c.start, c.end) for c in record.chunks),
        timings_ms={name: round(ms, 3) for name, ms in timings.items()},
        plain_from=tuple(each.plain_from if decision.is_drafted else None for each in counters),
        failovers=tuple(record.failovers),
        is_fallback=decision.is_fallback,
        witness_tokens=len(record.prompts.get("witness", ())),
        kv_cache_dtype=dict(kv_cache_dtype),
        explanation=_explanation(record, counters) if request.explain else None,
    )


def _explanation(record: Record, counters: Sequence[RoundStatistics]) -> Explanation:
    def prompt(role: Role) -> tuple[int, ...]:
        return tuple(record.prompts[role].tolist()) if role in record.prompts else ()

    return Explanation(
        target_prompt_ids=prompt("target"),
        drafter_prompt_ids=prompt("drafter"),
        witness_prompt_ids=prompt("witness"),
        token_ids=tuple(tuple(each.token_ids) for each in counters),
        origins=tuple(tuple(each.origins) for each in counters),
    )
