"""What answers: a mode of the method or a baseline, with its settings."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rapid.config import Finite, Frozen, Transfer

Method = Literal["plain", "rag", "lossless", "fused", "paper"]
DraftSource = Literal["drafter", "target", "naive", "window", "lookup"]


class System(Frozen):
    """One line of a results table.

    Attributes:
        name: as tables and `--system` have it.
        method: `plain` reads everything with the target; `rag` answers with the drafting model on
            the retrieved text alone; `lossless` (eta 0), `fused` and `paper` speculate.
        drafts: who drafts (with `rag`: who answers). `drafter` and `target`: that model on the
            retrieved text (upward or self-speculation); `naive`: the drafter on the whole context;
            `window`: the target on sinks and a recent window of its own KV (MagicDec); `lookup`:
            n-grams of the prompt. The last three are `lossless` only.
        transfer: None takes the default of `rapid.config.SpeculationConfig`, as do the next two.
        temperature: None takes the task's; `paper` cannot be greedy.
    """

    name: str = Field(min_length=1)
    method: Method
    drafts: DraftSource = "drafter"
    transfer: Transfer | None = None
    eta: Finite | None = Field(None, ge=0, le=1000)
    max_draft: int | None = Field(None, ge=1, le=64)
    temperature: Finite | None = Field(None, ge=0, le=2)


BASELINES: dict[str, System] = {
    system.name: system
    for system in (
        System(name="plain", method="plain"),
        System(name="rag-target", method="rag", drafts="target"),
        System(name="rag-drafter", method="rag", drafts="drafter"),
        System(name="sd", method="lossless", drafts="drafter"),
        System(name="sd-self", method="lossless", drafts="target"),
        System(name="naive-sd", method="lossless", drafts="naive"),
        System(name="magicdec", method="lossless", drafts="window"),
        System(name="prompt-lookup", method="lossless", drafts="lookup"),
        System(name="rapid-self-paper", method="paper", drafts="target"),
        System(name="rapid-self-distill", method="fused", drafts="target", transfer="distill"),
        System(name="rapid-self-boost", method="fused", drafts="target", transfer="boost"),
        System(name="rapid-paper", method="paper", drafts="drafter"),
        System(name="rapid-distill", method="fused", drafts="drafter", transfer="distill"),
        System(name="rapid-boost", method="fused", drafts="drafter", transfer="boost"),
    )
}
"""Every baseline of the paper and RAPID in its three forms, self and upward."""
