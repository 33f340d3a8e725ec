"""Speedups of speculation over plain decoding, from the times of its steps and what is accepted."""

from __future__ import annotations


def tokens_per_round(
    acceptance: float, draft_length: int, *, extra_position: bool = False
) -> float:
    """Return the expected tokens per round if each draft is accepted with the same probability.

    A block of K drafts is scored at its K positions: ``(1 - a^K) / (1 - a)``. An `extra_position`
    after the last adds the token that other systems call the bonus token:
    ``(1 - a^(K+1)) / (1 - a)`` (Leviathan et al., arXiv 2211.17192, equation 1).
    """
    positions = draft_length + extra_position
    return sum(acceptance**i for i in range(positions))


def compute_speedup(
    tokens: float,
    draft_length: int,
    hits: float = 0.0,
    *,
    target_s: float,
    draft_s: float,
    verify_s: float,
    round_s: float = 0.0,
) -> float:
    """Return the speedup over plain decoding of rounds that draft a block and verify it.

    Args:
        tokens: tokens committed per round, see `tokens_per_round`.
        hits: share of rounds whose block was drafted while the last one was verified, and continues
            the right prefix; in the others drafting and verifying take turns.
        target_s: seconds of a plain step of the target.
        draft_s: seconds of one drafted token.
        verify_s: seconds of scoring the block.
        round_s: seconds that a round takes beside these, for messages.
    """
    drafting = draft_length * draft_s
    hit, miss = max(drafting, verify_s), drafting + verify_s
    return tokens * target_s / (hits * hit + (1 - hits) * miss + round_s)
