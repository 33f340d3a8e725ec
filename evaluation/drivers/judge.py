"""A metric that rates answers with a language model behind any OpenAI-compatible endpoint.

RAPID (arXiv 2502.20330) rates last turns of dialogues from 1 to 10 with GPT-4-Turbo, after
MT-Bench-101 (arXiv 2402.14762), and publishes no prompt; the wording here is this project's own.
"""

from __future__ import annotations

import os
import re

import httpx
from pydantic import Field

from evaluation.items import Item
from rapid.config import Finite, Frozen
from rapid.errors import RapidError

PROMPT = """\
You rate the last reply of an assistant in a dialogue.

<dialogue>
{dialogue}
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

RATING = re.compile(r"\[\[\s*(10|[1-9])(?:\.0+)?\s*\]\]")


class JudgeFailed(RapidError):
    """The judge gave no rating: the answer counts as failed, and a resumed run repeats it."""


class JudgeConfig(Frozen):
    """The endpoint and model of a judge.

    Attributes:
        url: Base URL up to and including ``/v1``; a key, if needed, is taken from OPENAI_API_KEY.
        model: Name of the model at that endpoint.
        timeout_s: Timeout for one rating, in seconds.
    """

    url: str = Field(min_length=1)
    model: str = Field(min_length=1)
    timeout_s: Finite = Field(120.0, gt=0)


class Judge:
    """A metric whose score is the judge's rating, 1 to 10, in tenths."""

    def __init__(self, config: JudgeConfig, transport: httpx.BaseTransport | None = None) -> None:
        key = os.environ.get("OPENAI_API_KEY")
        self._config = config
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
        prompt = PROMPT.format(
            dialogue=item.fields.get("dialogue", item.messages[-1].content),
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
        ratings = RATING.findall(text or "")
        if not ratings:
            raise JudgeFailed(f"the judge gave no rating like [[5]] but {(text or '')[-80:]!r}")
        return int(ratings[-1]) / 10
