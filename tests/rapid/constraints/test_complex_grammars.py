"""Grammars that become too complex in mid-answer end the answers that follow them alone."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

import rapid
from deployments.api.dialects.chat.wire import rapid_receipt
from rapid.answering.request import RequestRun
from rapid.chat_messages import Message
from rapid.checkpoints.text import ChatText
from rapid.config import EngineConfig, Mode, SamplingConfig, SpeculationConfig
from rapid.constraints import grammars as grammars_module
from rapid.constraints.grammars import GrammarShaping
from rapid.constraints.structured_outputs import compile_regex, compile_schema
from rapid.engines.forward.weights.loading import load_model
from rapid.engines.local_ports import make_engine
from rapid.errors import BadRequest
from rapid.events import Finished, TextDelta
from rapid.messages import GenerateRequest, LeaseRequest, SpeculationRequest, Terms, as_prompt
from tests.rapid.constraints.test_grammars import DOCUMENT, QUESTION, SCHEMA, is_valid


class Limited:
    """A matcher whose library gives up at the fifth token."""

    def __init__(self, matcher: Any) -> None:
        self.matcher, self.num_left = matcher, 5

    def __getattr__(self, name: str) -> Any:
        return getattr(self.matcher, name)

    def try_consume_tokens(self, token_ids: list[int]) -> int:
        self.num_left -= 1
        return self.num_left > 0 and self.matcher.try_consume_tokens(token_ids)

    def is_error(self) -> bool:
        return self.num_left <= 0

    def get_error(self) -> str:
        return "too many states"


async def test_a_grammar_that_becomes_too_complex_ends_the_answers_that_follow_it_alone(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(
        "rapid.constraints.grammars.GrammarShaping",
        lambda matcher, eos_ids, renew: GrammarShaping(
            Limited(matcher), eos_ids, lambda: Limited(renew())
        ),
    )
    config = EngineConfig(model="embedded:target", max_context=256, kv_cache_tokens=2048)
    engine = make_engine(load_model(config), None)
    prompt = as_prompt(ChatText.load(config.model).encode("The keeper of Varo is"))

    async def decode(name: str, grammar: str | None) -> Any:
        sampling = SamplingConfig(seed=1, grammar=grammar)
        terms = Terms("local", sampling, SpeculationConfig(), 12)
        await engine.open(LeaseRequest(name, terms, prompt))
        await engine.prefill(name)
        return await engine.decode(name, 0, 12)

    grammar = compile_regex("[a-z ]+")
    limited, free = await asyncio.gather(
        decode("limited", grammar), decode("free", None), return_exceptions=True
    )
    assert isinstance(limited, BadRequest)
    assert str(limited) == "The grammar is too complex to follow: too many states"
    assert limited.param == "response_format"
    assert len(free.token_ids) > 0
    for number in range(8):  # more failed steps in a row than an engine survives
        with pytest.raises(BadRequest, match="too complex"):
            await decode(str(number), grammar)
    assert len((await decode("after", None)).token_ids) > 0
    engine.close()


@pytest.mark.parametrize("mode", ["plain", "lossless", "fused"])
def test_of_several_answers_one_whose_grammar_becomes_too_complex_is_cut(
    monkeypatch: pytest.MonkeyPatch, mode: Mode
):
    opened = threading.local()  # a thread opens the grammars of a lease, one for each choice

    def open_shaping(matcher: Any, eos_ids: Any, renew: Any) -> GrammarShaping:
        opened.num = getattr(opened, "num", 0) + 1
        if opened.num % 2:
            return GrammarShaping(Limited(matcher), eos_ids, lambda: Limited(renew()))
        return GrammarShaping(matcher, eos_ids, renew)

    monkeypatch.setattr(grammars_module, "GrammarShaping", open_shaping)
    request = GenerateRequest(
        "two",
        "local",
        (Message("user", QUESTION),),
        (DOCUMENT,),
        num_choices=2,
        max_tokens=90,
        seed=7,
        grammar=compile_schema(SCHEMA),
        speculation=SpeculationRequest(mode=mode),
    )

    async def answer() -> list[Any]:
        return [each async for each in RequestRun(drafted._services, request).events()]

    with rapid.open("embedded:target", drafter="embedded:drafter") as drafted:
        *events, finished = drafted._loop.run(answer)
        assert drafted.answer(QUESTION, max_tokens=3, mode=mode).text
    texts, reasons = ["", ""], [None, None]
    for each in events:
        if isinstance(each, TextDelta):
            texts[each.choice] += each.text
            reasons[each.choice] = each.finish_reason or reasons[each.choice]
    assert reasons == ["length", "stop"]
    assert is_valid(texts[1])
    assert not is_valid_json(texts[0])
    assert isinstance(finished, Finished)
    assert rapid_receipt(finished.receipt)["cut_by"] == ["grammar too complex", None]


def is_valid_json(text: str) -> bool:
    try:
        return json.loads(text) is not None
    except ValueError:
        return False
