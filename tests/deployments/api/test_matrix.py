"""Every field of a chat by mode, streamed and whole, greedy and seeded: its effect, or its refusal.

The models are the embedded ones, behind the whole application but without Ray. A table of
``docs/api.md`` says the same: with RAPID_WRITE_MATRIX=1 it is written instead of compared.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import rapid
from deployments.api.dialects.chat.chat_request import ChatRequest
from deployments.api.ingress import Ingress
from deployments.config.api_config import ApiConfig
from rapid.answering.request import RequestRun
from rapid.checkpoints.text import ChatText
from rapid.checkpoints.thinking_marks import ThinkingMarks
from rapid.events import GenerationEvent
from rapid.messages import GenerateRequest
from rapid.pair.pair import Pair
from tests.deployments.scripted import Generator

Json = dict[str, Any]

MODES = ("plain", "lossless", "fused", "rag", "paper")
WAYS = [*itertools.product(("streamed", "whole"), ("greedy", "seeded"))]
SLOW = pytest.mark.slow  # of four ways the other two show the same quickly
FACTS = "The banner of Tezawe is sozo sema 40. The well of Ruki is dry. " * 3
PAGE = Path(__file__).parents[3] / "docs/api.md"
BEGIN, END = "<!-- matrix: by tests/deployments/api/test_matrix.py -->\n", "<!-- end of matrix -->"

TEXT = ChatText.load("embedded:target")
(EOS,) = TEXT.eos_ids
MOST = 8192  # tokens of prompt and answer
WORD, OTHER = (TEXT.encode(each)[0] for each in ("the", "is"))
MARKS = ThinkingMarks(*(TEXT.encode(each)[0] for each in "xq"))  # which the models never say


class PairService(Generator):
    """Answers over HTTP with the models of a pair, on the pair's own loop."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerationEvent]:
        prompts, begin = self._pair._services.prompts, self._pair._loop._begin
        thinks = MARKS.opening in dict(request.logit_bias)
        prompts.target.thinking_marks = prompts.drafter.thinking_marks = MARKS if thinks else None
        events = RequestRun(self._pair._services, request).events()
        try:
            while event := await asyncio.wrap_future(begin(lambda: anext(events, None))):
                yield event
        finally:
            await asyncio.wrap_future(begin(events.aclose))


@dataclass
class Told:
    """An answer, as both forms of a response have it."""

    status: int
    refused: str | None = None  # the field that a refusal names
    model: str = ""
    texts: list[str] = field(default_factory=list)
    reasons: list[str | None] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)  # of the first choice
    usage: Json | None = None
    receipt: Json = field(default_factory=dict)
    thoughts: str = ""
    progress: list[Json] = field(default_factory=list)
    calls: set[int] = field(default_factory=set)  # of the first choice, by their indices

    @property
    def ids(self) -> list[int]:
        ids: list[int] = self.receipt["explain"]["token_ids"][0]
        return ids

    @property
    def text(self) -> str:
        return self.texts[0]

    @property
    def gaps(self) -> list[float]:
        """How much likelier the word is than the other one, at each position."""
        rows = [
            {top["token"]: top["logprob"] for top in row["top_logprobs"]} for row in self.logprobs
        ]
        return [row[TEXT.token_text(WORD)] - row[TEXT.token_text(OTHER)] for row in rows]


class Asking:
    """Questions in one mode and one way, each sent once."""

    def __init__(self, http: httpx.AsyncClient, mode: str, way: tuple[str, str]) -> None:
        self._http, self.mode = http, mode
        self.is_streamed, self.is_greedy = way[0] == "streamed", way[1] == "greedy"
        self._told: dict[str, Told] = {}

    async def __call__(self, **fields: Any) -> Told:
        body: Json = {
            "model": "m",
            "messages": [{"role": "user", "content": "What is the banner of Tezawe?"}],
            "max_tokens": 6,
            "stream": self.is_streamed,
        }
        body |= {"temperature": 0} if self.is_greedy else {"temperature": 0.9, "seed": 7}
        if self.is_streamed:
            body["stream_options"] = {"include_usage": True}
        body |= fields
        if "max_completion_tokens" in fields:
            del body["max_tokens"]
        documents = [{"name": "facts", "text": FACTS}]
        own = {"mode": self.mode, "documents": documents, "explain": "tokens", "date": "2026-01-31"}
        body["rapid"] = own | fields.get("rapid", {})
        key = json.dumps(body)
        if key not in self._told:
            response = await self._http.post("/v1/chat/completions", json=body)
            self._told[key] = read(response)
        return self._told[key]


def read(response: httpx.Response) -> Told:
    if response.status_code != 200:
        return Told(response.status_code, response.json()["error"]["param"])
    bodies, part = [], "delta"
    if response.headers["content-type"].startswith("text/event-stream"):
        lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
        assert lines.pop() == "[DONE]"
        bodies = [json.loads(line) for line in lines]
    else:
        bodies, part = [response.json()], "message"
    told = Told(200, model=bodies[0]["model"])
    for body in bodies:
        told.progress += [body["prompt_progress"]] if "prompt_progress" in body else []
        told.usage, told.receipt = body.get("usage") or told.usage, body.get("rapid", told.receipt)
        for choice in body["choices"]:
            index = choice["index"]
            told.texts += [""] * (index + 1 - len(told.texts))
            told.reasons += [None] * (index + 1 - len(told.reasons))
            told.texts[index] += choice[part].get("content") or ""
            told.thoughts += choice[part].get("reasoning") or ""
            told.reasons[index] = choice["finish_reason"] or told.reasons[index]
            calls = choice[part].get("tool_calls") or ()
            told.calls |= {call.get("index", place) for place, call in enumerate(calls)}
            if index == 0 and choice["logprobs"]:
                told.logprobs += choice["logprobs"]["content"]
    return told


@dataclass(frozen=True)
class Case:
    """How the effect of a field shows: whether it is seen in answers.

    Attributes:
        is_of_streams: Whether the field is refused by its name where nothing is streamed.
    """

    shows: Callable[[Asking], Awaitable[bool]]
    is_of_streams: bool = False


def told_by(check: Callable[[Told], bool], **fields: Any) -> Case:
    """One answer shows it."""

    async def shows(ask: Asking) -> bool:
        return check(await ask(**fields))

    return Case(shows)


def sure(**fields: Any) -> Case:
    """A filter leaves nothing to chance: any seed draws the same."""

    async def shows(ask: Asking) -> bool:
        answers = [await ask(**fields, seed=seed, temperature=1.5) for seed in (1, 2, 3)]
        return all(each.ids == answers[0].ids for each in answers)

    return Case(shows)


def odds(**fields: Any) -> Case:
    """A penalty of what was said moves the odds of two tokens."""

    async def shows(ask: Asking) -> bool:
        two = {"allowed_token_ids": [WORD, OTHER], "logprobs": True, "top_logprobs": 2}
        told, base = await ask(**two, **fields), await ask(**two)
        return any(abs(a - b) > 0.1 for a, b in zip(told.gaps, base.gaps, strict=True))

    return Case(shows)


async def _follows_messages(ask: Asking) -> bool:
    other = await ask(messages=[{"role": "user", "content": "And the well of Ruki?"}])
    prompts = [(await ask()).receipt["explain"], other.receipt["explain"]]
    role = "drafter" if ask.mode == "rag" else "target"
    return prompts[0][f"{role}_prompt_ids"] != prompts[1][f"{role}_prompt_ids"]


async def _knows_models(ask: Asking) -> bool:
    other = await ask(model="other")
    return (await ask()).model == "m" and (other.status, other.refused) == (404, "model")


async def _warms(ask: Asking) -> bool:
    warm, cold = [await ask(temperature=each, logprobs=True) for each in (2.0, 0.5)]
    return warm.logprobs[0]["logprob"] != cold.logprobs[0]["logprob"]


async def _keeps_seed(ask: Asking) -> bool:
    told, again = await ask(seed=11), await ask(seed=11, user="again")
    is_named = again.receipt["ignored"] == ["user"] and "ignored" not in told.receipt
    return told.receipt["seed"] == 11 and told.ids == again.ids and is_named


async def _stops(ask: Asking) -> bool:
    base = await ask()
    stop = base.text[2:4]
    told = await ask(stop=stop)
    return told.text == base.text[: base.text.find(stop)] and told.reasons == ["stop"]


async def _is_salted(ask: Asking) -> bool:
    salt = f"{ask.mode} {ask.is_streamed} {ask.is_greedy}"
    cached = [
        ((await ask(cache_salt=salt, user=user)).usage or {})["prompt_tokens_details"][
            "cached_tokens"
        ]
        for user in ("a", "b")
    ]
    return cached[0] == 0 < cached[1]


async def _shows_tools(ask: Asking) -> bool:
    told, base = await ask(**CALLS), await ask()
    role = "drafter" if ask.mode == "rag" else "target"
    prompts = [each.receipt["explain"][f"{role}_prompt_ids"] for each in (told, base)]
    return len(prompts[0]) > len(prompts[1])


async def _drops_turns(ask: Asking) -> bool:
    """A chat over the context is shortened where that is asked for; the drafter alone searches."""
    said = [{"role": "user", "content": "word " * 300}, {"role": "assistant", "content": "Yes."}]
    chat = [*said, {"role": "user", "content": "What is the banner of Tezawe?"}]
    long = {"messages": chat, "max_tokens": MOST - 300, **ENDS}
    told = await ask(**long, rapid={"truncation": "auto"})
    if ask.mode == "rag":
        return told.status == 200 and "left_out" not in told.receipt
    return (await ask(**long)).refused is not None and told.receipt["left_out"] == [0, 1]


async def _has_no_usage(ask: Asking) -> bool:
    told = await ask(stream_options={"include_usage": False})
    return told.usage is None and (await ask()).usage is not None


async def _tells_how_much_is_read(ask: Asking) -> bool:
    told, base = await ask(return_progress=True), await ask()
    first, last = told.progress[0], told.progress[-1]
    is_whole = first["processed"] == 0 < first["total"] == last["processed"] == last["total"]
    return is_whole and not base.progress and told.text == base.text


def is_json(told: Told) -> bool:
    return told.text.startswith("{")


WORDS = {"logit_bias": {str(WORD): 100}}  # the word is all that is said
ENDS = {"logit_bias": {str(EOS): 100}}
THINKS = {"logit_bias": {str(MARKS.opening): 100}}  # thoughts and answer are of that token alone
THOUGHT = [MARKS.opening] * 3 + [MARKS.closing]
STOPS = WORDS | {"stop_token_ids": [WORD]}
CASES: dict[str, Case] = {
    "allowed_token_ids": told_by(
        lambda told: {*told.ids} <= {WORD, OTHER}, allowed_token_ids=[WORD, OTHER]
    ),
    "bad_words": told_by(lambda told: WORD not in told.ids, **WORDS, bad_words=["the"]),
    "cache_salt": Case(_is_salted),
    "chat_template_kwargs": told_by(
        lambda told: told.ids[0] != MARKS.opening and not told.thoughts,
        **THINKS,
        chat_template_kwargs={"enable_thinking": False},
    ),
    "frequency_penalty": odds(frequency_penalty=2),
    "guided_choice": told_by(lambda told: told.text in "abc", guided_choice=["a", "b", "c"]),
    "guided_grammar": told_by(lambda told: told.text == "ab", guided_grammar='start: "ab"'),
    "guided_json": told_by(is_json, guided_json={"type": "object"}),
    "guided_regex": told_by(lambda told: told.text in ("ab", "bb"), guided_regex="[ab]b"),
    "ignore_eos": told_by(lambda told: told.ids == [EOS] * 6, **ENDS, ignore_eos=True),
    "include_reasoning": told_by(
        lambda told: told.ids[:4] == THOUGHT and (told.thoughts, told.text) == ("", "xx"),
        **THINKS,
        thinking_token_budget=2,
        include_reasoning=False,
    ),
    "include_stop_str_in_output": told_by(
        lambda told: told.text == "the", **STOPS, include_stop_str_in_output=True
    ),
    "logit_bias": told_by(lambda told: {*told.ids} == {WORD}, **WORDS),
    "logprobs": told_by(lambda told: len(told.logprobs) > 0, logprobs=True),
    "max_completion_tokens": told_by(lambda told: len(told.ids) == 2, max_completion_tokens=2),
    "max_tokens": told_by(lambda told: len(told.ids) == 2, max_tokens=2),
    "messages": Case(_follows_messages),
    "min_p": sure(min_p=1),
    "min_tokens": told_by(
        lambda told: len(told.ids) == 4 and told.ids[3] == EOS, **ENDS, min_tokens=3
    ),
    "model": Case(_knows_models),
    "n": told_by(lambda told: len(told.texts) == 2, n=2),
    "priority": told_by(lambda told: "ignored" not in told.receipt, priority=-3),
    "presence_penalty": odds(presence_penalty=2),
    "rapid": told_by(
        lambda told: told.receipt["date"] == "2026-01-30", rapid={"date": "2026-01-30"}
    ),
    "rapid.truncation": Case(_drops_turns),
    "reasoning": told_by(
        lambda told: told.ids[:4] == THOUGHT, **THINKS, reasoning={"max_tokens": 2}
    ),
    "reasoning_budget_tokens": told_by(
        lambda told: told.ids[:4] == THOUGHT, **THINKS, reasoning_budget_tokens=2
    ),
    "reasoning_effort": told_by(  # a fifth of six tokens is one
        lambda told: told.ids[:3] == THOUGHT[1:], **THINKS, reasoning_effort="low"
    ),
    "repetition_penalty": odds(repetition_penalty=3, rapid={"penalize_documents": True}),
    "response_format": told_by(is_json, response_format={"type": "json_object"}),
    "seed": Case(_keeps_seed),
    "return_progress": Case(_tells_how_much_is_read, is_of_streams=True),
    "stop": Case(_stops),
    "stop_token_ids": told_by(lambda told: (told.ids, told.text) == ([WORD], ""), **STOPS),
    "stream_options": Case(_has_no_usage, is_of_streams=True),
    "structured_outputs": told_by(
        lambda told: told.text in ("yes", "no"), structured_outputs={"choice": ["yes", "no"]}
    ),
    "temperature": Case(_warms),
    "thinking_token_budget": told_by(
        lambda told: told.ids[:4] == THOUGHT and (told.thoughts, told.text) == ("xx", "xx"),
        **THINKS,
        thinking_token_budget=2,
    ),
    "top_k": sure(top_k=1),
    "top_logprobs": told_by(
        lambda told: len(told.logprobs[0]["top_logprobs"]) == 2, logprobs=True, top_logprobs=2
    ),
    "top_p": sure(top_p=0.001),
}
AXES = {"stream"}
CALLS = {
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "look",
                "strict": True,
                "parameters": {
                    "type": "object",
                    "properties": {"at": {"enum": ["a", "b"]}},
                    "required": ["at"],
                    "additionalProperties": False,
                },
            },
        }
    ],
    "max_tokens": 60,
}
CASES |= {
    "parallel_tool_calls": told_by(
        lambda told: len(told.calls) == 1,
        **CALLS,
        tool_choice="required",
        parallel_tool_calls=False,
    ),
    "tool_choice": told_by(
        lambda told: len(told.calls) == 1 and told.reasons == ["tool_calls"],
        **CALLS,
        tool_choice={"type": "function", "function": {"name": "look"}},
        parallel_tool_calls=False,
    ),
    "tools": Case(_shows_tools),
}


@pytest.fixture(scope="module")
def app() -> Iterator[Ingress]:
    with rapid.open("embedded:target", drafter="embedded:drafter") as pair:
        yield Ingress(PairService(pair), ApiConfig(model="m"))


@pytest.fixture
async def http(app: Ingress) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        yield client


@pytest.mark.parametrize(
    "way", [WAYS[0], WAYS[3], *(pytest.param(way, marks=SLOW) for way in WAYS[1:3])], ids=" ".join
)
@pytest.mark.parametrize("mode", MODES)
async def test_each_field_has_its_effect_or_is_refused_by_its_name(
    http: httpx.AsyncClient, mode: str, way: tuple[str, str]
) -> None:
    ask = Asking(http, mode, way)
    if mode == "paper" and ask.is_greedy:
        assert (await ask()).refused == "temperature"
        return
    silent = []
    for name, case in CASES.items():
        if case.is_of_streams and not ask.is_streamed:
            assert (await ask(**{name: {}})).refused == name
        elif not await case.shows(ask):
            silent.append(name)
    assert not silent


@pytest.mark.parametrize("mode", ["lossless", "fused"])
async def test_a_form_waits_for_the_thinking(http: httpx.AsyncClient, mode: str) -> None:
    asked = THINKS | {"thinking_token_budget": 2, "guided_choice": ["yes", "no"], "max_tokens": 12}
    told = await Asking(http, mode, ("whole", "seeded"))(**asked)
    assert told.ids[:4] == THOUGHT
    assert (told.thoughts, told.reasons) == ("xx", ["stop"])
    assert told.text in ("yes", "no")
    if mode == "lossless":
        assert told.ids == (await Asking(http, "plain", ("whole", "seeded"))(**asked)).ids


async def test_openais_sdk_sends_the_fields_of_other_servers_and_sees_what_is_ignored(
    app: Ingress,
) -> None:
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app))
    sdk = openai.AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="none", http_client=http)
    extra = {"stop_token_ids": [WORD], "min_p": 0.5, "include_stop_str_in_output": True}
    completion = await sdk.chat.completions.create(
        model="m",
        messages=[{"role": "user", "content": "Who?"}],
        logit_bias={str(WORD): 100},
        metadata={"a": "b"},
        extra_body=extra | {"bootstrap_port": 1, "rapid": {"mode": "lossless"}},
    )
    assert (completion.choices[0].message.content, completion.choices[0].finish_reason) == (
        "the",
        "stop",
    )
    assert completion.model_extra is not None
    assert completion.model_extra["rapid"]["ignored"] == ["metadata", "bootstrap_port"]
    with pytest.raises(openai.BadRequestError) as refused:
        await sdk.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "Who?"}], extra_body={"regex": "a"}
        )
    assert refused.value.param == "regex"


def test_each_field_has_a_case() -> None:
    """A new field has a line here, and so in the page's table, before it is honoured."""
    own = {name for name in CASES if not name.startswith("rapid.")}
    assert own | AXES == ChatRequest.model_fields.keys()


def test_the_page_has_the_matrix() -> None:
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    after = rest[rest.index(END) :]
    wanted = before + BEGIN + make_table() + after
    if os.environ.get("RAPID_WRITE_MATRIX"):
        PAGE.write_text(wanted)
    assert PAGE.read_text() == wanted


def make_table() -> str:
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, case in sorted(CASES.items()):
        forms = "streamed" if case.is_of_streams else "yes"
        cells = tuple("sampled" if mode == "paper" else forms for mode in MODES)
        if case.is_of_streams:
            cells = (*cells[:-1], "streamed, sampled")
        rows.setdefault(cells, []).append(f"`{name}`")
    lines = [["field", *(f"`{mode}`" for mode in MODES)], ["---"] * (1 + len(MODES))]
    lines += [[", ".join(names), *cells] for cells, names in rows.items()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
