"""How often the process that checks grammars is asked, as its time is what a request waits for."""

from __future__ import annotations

import random

import pytest

from rapid.constraints import grammar_checks
from rapid.constraints.structured_outputs import compile_schema
from tests.rapid.constraints.json_schemas import NUM_SCHEMAS, make_schema


def test_each_schema_is_checked_once_and_not_again_when_it_was_seen(
    monkeypatch: pytest.MonkeyPatch,
):
    asked: list[str] = []
    ask = grammar_checks._Checks.ask

    def spy(checks: grammar_checks._Checks, grammar: str) -> str:
        asked.append(grammar)
        return ask(checks, grammar)

    monkeypatch.setattr(grammar_checks._Checks, "ask", spy)
    grammar_checks.find_fault.cache_clear()
    process = None
    for number in range(NUM_SCHEMAS):
        schema = make_schema(random.Random(number))
        grammar, num_asked = compile_schema(schema), len(asked)
        assert compile_schema(schema) == grammar
        assert len(asked) == num_asked
        process = process or grammar_checks._CHECKS._process
    assert len(asked) <= NUM_SCHEMAS
    assert grammar_checks._CHECKS._process is process  # no schema made it end itself
