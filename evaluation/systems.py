"""Systems under evaluation: modes of the method and baselines, with their settings."""

from __future__ import annotations

import difflib
import operator
from typing import Literal, Self

from pydantic import Field, model_validator

from rapid.config import MAX_DRAFT, Finite, Frozen, KnownTransfer, SpeculationConfig, WindowDrafting

Method = Literal["plain", "rag", "lossless", "fused", "paper"]
DraftKind = Literal["drafter", "target", "naive", "window", "lookup"]
Reading = Literal["everything", "retrieved"]

LEAST_PAPER_TEMPERATURE = 0.1
"""The temperature at which the paper (arXiv 2502.20330, appendix C) runs LongBench v2."""


class System(Frozen):
    """One line of a results table.

    Attributes:
        method: `plain` reads everything with the target; `rag` answers with the drafting model on
            the retrieved text alone; `lossless` (eta 0), `fused` and `paper` speculate.
        drafts: The source of drafts (with `rag`, of the answer). `drafter` and `target`: that model
            on the retrieved text (upward or self-speculation); `naive`: the drafter on the whole
            context; `window`: the target on sinks and a recent window of its own KV (MagicDec);
            `lookup`: n-grams of the prompt. The last three are `lossless` only, except that
            `naive` with `plain` is the drafter alone.
        transfer: Transfer rule. None takes the default of `rapid.config.SpeculationConfig`, as it
            does for `eta` and `max_draft`.
        temperature: Sampling temperature; None takes the task's. The method `paper`, which cannot
            be greedy, then takes 0.1 for a greedy task's 0, as the paper does on LongBench v2.
        window: Tokens of the window for `drafts: window`; None takes the default of
            `rapid.config.WindowDrafting`. The paper's is 4096.
        target_reads: What the target reads. `retrieved` gives it the drafter's text instead of the
            whole context, for both models without any long context. A run's file omits it where it
            is `everything`.
        refresh: Whether to retrieve again, for the question and the answer so far, after rejected
            drafts (`rapid.speculation.pace.refreshing`). A run's file omits it where it is not set.
    """

    name: str = Field(min_length=1)
    method: Method
    drafts: DraftKind = "drafter"
    transfer: KnownTransfer | None = None
    eta: Finite | None = Field(None, ge=0, le=1000)
    max_draft: int | None = Field(None, ge=1, le=MAX_DRAFT)
    temperature: Finite | None = Field(None, ge=0, le=2)
    window: int | None = Field(None, ge=1)
    target_reads: Reading = Field("everything", exclude_if="everything".__eq__)
    refresh: bool = Field(False, exclude_if=operator.not_)

    @model_validator(mode="after")
    def _can_be(self) -> Self:
        reads_nothing = self.drafts in ("naive", "window", "lookup")
        if reads_nothing and self.method != "lossless" and not self.is_drafter_alone:
            raise ValueError(
                f"system {self.name}: {self.drafts} reads nothing that the target does not: "
                "its method is lossless"
            )
        if self.window is not None and self.drafts != "window":
            raise ValueError(f"system {self.name}: a window goes with drafts: window")
        if self.refresh and not (self.method in ("lossless", "fused") and self.reads_retrieved):
            raise ValueError(
                f"system {self.name}: refresh goes with a drafter that reads what was retrieved, "
                "and with method lossless or fused"
            )
        is_upward = self.method in ("fused", "paper") and self.drafts == "drafter"
        if self.target_reads == "retrieved" and (not is_upward or self.refresh):
            raise ValueError(
                f"system {self.name}: target_reads: retrieved goes with method fused or paper, "
                "drafts: drafter and no refresh; the target alone on that text is rag-target"
            )
        counts = {"eta": self.fuses, "transfer": self.fuses, "max_draft": self.is_drafted}
        for key, does_count in counts.items():
            if getattr(self, key) is not None and not does_count:
                raise ValueError(
                    f"system {self.name}: {key} changes nothing where the method is {self.method}"
                )
        if self.method == "paper" and self.temperature == 0:
            raise ValueError(f"system {self.name}: method paper samples: raise its temperature")
        if self.method == "paper" and self.transfer not in (None, "distill"):
            raise ValueError(f"system {self.name}: method paper has one transfer, distill")
        return self

    @property
    def is_drafted(self) -> bool:
        """Whether the system speculates."""
        return self.method not in ("plain", "rag")

    @property
    def is_plain(self) -> bool:
        """Whether the target alone answers, from everything."""
        return self.method == "plain" and not self.is_drafter_alone

    @property
    def is_drafter_alone(self) -> bool:
        """Whether the drafter alone answers, from everything."""
        return self.method == "plain" and self.drafts == "naive"

    @property
    def needs_target(self) -> bool:
        """Whether the target answers or verifies."""
        return self.is_plain or self.is_drafted

    @property
    def needs_drafter(self) -> bool:
        """Whether a model other than the target drafts or answers."""
        return not self.is_plain and self.drafts in ("drafter", "naive")

    @property
    def fuses(self) -> bool:
        """Whether the drafter moves the sampled distribution, by eta."""
        return self.method in ("fused", "paper")

    @property
    def reads_retrieved(self) -> bool:
        """Whether a model reads the retrieved text."""
        return self.method != "plain" and self.drafts in ("drafter", "target")

    @property
    def reads_everything(self) -> bool:
        """Whether a model reads the whole context."""
        return self.method != "rag" and self.target_reads == "everything"

    @property
    def block(self) -> int:
        """Maximum number of tokens in a draft block."""
        return self.max_draft or SpeculationConfig().max_draft

    def temperature_in(self, task_temperature: float) -> float:
        """Return the temperature at which the system answers a task of `task_temperature`."""
        if self.temperature is not None:
            return self.temperature
        if self.method == "paper" and task_temperature == 0:
            return LEAST_PAPER_TEMPERATURE
        return task_temperature

    @property
    def window_drafting(self) -> WindowDrafting:
        """The sinks and the window that `drafts: window` leaves in sight."""
        return WindowDrafting() if self.window is None else WindowDrafting(window=self.window)

    def eta_in(self, eta: float | None) -> float:
        """Return the system's eta under a condition's `eta`; 0 if the system does not fuse."""
        if not self.fuses:
            return 0.0
        if eta is not None:
            return eta
        return SpeculationConfig().eta if self.eta is None else self.eta

    def speculation(self, eta: float | None = None) -> SpeculationConfig:
        """Return the speculation settings; `eta` overrides that of a system that fuses."""
        given = self.model_dump(include={"transfer", "max_draft"}, exclude_none=True)
        rule = "paper" if self.method == "paper" else "exact"
        return SpeculationConfig(eta=self.eta_in(eta), rule=rule, **given)


BASELINES: dict[str, System] = {
    system.name: system
    for system in (
        System(name="plain", method="plain"),
        System(name="plain-drafter", method="plain", drafts="naive"),
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
        System(
            name="rapid-self-adaptive", method="fused", drafts="target", transfer="adaptive", eta=8
        ),
        System(name="rapid-adaptive", method="fused", transfer="adaptive", eta=8),
        System(name="rag-both", method="fused", transfer="boost", target_reads="retrieved"),
        System(name="mixture", method="fused", transfer="mixture", eta=1),
    )
}
"""Every baseline of the paper, RAPID in its forms, and controls.

RAPID drafts with the target itself and, upward, with a drafter. The controls tell what two models
do without it: `plain-drafter` is the drafter alone, `rag-both` fuses both without any long context,
and `mixture` is the plain mean of both, a speculative ensemble.
"""


def find_baseline(name: str) -> System:
    """Return the system of `BASELINES` called `name`.

    Raises:
        ValueError: There is none of that name; the message suggests known ones.
    """
    if name not in BASELINES:
        near = difflib.get_close_matches(name, BASELINES, n=1)
        meant = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(BASELINES)}"
        raise ValueError(f"unknown system {name!r}{meant}")
    return BASELINES[name]
