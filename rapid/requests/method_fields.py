"""The settings of retrieval and speculation that a request may have."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from rapid.config import MAX_DRAFT, PAPER, Coupling, Finite, KnownTransfer, Mode, TooLong
from rapid.messages import SpeculationRequest
from rapid.requests.request_fields import MAX_QUERY, Fields, Text, refuse

Explained = Literal["tokens", "writers", "none"]
"""What a receipt explains; `writers` leaves the ids of the prompts out."""


class MethodFields(Fields):
    """The settings of retrieval and speculation; None leaves a field to the configuration."""

    mode: Mode | None = None
    transfer: KnownTransfer | None = None
    eta: Finite | None = Field(None, ge=0, le=1000)
    max_draft: int | None = Field(None, ge=1, le=MAX_DRAFT)
    coupling: Coupling | None = None
    plausibility: Finite | None = Field(None, ge=0, le=1)
    draft_top_k: int | None = Field(None, ge=1)
    retrieval_tokens: int | None = Field(None, ge=1)
    query: Text | None = Field(None, max_length=MAX_QUERY)
    refresh: bool | None = None
    too_long: TooLong | None = None
    truncation: Literal["auto", "disabled"] | None = None
    citations: bool | None = None
    explain: Explained | None = None
    penalize_documents: bool | None = None

    @field_validator(*PAPER)
    @classmethod
    def _paper_has_no_variants(cls, value: object, info: ValidationInfo) -> object:
        own = PAPER[info.field_name or ""]
        if info.data.get("mode") == "paper" and value not in (None, own):
            refuse("paper", f"must be left out with mode 'paper', whose own is {own!r}")
        return value

    @field_validator("query")
    @classmethod
    def _query_is_not_blank(cls, query: str | None) -> str | None:
        if query is not None and not query.strip():
            refuse("query", "is empty: leave it out to search for the last user message")
        return query

    def as_explanation(self) -> dict[str, Any]:
        """Return the fields of a request that say what its receipt explains."""
        return {
            "explain": self.explain in ("tokens", "writers"),
            "explains_prompts": self.explain != "writers",
        }

    def as_speculation(self) -> SpeculationRequest:
        """Return the fields that concern speculation."""
        cut_is_off = self.draft_top_k is None and "draft_top_k" in self.model_fields_set
        return SpeculationRequest(
            mode=self.mode or "auto",
            transfer=self.transfer,
            eta=self.eta,
            max_draft=self.max_draft,
            coupling=self.coupling,
            plausibility=self.plausibility,
            draft_top_k=self.draft_top_k,
            all_draft_tokens=cut_is_off,
            refresh=bool(self.refresh),
            too_long=self.too_long or "refuse",
            truncates=self.truncation == "auto",
        )
