"""Under which contract an answer was produced: every resolved value, counters and timings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rapid.answering.answers import Answer
from rapid.answering.resolution import FUSING, Decision
from rapid.config import SamplingConfig, SpeculationConfig
from rapid.messages import (
    ChunkUsed,
    Explanation,
    Failover,
    GenerateRequest,
    Int32Array,
    PrefillReceipt,
    Receipt,
)
from retrieval import RetrievedChunk


@dataclass(slots=True)
class Account:
    """What a request has used so far; becomes its receipt.

    Attributes:
        prompts: what target and drafter read, by role.
        prefill: of the prompt that the answer continues.
    """

    prompts: dict[str, Int32Array] = field(default_factory=dict)
    chunks: tuple[RetrievedChunk, ...] = ()
    prefill: PrefillReceipt | None = None
    failovers: list[Failover] = field(default_factory=list)
    timings_ms: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(
            ("queue", "retrieval", "target_prefill", "drafter_prefill", "draft", "verify"), 0.0
        )
    )

    def drop_drafter(self) -> None:
        """It could not be had: nothing that it would have read counts."""
        self.prompts.pop("drafter", None)
        self.chunks = ()

    def receipt(
        self,
        request: GenerateRequest,
        decision: Decision,
        sampling: SamplingConfig,
        speculation: SpeculationConfig,
        answers: Sequence[Answer],
    ) -> Receipt:
        """The receipt; where nothing was fused eta is 0, whatever was asked for."""
        counters = [answer.statistics for answer in answers]
        timings = self.timings_ms | {
            "draft": sum(each.draft_ms for each in counters),
            "verify": sum(each.verify_ms for each in counters),
        }
        return Receipt(
            mode=decision.mode,
            reason=decision.reason,
            contract=decision.contract,
            seed=sampling.seed,
            date=request.date,
            coupling=speculation.coupling,
            transfer=speculation.transfer,
            eta=speculation.eta if decision.contract in FUSING else 0.0,
            max_draft=speculation.max_draft,
            plausibility=speculation.plausibility,
            draft_top_k=speculation.draft_top_k,
            transfer_temperature=speculation.transfer_temperature,
            prompt_tokens=self.prefill.num_tokens if self.prefill else 0,
            cached_tokens=self.prefill.num_cached_tokens if self.prefill else 0,
            choices=tuple(each.of_choice() for each in counters),
            chunks=tuple(ChunkUsed(c.id, c.document, c.score, c.start, c.end) for c in self.chunks),
            timings_ms={name: round(ms, 3) for name, ms in timings.items()},
            plain_from=tuple(each.plain_from if decision.is_drafted else None for each in counters),
            failovers=tuple(self.failovers),
            explanation=self._explanation(answers) if request.explain else None,
        )

    def _explanation(self, answers: Sequence[Answer]) -> Explanation:
        return Explanation(
            target_prompt_ids=self._prompt("target"),
            drafter_prompt_ids=self._prompt("drafter"),
            token_ids=tuple(tuple(answer.statistics.token_ids) for answer in answers),
            origins=tuple(tuple(answer.statistics.origins) for answer in answers),
        )

    def _prompt(self, role: str) -> tuple[int, ...]:
        return tuple(self.prompts[role].tolist()) if role in self.prompts else ()
