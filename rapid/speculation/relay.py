"""Who drafts: a model, the text itself or nobody, in each round whoever is measured fastest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rapid.messages import Verdict
from rapid.ports import Drafter
from rapid.speculation.lookup import PromptLookupDrafter
from rapid.speculation.loop import merge_verdicts
from rapid.speculation.pace.controller import Controller
from rapid.speculation.pace.copying import TextController


class Relay:
    """The drafter of one choice and its `rapid.ports.Pace` in one.

    It is for answers that have the same tokens, or the same distribution, whoever drafts. Each
    drafter has a controller of its own, which knows its rounds and the plain ones; a round goes to
    the larger gain, and to nobody where both controllers rest. Whatever another drafter brought,
    the model is told with its next block.
    """

    def __init__(
        self,
        text: PromptLookupDrafter,
        text_pace: TextController,
        model: Drafter[Any] | None = None,
        model_pace: Controller | None = None,
    ) -> None:
        self._text, self._text_pace = text, text_pace
        self._model, self._model_pace = model, model_pace
        self._untold: Verdict | None = None  # committed rounds that the model does not know of yet
        self._length = 0
        self._is_texts = False  # whether the round is the text's

    def next_length(self, limit: int) -> int:
        """Choose who drafts in the round that begins now; see `rapid.ports.Pace`."""
        pace = self._model_pace
        by_model = pace.next_length(limit) if pace else 0
        by_text = self._text_pace.next_length(limit)
        self._is_texts = by_text > 0
        if by_model and pace:
            is_better = self._text.longest > 0 and self._text_pace.gain > pace.gain
            self._is_texts = self._is_texts and is_better
        self._length = by_text if self._is_texts else by_model
        return self._length

    def draft(self, verdict: Verdict | None, num_tokens: int) -> Any:
        """Begin the block of whoever was chosen; the verdicts are known from `observe`."""
        if self._is_texts or self._model is None:
            return self._text.draft(None, num_tokens)
        told, self._untold = self._untold, None
        return self._model.draft(told, num_tokens)

    def observe(self, verdict: Verdict) -> None:
        """Record the verdict of the round that `next_length` began."""
        self._text.commit(verdict.token_ids)
        told = replace(verdict, num_drafted=0, num_accepted=0) if self._is_texts else verdict
        self._untold = merge_verdicts(self._untold, told)
        for pace in filter(None, (self._text_pace, self._model_pace)):
            if not self._length or (pace is self._text_pace) == self._is_texts:
                pace.observe(verdict)
            else:
                pace.skip(len(verdict.token_ids))

    def lose_model(self) -> Relay:
        """Go on without the model, and return what drafts from here on."""
        self._model = self._model_pace = None
        return self
