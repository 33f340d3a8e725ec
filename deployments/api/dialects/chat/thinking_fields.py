"""The fields of a chat about thinking, by the names that vLLM, OpenRouter and llama.cpp have."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from rapid.chat_messages import ThinkingRequest
from rapid.errors import BadRequest
from rapid.requests.request_fields import Fields

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

# Shares of the answer's longest, as in OpenRouter's "Reasoning Tokens".
_SHARES = {"minimal": 0.1, "low": 0.2, "medium": 0.5, "high": 0.8, "xhigh": 0.95, "max": 0.95}
_BUDGETS = ("thinking_token_budget", "reasoning_budget_tokens", "reasoning.max_tokens")


class TemplateSwitches(Fields):
    """The settings of a chat template that turn thinking on or off: Qwen's name, and DeepSeek's."""

    enable_thinking: bool | None = None
    thinking: bool | None = None


class ReasoningOptions(Fields):
    """OpenRouter's ``reasoning``."""

    effort: Effort | None = None
    max_tokens: int | None = Field(None, ge=0)
    enabled: bool | None = None
    exclude: bool | None = None


def _without_limit(budget: object) -> object:
    """Return a budget with llama.cpp's and vLLM's spelling of "no limit", -1, as None."""
    return None if budget == -1 and not isinstance(budget, bool) else budget


Budget = Annotated[int | None, BeforeValidator(_without_limit)]


class ThinkingFields(Fields):
    """The fields of a chat that turn the model's thinking on or off, bound it, or hide it."""

    chat_template_kwargs: TemplateSwitches | None = None
    reasoning_effort: Effort | None = None
    reasoning: ReasoningOptions | None = None
    thinking_token_budget: Budget = Field(None, ge=0)
    reasoning_budget_tokens: Budget = Field(None, ge=0)
    include_reasoning: bool | None = None

    @property
    def shows_thinking(self) -> bool:
        """Whether the answer includes the model's thinking."""
        is_left_out = self.reasoning is not None and self.reasoning.exclude
        return self.include_reasoning is not False and not is_left_out

    def read_thinking(self) -> ThinkingRequest:
        """Return how much the model shall think.

        Raises:
            BadRequest: Two fields contradict each other.
        """
        efforts, switches, budgets = self._gather()
        effort, share = _agree(efforts), None
        if effort is not None:
            switches |= dict.fromkeys(efforts, effort != "none")
            share = _SHARES.get(effort)
        is_on, budget = _agree(switches), _agree(budgets)
        if is_on is False and budget:
            (name, *_), (off, *_) = budgets, switches
            raise BadRequest(f"{name} contradicts {off}: leave one out", name, "invalid_value")
        return ThinkingRequest(is_on, budget, None if budget is not None else share)

    def name_thinking(self, param: str) -> str:
        """Return the field that was given of those that a refusal of thinking may be about."""
        efforts, switches, budgets = self._gather()
        given = [*(budgets if param in _BUDGETS else ()), *efforts, *switches]
        return given[0] if given else param

    def _gather(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Return the efforts, switches and budgets that are given, by their fields."""
        options = self.reasoning or ReasoningOptions()
        template = self.chat_template_kwargs or TemplateSwitches()
        efforts = {"reasoning_effort": self.reasoning_effort, "reasoning.effort": options.effort}
        switches = {
            "chat_template_kwargs.enable_thinking": template.enable_thinking,
            "chat_template_kwargs.thinking": template.thinking,
            "reasoning.enabled": options.enabled,
        }
        numbers = self.thinking_token_budget, self.reasoning_budget_tokens, options.max_tokens
        budgets = dict(zip(_BUDGETS, numbers, strict=True))
        return _keep_given(efforts), _keep_given(switches), _keep_given(budgets)


def _keep_given(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _agree(given: dict[str, Any]) -> Any:
    """Return the one value of some fields; None of none."""
    (first, value), *others = given.items() if given else [("", None)]
    for name, other in others:
        if other != value:
            raise BadRequest(f"{name} contradicts {first}: leave one out", name, "invalid_value")
    return value
