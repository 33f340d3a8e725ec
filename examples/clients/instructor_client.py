"""instructor: structured answers in its modes."""

from __future__ import annotations

import instructor
import openai
from instructor.core.exceptions import IncompleteOutputException
from tries import KEY, MODEL, QUESTION, URL, Light, run


def _ask(mode: instructor.Mode) -> None:
    plain = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=300)
    answer = instructor.from_openai(plain, mode=mode).chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": QUESTION}],
        response_model=Light,
        max_tokens=100,
        max_retries=0,
    )
    assert isinstance(answer, Light)


def tools() -> None:
    _ask(instructor.Mode.TOOLS)


def tools_strict() -> None:
    _ask(instructor.Mode.TOOLS_STRICT)


def json_schema() -> None:
    _ask(instructor.Mode.JSON_SCHEMA)


def json() -> None:
    try:
        _ask(instructor.Mode.JSON)
    except IncompleteOutputException as error:  # the small models fill an object without end
        if not error.last_completion.choices[0].message.content.startswith("{"):
            raise


run(tools, tools_strict, json_schema, json)
