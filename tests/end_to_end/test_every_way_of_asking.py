"""Every mode by every way of asking, on the application of `serve_config.yaml` as it is shipped.

Each combination is asked over HTTP, four at a time. What may be refused is said here; everything
else must be answered, whole or as a stream, with a receipt that agrees with the mode asked for.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest

from rapid.config import Mode
from rapid.embedded.generator import generate_document
from tests.ray_cluster import shipped_config

pytestmark = pytest.mark.ray

RAPID = Path(sys.executable).parent / "rapid"
MODES = get_args(Mode)
DOCUMENT = generate_document(5, 150)
QUESTION = DOCUMENT.questions[0].question
MAX_TOKENS = 12
CONCURRENCY = 4  # one engine of each pool serves so many: no time goes into starting others
SHIPPED = "shipped"

ANSWERS = {  # by the mode asked for: mode and contract with documents, and without
    "auto": (("fused", "fused"), ("plain", "target")),
    "plain": (("plain", "target"), ("plain", "target")),
    "lossless": (("lossless", "target"), ("lossless", "target")),
    "fused": (("fused", "fused"), ("fused", "target")),
    "paper": (("paper", "paper"), ("paper", "target")),
    "rag": (("rag", "drafter"),),
}
LOOKUP_ANSWERS = {
    "auto": (("lossless", "target"),) * 2,
    "plain": (("plain", "target"),) * 2,
    "lossless": (("lossless", "target"),) * 2,
}


@dataclass(frozen=True)
class Way:
    """One way of asking."""

    mode: str
    temperature: float
    seed: int | None = None
    coupling: str | None = None
    is_streamed: bool = False
    num_choices: int = 1
    has_logprobs: bool = False
    has_documents: bool = True

    @property
    def body(self) -> dict[str, Any]:
        """The request."""
        rapid: dict[str, Any] = {"mode": self.mode}
        if self.coupling is not None:
            rapid["coupling"] = self.coupling
        if self.has_documents:
            rapid["documents"] = [{"name": DOCUMENT.name, "text": DOCUMENT.text}]
        body = {
            "model": "rapid-embedded",
            "messages": [{"role": "user", "content": QUESTION}],
            "temperature": self.temperature,
            "max_tokens": MAX_TOKENS,
            "n": self.num_choices,
            "stream": self.is_streamed,
            "logprobs": self.has_logprobs,
            "rapid": rapid,
        }
        if self.seed is not None:
            body["seed"] = self.seed
        if self.has_logprobs:
            body["top_logprobs"] = 2
        if self.is_streamed:
            body["stream_options"] = {"include_usage": True}
        return body

    @property
    def refused_field(self) -> str | None:
        """What is wrong with asking so: the paper's rule draws at random, and in one way only.

        Retrieval alone answers from documents, and so it needs some.
        """
        if self.mode == "rag" and not self.has_documents:
            return "rapid.mode"
        if self.mode == "paper" and self.coupling == "shared_noise":
            return "rapid.coupling"
        return "temperature" if self.mode == "paper" and not self.temperature else None

    @property
    def text_is_fixed(self) -> bool:
        """Whether the same question gets the same text: however it is asked for and sent."""
        return self.temperature == 0 or self.seed is not None


def every_way(mode: str) -> list[Way]:
    """All combinations of what a request may say besides its mode."""
    fields = (
        (0.0, 0.8),
        (None, 7),
        (None, "maximal", "shared_noise"),
        (False, True),
        (1, 2),
        (False, True),
        (True, False),
    )
    return [Way(mode, *values) for values in itertools.product(*fields)]


def main_ways() -> list[Way]:
    """All modes by temperature, seed and streaming."""
    fields = (MODES, (0.0, 0.8), (None, 7), (None,), (False, True))
    return [Way(*values) for values in itertools.product(*fields)]


@pytest.fixture(scope="module")
def shipped(ray_cluster: str) -> Iterator[str]:
    """The application that `serve_config.yaml` says, under a path of its own; its address."""
    from ray import serve

    from deployments.app import compose

    serve.run(compose(shipped_config()), name=SHIPPED, route_prefix=f"/{SHIPPED}")
    yield f"{ray_cluster}/{SHIPPED}"
    serve.delete(SHIPPED)


@pytest.fixture
def drafting_by(shipped: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """The shipped application with another `drafter`; its address.

    Ingress and orchestrator are started as that configuration starts them, on the same engines.
    """
    from ray import serve

    from deployments.app import compose
    from deployments.config.serve_config import ServeConfig

    drafter: str = request.param
    settings = shipped_config().model_dump(exclude_unset=True) | {"drafter": drafter}
    if drafter == "prompt_lookup":
        del settings["retriever"]
    config = ServeConfig.model_validate(settings)
    application = compose(config)
    ingress = application._bound_deployment
    orchestrator = ingress.init_args[3]._bound_deployment
    pools = [
        argument and serve.get_deployment_handle(argument._bound_deployment.name, SHIPPED)
        for argument in orchestrator.init_args[1:4]
    ]
    beside = ingress.bind(config.filled_api, None, None, orchestrator.bind(config, *pools))
    serve.run(beside, name=drafter, route_prefix=f"/{drafter}")
    yield shipped.replace(SHIPPED, drafter)
    serve.delete(drafter)


async def failures(url: str, ways: Iterable[Way], answers: Any = ANSWERS) -> str:
    """Ask in all these ways at once; what went wrong, a paragraph for each way."""
    gate = asyncio.Semaphore(CONCURRENCY)
    texts: dict[tuple[object, ...], set[str]] = defaultdict(set)
    wrong: list[str] = []

    async def ask(client: httpx.AsyncClient, way: Way) -> None:
        async with gate:
            reply = await client.post("/v1/chat/completions", json=way.body)
        try:
            said = checked(way, reply, answers)
        except (AssertionError, KeyError, ValueError) as error:
            wrong.append(f"{way}\n{type(error).__name__}: {error}\n{reply.text[-600:]}\n")
            return
        if way.text_is_fixed and said:
            key = (way.mode, way.temperature, way.seed, way.coupling, way.has_documents)
            texts[key].add(said)

    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        await asyncio.gather(*(ask(client, way) for way in ways))
    wrong += [f"{key} has several texts: {said}\n" for key, said in texts.items() if len(said) > 1]
    return "\n".join(wrong)


def checked(way: Way, reply: httpx.Response, answers: Any) -> str:
    """The first choice's text, when the reply is as it must be; a refusal has none."""
    refused_field = way.refused_field if way.mode in answers else "rapid.mode"
    if refused_field is not None:
        assert reply.status_code == 400
        error = reply.json()["error"]
        assert error["message"]
        assert (error["type"], error["param"]) == ("invalid_request_error", refused_field)
        return ""
    assert reply.status_code == 200
    answer = whole(way, reply) if way.is_streamed else reply.json()
    check_receipt(way, answer["rapid"], answers[way.mode][not way.has_documents])
    num_written = answer["usage"]["completion_tokens"]
    assert answer["usage"]["prompt_tokens"] > 0
    assert answer["metrics"]["tokens_per_second"] > 0
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == list(range(way.num_choices))
    ends = [choice["finish_reason"] for choice in choices]
    assert set(ends) <= {"stop", "length"}
    assert MAX_TOKENS * ends.count("length") <= num_written <= MAX_TOKENS * way.num_choices
    for choice in choices:
        check_text(way, choice)
    return str(choices[0]["message"]["content"])


def check_receipt(way: Way, receipt: dict[str, Any], expected: tuple[str, str]) -> None:
    assert (receipt["mode"], receipt["contract"]) == expected, receipt["reason"]
    assert receipt["failovers"] == []
    assert receipt["plain_from"] == [None] * way.num_choices
    assert receipt["rounds"] > 0
    if way.seed is not None:
        assert receipt["seed"] == way.seed
    seeded = "shared_noise" if way.seed is not None and way.mode != "paper" else "maximal"
    assert receipt["coupling"] == (way.coupling or seeded)
    assert (receipt["eta"] > 0) == (receipt["contract"] in ("fused", "paper"))
    if receipt["mode"] in ("plain", "rag"):
        assert receipt["drafted"] == 0
    if receipt["contract"] in ("fused", "paper"):
        assert receipt["drafted"] > 0


def check_text(way: Way, choice: dict[str, Any]) -> None:
    """The text is there, and its logprobs spell it, with the control tokens that no text shows."""
    message, logprobs = choice["message"], choice["logprobs"]
    assert message["role"] == "assistant"
    may_be_empty = not way.text_is_fixed and choice["finish_reason"] == "stop"
    assert message["content"] or may_be_empty  # an end may be drawn at once
    if not way.has_logprobs:
        assert logprobs is None
        return
    spelled = b"".join(bytes(token["bytes"]) for token in logprobs["content"])
    assert re.sub(r"<\|\w+\|>", "", spelled.decode(errors="replace")) == message["content"]
    for token in logprobs["content"]:
        assert token["logprob"] <= 0
        assert len(token["top_logprobs"]) == 2


def whole(way: Way, reply: httpx.Response) -> dict[str, Any]:
    """A stream as the answer that would have been sent whole; its structure is checked."""
    assert reply.text.endswith("\n\ndata: [DONE]\n\n")
    lines = [line for line in reply.text.splitlines() if line.startswith("data: ")]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    last = chunks.pop()
    assert last["choices"] == []
    assert {chunk["object"] for chunk in (*chunks, last)} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in (*chunks, last)}) == 1
    roles, deltas = chunks[: way.num_choices], chunks[way.num_choices :]
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    assert all(chunk["choices"][0]["delta"]["role"] == "assistant" for chunk in roles)
    assert all("rapid" not in chunk for chunk in chunks[:-1])
    choices = []
    for index in range(way.num_choices):
        own = [c["choices"][0] for c in deltas if c["choices"][0]["index"] == index]
        reasons = [each["finish_reason"] for each in own]
        assert all(reason is None for reason in reasons[:-1])
        content = "".join(each["delta"].get("content", "") for each in own)
        spelled = [token for each in own for token in (each["logprobs"] or {}).get("content", [])]
        choices.append(
            {
                "index": index,
                "message": {"role": "assistant", "content": content},
                "logprobs": {"content": spelled} if way.has_logprobs else own[-1]["logprobs"],
                "finish_reason": reasons[-1],
            }
        )
    return {
        "choices": choices,
        "usage": last["usage"],
        "metrics": last["metrics"],
        "rapid": chunks[-1]["rapid"],
    }


async def test_every_mode_answers_the_main_ways_of_asking(shipped: str) -> None:
    wrong = await failures(shipped, main_ways())
    assert not wrong, wrong


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
async def test_every_mode_answers_every_way_of_asking(shipped: str, mode: str) -> None:
    wrong = await failures(shipped, every_way(mode))
    assert not wrong, wrong


@pytest.mark.parametrize("mode", MODES)
def test_the_command_line_answers_in_every_mode(shipped: str, mode: str, tmp_path: Path) -> None:
    document = tmp_path / "document.txt"
    document.write_text(DOCUMENT.text)
    temperature = "0.5" if mode == "paper" else "0"
    options = f"--mode {mode} --temperature {temperature} --max-tokens {MAX_TOKENS} --stats"
    done = subprocess.run(
        [RAPID, "ask", QUESTION, "-d", document, "--url", shipped, *options.split()],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer, *table = done.stdout.splitlines()
    assert answer
    settled, contract = ANSWERS[mode][0]
    rows = dict(line.split(maxsplit=1) for line in table if len(line.split()) > 1)
    assert (rows["mode"].strip(), rows["contract"].strip()) == (settled, contract)


@pytest.mark.parametrize("drafting_by", ["target"], indirect=True)
async def test_a_target_that_drafts_for_itself_answers_every_mode(drafting_by: str) -> None:
    wrong = await failures(drafting_by, main_ways())
    assert not wrong, wrong


@pytest.mark.parametrize("drafting_by", ["prompt_lookup"], indirect=True)
async def test_prompt_lookup_answers_what_it_can_and_refuses_the_rest(drafting_by: str) -> None:
    wrong = await failures(drafting_by, main_ways(), LOOKUP_ANSWERS)
    assert not wrong, wrong
