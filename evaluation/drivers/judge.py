"""Metrics that rate answers with a language model behind any OpenAI-compatible endpoint.

`judge` rates from 1 to 10, as RAPID (arXiv 2502.20330) rates last turns of dialogues after
MT-Bench-101 (arXiv 2402.14762), in this project's wording. `judge_equality` decides whether an
answer is consistent with the official one, in the words of AA-LCR's card.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass

import httpx
from pydantic import Field

from evaluation.items import Item
from rapid.config import Finite, Frozen
from rapid.errors import RapidError

RATING = """\
You rate the last reply of an assistant in a dialogue.

<dialogue>
{question}
</dialogue>

A reply that a person wrote down as good:
<reference>
{reference}
</reference>

The reply to rate:
<reply>
{reply}
</reply>

Consider whether the reply does what the last turn asks, agrees with what was said before, is right,
and is clear. The reference shows one good way, not the only one. Give reasons in a few sentences,
then end with the rating from 1 (useless) to 10 (nothing to improve) in this form: Rating: [[5]]"""

EQUALITY = """\
Assess whether the following CANDIDATE ANSWER is CORRECT or INCORRECT.
For the CANDIDATE ANSWER to be correct, it must be consistent with the OFFICIAL ANSWER.

The question, for reference only: {question}
The OFFICIAL ANSWER: {reference}
CANDIDATE ANSWER TO ASSESS: {reply}

Reply only with CORRECT or INCORRECT."""
"""Source: "Scoring Approach" on the card of ArtificialAnalysis/AA-LCR, version 1.0."""


class JudgeFailed(RapidError):
    """The judge gave no rating: the answer counts as failed, and a resumed run repeats it."""


class JudgeConfig(Frozen):
    """The endpoint and model of a judge.

    Attributes:
        url: Base URL up to and including ``/v1``; a key, if needed, is taken from OPENAI_API_KEY.
        timeout_s: Timeout for one rating, in seconds.
    """

    url: str = Field(min_length=1)
    model: str = Field(min_length=1)
    timeout_s: Finite = Field(120.0, gt=0)


@dataclass(frozen=True, slots=True)
class Rubric:
    """What a judge is asked, and how its reply is read.

    Attributes:
        prompt: The wording, with places for ``{question}``, ``{reference}`` and ``{reply}``.
        form: What every rating in a reply matches.
        example: A rating, for the message about a reply that has none.
        score: Returns the score, 0 to 1, of what `form` has matched.
    """

    prompt: str
    form: re.Pattern[str]
    example: str
    score: Callable[[str], float]


RUBRICS = {
    "judge": Rubric(
        RATING,
        re.compile(r"\[\[\s*(10|[1-9])(?:\.0+)?\s*\]\]"),
        "[[5]]",
        lambda rating: int(rating) / 10,
    ),
    "judge_equality": Rubric(
        EQUALITY,
        re.compile(r"\b(CORRECT|INCORRECT)\b"),
        "CORRECT",
        lambda verdict: float(verdict == "CORRECT"),
    ),
}
"""The rubrics by the name of their metric."""


class Judge:
    """A metric whose score is a judge's rating by one of `RUBRICS`."""

    def __init__(
        self, config: JudgeConfig, rubric: Rubric, transport: httpx.BaseTransport | None = None
    ) -> None:
        key = os.environ.get("OPENAI_API_KEY")
        self._config = config
        self._rubric = rubric
        self._client = httpx.Client(
            timeout=config.timeout_s,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            transport=transport or httpx.HTTPTransport(retries=2),
        )

    def __call__(self, prediction: str, item: Item) -> float:
        """Request one rating at temperature 0; of several in the reply the last counts.

        Raises:
            JudgeFailed: There is no reply, or it has no rating.
        """
        prompt = self._rubric.prompt.format(
            question=item.fields.get("dialogue", item.messages[-1].text),
            reference="\n\nor\n\n".join(item.answers),
            reply=prediction,
        )
        body = {
            "model": self._config.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
        }
        url = f"{self._config.url.rstrip('/')}/chat/completions"
        try:
            response = self._client.post(url, json=body)
            response.raise_for_status()
            text = response.json()["choices"][0]["message"]["content"]
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise JudgeFailed(f"the judge at {url} gave no answer: {error!r}") from error
        ratings = self._rubric.form.findall(text or "")
        if not ratings:
            raise JudgeFailed(
                f"the judge gave no rating like {self._rubric.example} but {(text or '')[-80:]!r}"
            )
        return self._rubric.score(ratings[-1])


def judges(config: JudgeConfig) -> dict[str, Judge]:
    """Return a judge for each of `RUBRICS`, by the name of its metric."""
    return {name: Judge(config, rubric) for name, rubric in RUBRICS.items()}
