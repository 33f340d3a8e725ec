"""Prompts that are no chats: continued, told, scored, and several in one request."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest

from rapid.chat_messages import Document, Message
from rapid.config import EngineConfig
from rapid.engines.engine import Engine
from rapid.engines.forward.weights.loading import LoadedModel
from rapid.engines.parallel.leading import load_replica
from rapid.errors import BadRequest, EngineFailed, PromptTooLong
from rapid.events import GenerationEvent, Started, TextDelta, TokenText
from rapid.messages import GenerateRequest, RawPrompt, SpeculationRequest
from tests.answered import receipt, script, text, tokens
from tests.local_pools import LocalApplication, QueueingEngine

LOADED: dict[str, LoadedModel] = {}
IDS = itertools.count()
PAGE = 16  # tokens


def load_embedded(config: EngineConfig) -> Engine:
    """An engine of an embedded model, whose weights are loaded once."""
    if config.model not in LOADED:
        LOADED[config.model] = load_replica(config)
    return Engine(LOADED[config.model], config)


def raw(*prompts: RawPrompt, mode: str = "auto", **fields: Any) -> GenerateRequest:
    fields = {"max_tokens": 4, "temperature": 0.0, "explain": len(prompts) == 1} | fields
    speculation = SpeculationRequest(mode=mode)  # type: ignore[arg-type]
    return GenerateRequest(
        f"r{next(IDS)}", "local", (), prompts=prompts, speculation=speculation, **fields
    )


def told(events: list[GenerationEvent], choice: int = 0) -> list[TokenText]:
    deltas = [each for each in events if isinstance(each, TextDelta) and each.choice == choice]
    return [token for delta in deltas for token in delta.logprobs]


@pytest.fixture(scope="module")
def words() -> Any:
    return LocalApplication()._services.prompts.target


@pytest.mark.parametrize("prompt", ["The lighthouse of Varo", (70, 71, 72)])
async def test_a_prompt_is_read_as_it_is_and_nothing_is_retrieved(
    prompt: RawPrompt, words: Any
) -> None:
    app = LocalApplication()
    end = receipt(events := await app.answered(raw(prompt, seed=3)))
    assert (end.mode, end.cause) == ("plain", "nothing to retrieve from")
    expected = list(prompt) if isinstance(prompt, tuple) else words.encode(prompt)
    assert end.explanation is not None
    assert list(end.explanation.target_prompt_ids) == expected
    assert tokens(events) == script(3, 4)
    assert app.retriever.queries == []
    assert app.drafter.num_streams == 0


async def test_lossless_lets_the_drafter_read_the_same() -> None:
    app = LocalApplication()
    end = receipt(events := await app.answered(raw("Varo guards", mode="lossless", seed=3)))
    assert (end.mode, end.contract) == ("lossless", "target")
    assert end.explanation is not None
    assert end.explanation.drafter_prompt_ids == end.explanation.target_prompt_ids
    assert end.choices[0].drafted > 0
    assert tokens(events) == script(3, 4)


async def test_prompt_lookup_drafts_without_being_asked() -> None:
    app = LocalApplication(drafter="prompt_lookup")
    assert receipt(await app.answered(raw("Varo"))).mode == "lossless"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ((5, 10**6), "token id 1000000, and the model's vocabulary has"),
        ("", "the prompt is empty"),
    ],
)
async def test_what_is_no_prompt_is_refused(prompt: RawPrompt, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        await LocalApplication().answered(raw(prompt))


@pytest.mark.parametrize("prompt", ["lighthouse " * 2_000_000, "lighthouse " * 9_000, (7,) * 9_000])
async def test_a_prompt_that_is_too_long_is_refused_before_any_is_begun(prompt: RawPrompt) -> None:
    app = LocalApplication(engine={"max_context": 4096, "kv_cache_tokens": 8192})
    for prompts in [(prompt,), ("a", prompt)]:
        with pytest.raises(PromptTooLong, match=r"^This model.s maximum context length is 4096"):
            await app.answered(raw(*prompts))
    assert app.target.num_streams == 0


async def test_several_prompts_are_choices_of_one_answer() -> None:
    app = LocalApplication()
    prompts = [f"Prompt {number}" for number in range(6)]
    events = await app.answered(raw(*prompts, num_choices=2, seed=3, echoes_prompt=True))
    assert [isinstance(each, Started) for each in events].count(True) == 1
    end = receipt(events)
    assert len(end.choices) == 12
    assert end.prompt_tokens == events[0].prompt_tokens  # type: ignore[union-attr]
    finished = [e.choice for e in events if isinstance(e, TextDelta) and e.finish_reason]
    assert sorted(finished) == list(range(12))
    for choice in range(12):
        answer = text(events, choice)
        assert answer.startswith(prompts[choice // 2])
        assert answer.removeprefix(prompts[choice // 2]) == text(events, choice % 2)[8:]


async def test_prompts_of_a_begun_request_wait_for_room_and_are_not_refused() -> None:
    one = {"max_leases": 1}
    app = LocalApplication(
        engine=one, drafter="prompt_lookup", load=QueueingEngine, target_wait_s=0.05
    )
    prompts = [f"Prompt {number}" for number in range(5)]
    events = await app.answered(raw(*prompts, mode="plain", seed=50_003, is_streamed=True))
    finished = [e.choice for e in events if isinstance(e, TextDelta) and e.finish_reason]
    assert sorted(finished) == list(range(5))


async def test_a_failure_of_one_prompt_is_that_of_all() -> None:
    app = LocalApplication()
    app.target.fail = ValueError("a bug in the replica")
    with pytest.raises(Exception, match=r"."):
        await app.answered(raw("a", "b"))


async def test_an_answer_goes_on_where_its_target_was_lost_and_tells_the_prompt_once() -> None:
    app = LocalApplication()
    request = raw("Varo", echoes_prompt=True, max_tokens=12, seed=3, is_streamed=True)
    events = await app.answered(request, target_dies_after=3)
    assert receipt(events).failovers == ("target lost",)
    assert text(events, 0).count("Varo") == 1
    assert tokens(events) == script(3, 12)


async def test_an_engine_that_scores_no_prompts_says_so() -> None:
    with pytest.raises(EngineFailed, match="scores no prompts"):
        await LocalApplication().answered(raw("Varo is", echoes_prompt=True, num_logprobs=1))


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_likelihoods_of_options_are_those_of_each_alone(max_tokens: int, words: Any) -> None:
    app = LocalApplication(load=load_embedded)
    context = "The lighthouse of Varo guards the northern strait. " * 8
    options = [context + end for end in ("It is white.", "It is old.", "Nobody knows it.", "It")]
    how = {"echoes_prompt": True, "num_logprobs": 1, "max_tokens": max_tokens}
    together = await app.answered(raw(*options, **how))
    assert receipt(together).prompt_tokens == sum(len(words.encode(each)) for each in options)
    assert receipt(together).cached_tokens >= 3 * (len(words.encode(context)) - PAGE)
    for choice, option in enumerate(options):
        own = told(together, choice)
        alone = told(await LocalApplication(load=load_embedded).answered(raw(option, **how)))
        assert len(own) == len(words.encode(option)) + max_tokens
        assert math.isnan(own[0].logprob)
        assert [each.text for each in own] == [each.text for each in alone]
        for one, other in zip(own[1:], alone[1:], strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
            assert len(one.top) == 1
        assert text(together, choice).startswith(option)
    finish = [e.finish_reason for e in together if isinstance(e, TextDelta) and e.finish_reason]
    assert len(finish) == 4


async def test_a_long_prompt_is_told_in_parts() -> None:
    app = LocalApplication(load=load_embedded)
    how = {"echoes_prompt": True, "num_logprobs": 0, "max_tokens": 0, "is_streamed": True}
    ids = tuple(40 + number % 50 for number in range(700))
    events = await app.answered(raw(ids, ids, mode="plain", **how))
    for choice in range(2):
        parts = [e for e in events if isinstance(e, TextDelta) and e.choice == choice]
        assert [len(each.logprobs) for each in parts] == [512, 188]
        assert [each.finish_reason for each in parts] == [None, "length"]
        for each in parts:
            assert each.text == "".join(token.text for token in each.logprobs)


async def test_an_answer_of_no_tokens_without_its_prompt_is_empty() -> None:
    events = await LocalApplication().answered(raw("Varo", max_tokens=0))
    assert text(events, 0) == ""
    assert receipt(events).choices[0].completion_tokens == 0


async def test_tokens_are_those_that_the_target_reads_and_have_a_text(words: Any) -> None:
    prompts = LocalApplication()._services.prompts
    told = await prompts.tokenize(raw("The lighthouse of Varo"), 64)
    assert list(told.token_ids) == words.encode("The lighthouse of Varo")
    assert told.max_model_len == 64
    assert len(told.token_strs) == len(told.token_ids)
    back = await prompts.detokenize(raw(told.token_ids))
    assert back == "The lighthouse of Varo"
    chat = GenerateRequest("r", "local", (Message("user", "Hi"),))
    token_ids = (await prompts.tokenize(chat, 64)).token_ids
    attached = replace(chat, documents=(Document("doors", "The door is red."),))
    counted = len((await prompts.tokenize(attached, 64)).token_ids)
    assert counted == len(await prompts.target_prompt(attached, 4096)) > len(token_ids)
    assert list(token_ids) == words.encode_chat(chat.messages, day=chat.date)
    assert words.encode(await prompts.detokenize(raw(token_ids))) == list(token_ids)
    with pytest.raises(BadRequest, match="vocabulary"):
        await prompts.detokenize(raw((10**6,)))
