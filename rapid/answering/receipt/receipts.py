"""Receipts: the contract of an answer with every resolved setting, counters and timings."""

from __future__ import annotations

from collections.abc import Mapping

from rapid.answering.leases.session import Role
from rapid.answering.mode.decisions import FUSING
from rapid.answering.run import Run
from rapid.engine_status import LeaseUsage
from rapid.receipt import ChunkUsed, Citations, Explanation, PassagesRead, Receipt


def receipt_of(
    run: Run,
    used: Mapping[Role, LeaseUsage],
    citations: Citations | None = None,
    explanation: Explanation | None = None,
) -> Receipt:
    """Build the receipt of a complete request; its eta is 0 if nothing was fused."""
    request, session = run.request, run.session
    decision, terms = run.outcome, session.terms
    counters = [answer.statistics for answer in run.answers]
    speculation, prefill = terms.speculation, run.prefill
    drafting = used.get("drafter", LeaseUsage())
    whole = sum(used.values(), LeaseUsage())
    timings = {
        **session.timings_ms,
        "retrieval": run.retrieval_ms,
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
        chunks=tuple(ChunkUsed(c.id, c.document, c.score, c.start, c.end) for c in run.chunks),
        timings_ms={name: round(ms, 3) for name, ms in timings.items()},
        plain_from=tuple(each.plain_from if decision.is_drafted else None for each in counters),
        failovers=tuple(run.failovers),
        is_fallback=decision.is_fallback,
        witness_tokens=len(run.prompts.get("witness", ())),
        kv_cache_dtype=dict(session.kv_cache_dtype),
        citations=citations,
        target_s=whole.busy_s - drafting.busy_s,
        drafter_s=drafting.busy_s,
        kv_byte_s=whole.kv_byte_s,
        left_out=run.left_out,
        sections=run.sections,
        joined_query=run.joined_query,
        passages=_passages_read(run),
        ignored=request.ignored,
        explanation=explanation,
    )


def _passages_read(run: Run) -> PassagesRead | None:
    gate, prefill = run.services.gate, run.session.drafter_prefill
    if not gate.is_wanted or prefill is None or not run.chunks:
        return None
    if prefill.reads_apart:
        return PassagesRead("apart", prefill.num_placed_tokens, gate.reason)
    reason = gate.reason
    if not run.plan.ignores_drafts:
        reason = "the answer depends on what is drafted"
    elif run.passages:
        reason = "the drafter's engine reads prompts whole, as its log says"
    elif run.request.citations:
        reason = "citations measure what the drafter needed of the whole prompt"
    elif gate.is_open:
        reason = "no passage was found in the tokens of the prompt, or the pair was measured later"
    return PassagesRead("together", 0, reason)
