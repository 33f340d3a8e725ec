"""What a run keeps: one JSON line per answer, after a first line that says how it was made."""

from __future__ import annotations

from pydantic import Field

from rapid.config import Frozen


class Result(Frozen):
    """One answer.

    Attributes:
        item, system, condition: its key; a run has each once.
        prediction: the answer's text (of the second pass, where there is one).
        scores: by metric, in [0, 1].
        groups: of the item.
        context_tokens, retrieved_tokens: lengths of the two prompts; 0 where one is not read.
        tokens: generated, with the end-of-sequence token.
        by_position: per position in the block: how often a draft was judged there, and kept.
        ms: retrieval, target_prefill, drafter_prefill, draft, verify and decode: the loop's
            wall time without the prefills (tokens / decode is the paper's throughput).
        evidence_found: all evidence is in what the drafter reads; None where it is not known.
        error: why there is no answer; its scores are then 0.
    """

    item: str
    system: str
    condition: str = "as is"
    prediction: str = ""
    reasoning: str | None = None
    scores: dict[str, float] = Field(default_factory=dict)
    groups: dict[str, str] = Field(default_factory=dict)
    seed: int = 0
    context_tokens: int = 0
    retrieved_tokens: int = 0
    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    by_position: tuple[tuple[int, int], ...] = ()
    ms: dict[str, float] = Field(default_factory=dict)
    evidence_found: bool | None = None
    error: str | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        """What a resumed run skips."""
        return self.item, self.system, self.condition
