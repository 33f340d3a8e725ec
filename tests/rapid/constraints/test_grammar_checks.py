"""How often the process that checks grammars is asked, as its time is what a request waits for."""

from __future__ import annotations

import os
import random
import signal

import pytest
from llguidance import LLMatcher

from rapid.constraints import grammar_checks
from rapid.constraints.structured_outputs import compile_schema
from tests.rapid.constraints.json_schemas import NUM_SCHEMAS, make_schema


def test_each_schema_is_checked_once_and_not_again_when_it_was_seen(
    monkeypatch: pytest.MonkeyPatch,
):
    asked: list[str] = []
    ask = grammar_checks._Checks.ask

    def spy(checks: grammar_checks._Checks, grammar: str) -> tuple[str, float]:
        asked.append(grammar)
        return ask(checks, grammar)

    monkeypatch.setattr(grammar_checks._Checks, "ask", spy)
    grammar_checks.measure_fault.cache_clear()
    process = None
    for number in range(NUM_SCHEMAS):
        schema = make_schema(random.Random(number))
        grammar, num_asked = compile_schema(schema), len(asked)
        assert compile_schema(schema) == grammar
        assert len(asked) == num_asked
        process = process or grammar_checks._CHECKS._process
    assert len(asked) <= NUM_SCHEMAS
    assert grammar_checks._CHECKS._process is process  # no schema made it end itself


def test_a_fork_has_a_checking_process_of_its_own():
    assert not grammar_checks.find_fault(LLMatcher.grammar_from_regex("b{1,3}"))
    child = os.fork()
    if child == 0:  # which must not come back into the tests
        try:
            signal.alarm(60)
            os._exit(bool(grammar_checks.find_fault(LLMatcher.grammar_from_regex("b{1,4}"))))
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not grammar_checks.find_fault(LLMatcher.grammar_from_regex("b{1,5}"))
