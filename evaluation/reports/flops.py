"""Floating-point operations of answers; a multiplication with its addition counts as two.

Counted are the matrix products, 2 per weight and position (Kaplan et al., arXiv 2001.08361, section
2.1), and attention's two products, 4 per layer, head dimension and (query, key) pair. The `paper_*`
functions are the formulas of RAPID's Table 4 (arXiv 2502.20330), which leave attention out.
"""

from __future__ import annotations

from evaluation.results import Result
from evaluation.systems import System
from rapid.planning.shapes import ModelShape


def paper_alone(weights: float, prompt: float, tokens: float) -> float:
    """Return the FLOPs of Table 4, "LC" and "RAG", of one model: ``2 g W L + g^2 W``."""
    return 2 * tokens * weights * prompt + tokens**2 * weights


def paper_speculative(
    target_weights: float,
    drafter_weights: float,
    context: float,
    retrieved: float,
    block: float,
    acceptance: float,
) -> float:
    """Return the FLOPs of "SD" and "RAPID": ``(2 g D L_R + g^2 D + 2 T (L + g)) / beta``."""
    step = paper_alone(drafter_weights, retrieved, block) + 2 * target_weights * (context + block)
    return step / acceptance


def of_answer(result: Result, system: System, target: ModelShape, drafter: ModelShape) -> float:
    """Return the FLOPs of an answer's prefills, drafting and verification.

    Every draft is verified, and a round without one decodes one token; the rule `paper` computes
    one position more per round, for its bonus token.
    """
    context, tokens = result.context_tokens, result.tokens
    drafting = target if system.drafts == "target" else drafter
    read = result.retrieved_tokens
    if system.target_reads == "retrieved":
        context = read
    if system.method == "plain":
        alone = drafter if system.is_drafter_alone else target
        return alone.prefill_flops(context) + alone.decode_flops(tokens, context + tokens / 2)
    if system.method == "rag":
        return drafting.prefill_flops(read) + drafting.decode_flops(tokens, read + tokens / 2)
    with_draft = result.by_position[0][0] if result.by_position else 0
    more = result.rounds if system.method == "paper" else result.rounds - with_draft
    verified = result.drafted + more
    total = target.prefill_flops(context) + target.decode_flops(verified, context + tokens / 2)
    match system.drafts:
        case "lookup":
            return total
        case "window":
            window = system.window_drafting
            keys = min(window.num_sinks + window.window, context + tokens / 2)
            return total + target.decode_flops(result.drafted, keys)
        case _:
            read = context if system.drafts == "naive" else read
            drafts = drafting.decode_flops(result.drafted, read + tokens / 2)
            return total + (1 + result.refreshes) * drafting.prefill_flops(read) + drafts
