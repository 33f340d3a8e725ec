"""Thinking before an answer: its end by a budget, and a grammar that waits for it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from typing_extensions import override

from rapid.config import ThinkingRule
from rapid.constraints.shaping import Shaping


class ThinkingShaping(Shaping):
    """Ends the thinking when its budget is used, and shapes what follows it by a grammar.

    Before a grammar's answer nothing ends the whole, as nothing would follow the grammar then.
    """

    def __init__(
        self, rule: ThinkingRule, grammar: Shaping | None, end_ids: Collection[int]
    ) -> None:
        """Store the rule, the shaping behind it, and the tokens that end an answer."""
        self._rule, self._grammar, self._end_ids = rule, grammar, sorted(end_ids)
        self._num_tokens = 0
        self._answer_from: int | None = None  # position of the answer's first token, once known

    @override
    def shape(self, row: torch.Tensor) -> torch.Tensor:
        rule, grammar = self._rule, self._grammar
        if self._answer_from is not None:
            return row if grammar is None else grammar.shape(row)
        if self._must_close:
            return torch.full_like(row, -torch.inf).index_fill_(
                0, torch.tensor([rule.closing], device=row.device), 0.0
            )
        if self._is_undecided:  # the first token is the mark, or the answer's
            shaped = row.clone() if grammar is None else grammar.shape(row).clone()
            shaped[rule.opening] = -torch.inf if rule.budget == 0 else row[rule.opening]
            return shaped
        if grammar is None:
            return row
        shaped = row.clone()
        shaped[self._end_ids] = -torch.inf
        return shaped

    @override
    def advance(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            is_first = self._is_undecided
            self._num_tokens += 1
            if self._answer_from is not None:
                self._follow(token)
            elif is_first and token != self._rule.opening:
                self._answer_from = 0
                self._follow(token)
            elif not is_first and token == self._rule.closing:
                self._answer_from = self._num_tokens

    @override
    def roll_back(self, num_tokens: int) -> None:
        before = self._num_tokens - num_tokens
        if self._answer_from is not None:
            of_answer = min(num_tokens, self._num_tokens - self._answer_from)
            if of_answer and self._grammar is not None:
                self._grammar.roll_back(of_answer)
            if before < max(1, self._answer_from):
                self._answer_from = None
        self._num_tokens = before

    @override
    def find_forced(self) -> int | None:
        if self._must_close:
            return self._rule.closing
        may_think = self._answer_from is None and (self._rule.budget != 0 or self._num_tokens > 0)
        return None if may_think or self._grammar is None else self._grammar.find_forced()

    @override
    def count_allowed(self, token_ids: Sequence[int]) -> int:
        count, num_left = 0, len(token_ids)
        while count < num_left and self._answer_from is None and self._allows(token_ids[count]):
            self.advance(token_ids[count : count + 1])
            count += 1
        of_thinking = count
        if self._answer_from is not None:
            rest = token_ids[count:]
            count += len(rest) if self._grammar is None else self._grammar.count_allowed(rest)
        self.roll_back(of_thinking)
        return count

    @override
    def prepare(self, token_ids: Sequence[int], num_rows: int) -> None:
        num_before = self._count_before_answer(token_ids)
        if self._grammar is not None and num_before is not None:
            rest = token_ids[num_before:]
            self._grammar.prepare(rest, min(num_rows, len(rest) + 1))

    def _allows(self, token: int) -> bool:
        """Return whether a token may come next, before the answer has begun."""
        rule, grammar = self._rule, self._grammar
        if self._must_close:
            return token == rule.closing
        if not self._is_undecided:
            return grammar is None or token not in self._end_ids
        if token == rule.opening:
            return rule.budget != 0
        return grammar is None or grammar.count_allowed([token]) == 1

    def _count_before_answer(self, token_ids: Sequence[int]) -> int | None:
        """Return how many of the next tokens the answer comes behind; None if it is not there."""
        if self._answer_from is not None:
            return 0
        first = 0
        if self._is_undecided:
            if not token_ids or token_ids[0] != self._rule.opening:
                return 0
            first = 1
        places = (at for at in range(first, len(token_ids)) if token_ids[at] == self._rule.closing)
        return next((at + 1 for at in places), None)

    @property
    def _is_undecided(self) -> bool:
        """Whether the first token will say if there is thinking."""
        return self._num_tokens == 0 and not self._rule.is_open

    @property
    def _must_close(self) -> bool:
        budget = self._rule.budget
        if budget is None or self._answer_from is not None or self._is_undecided:
            return False
        return self._num_tokens - (not self._rule.is_open) >= budget

    def _follow(self, token: int) -> None:
        if self._grammar is not None:
            self._grammar.advance([token])
