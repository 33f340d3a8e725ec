"""The front door in one process: what the README shows, and what callers get wrong."""

from __future__ import annotations

import gc
import itertools
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers.utils.logging import set_tqdm_hook

import rapid
from evaluation.loaders.generated import load
from evaluation.tasks import Source
from rapid.chat_messages import Document, Message, ToolCall
from rapid.config import AnsweringConfig, EngineConfig
from rapid.errors import (
    BadRequest,
    ConfigurationError,
    DrafterUnavailable,
    PromptTooLong,
    RapidError,
)
from rapid.pair.pair import _read_paths
from rapid.pair.pair_stream import Answer
from tests.deployments.scripted import receipt

README = (Path(__file__).parents[3] / "README.md").read_text()
FACTS = "The banner of Tezawe is sozo sema 40. The well of Ruki is dry. " * 3


@pytest.fixture(scope="module")
def pair():
    with rapid.open("embedded:target", drafter="embedded:drafter") as opened:
        yield opened


MODES = {
    "plain": "target",
    "lossless": "target",
    "fused": "fused",
    "rag": "drafter",
    "auto": "fused",
    "paper": "paper",
}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_answers_under_its_contract(pair, mode, seed, temperature):
    settings = {"temperature": temperature, "max_tokens": 12}
    if seed is not None:
        settings["seed"] = seed
    if mode == "paper" and temperature == 0:
        with pytest.raises(BadRequest, match="set a temperature"):
            pair.answer("What is the banner of Tezawe?", documents=[FACTS], mode=mode, **settings)
        return
    answer = pair.answer("What is the banner of Tezawe?", documents=[FACTS], mode=mode, **settings)
    assert answer.receipt.contract == MODES[mode]
    assert answer.text
    if seed is not None:
        assert answer.receipt.seed == seed
        again = pair.answer(
            "What is the banner of Tezawe?", documents=[FACTS], mode=mode, **settings
        )
        assert again.text == answer.text


def test_the_embedded_models_answer_greedily_unless_asked_otherwise(pair):
    asked = {"documents": [FACTS], "mode": "fused", "max_tokens": 12}
    question = "List the three deposits of Tezawe."  # of which the document says nothing
    greedy = {pair.answer(question, seed=seed, **asked).text for seed in range(6)}
    assert greedy == {pair.answer(question, temperature=0, **asked).text}
    warm = {pair.answer(question, seed=seed, temperature=2, **asked).text for seed in range(6)}
    assert len(warm) > 1


def test_a_stream_is_the_answer_in_pieces(pair):
    asked = {"documents": [FACTS], "mode": "fused", "seed": 3, "max_tokens": 20}
    stream = pair.stream("What is the banner of Tezawe?", **asked)
    pieces = list(stream)
    whole = pair.answer("What is the banner of Tezawe?", **asked)
    assert stream.answer is not None
    assert "".join(pieces) == stream.answer.text == whole.text
    assert len(pieces) > 1


def test_a_plain_stream_begins_with_its_first_token(pair):
    asked = {"documents": [FACTS], "mode": "plain", "seed": 3, "max_tokens": 20}
    stream = pair.stream("What is the banner of Tezawe?", **asked)
    whole = pair.answer("What is the banner of Tezawe?", **asked)
    assert "".join(stream) == whole.text
    assert stream.answer is not None
    assert stream.answer.receipt.choices[0].rounds == whole.receipt.choices[0].rounds + 1


def test_a_stream_that_is_given_up_leaves_room_for_others(pair):
    for _ in range(40):  # more than there are leases
        stream = pair.stream("What is the banner of Tezawe?", documents=[FACTS], mode="plain")
        assert next(stream)
        stream.close()
    assert pair.answer("What is the banner of Tezawe?", documents=[FACTS]).text


def test_a_document_is_read_once(pair):
    document = Document("atlas", "The lighthouse of Varo guards the northern strait. " * 20)
    first = pair.answer("What guards the strait?", documents=[document], max_tokens=4)
    second = pair.answer("Where is Varo?", documents=[document], max_tokens=4)
    assert first.receipt.cached_tokens == 0
    assert "0 of them before" in str(first.receipt)
    assert f"<td>{first.receipt.contract}</td>" in first.receipt._repr_html_()
    assert repr(pair) == "<rapid.Pair, open>"
    assert second.receipt.cached_tokens > 0.8 * second.receipt.prompt_tokens


def test_it_goes_on_from_a_chat(pair):
    chat = [
        Message("user", "What is the banner of Tezawe?"),
        Message("assistant", "It is sozo sema 40."),
        Message("user", "And the well of Ruki?"),
    ]
    answer = pair.answer(chat, documents=[FACTS], max_tokens=8)
    assert answer.text


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"temperature": 5.0}, "temperature"),
        ({"eta": -1.0}, "eta"),
        ({"max_draft": 0}, "max_draft"),
    ],
)
def test_a_setting_out_of_range_is_refused_by_its_name(pair, settings, field):
    with pytest.raises(BadRequest) as refused:
        pair.answer("What is it?", **settings)
    assert refused.value.param == field


def test_mistakes_of_the_caller_are_named(pair):
    with pytest.raises(PromptTooLong, match="more than the 8192 tokens of the target's context"):
        pair.answer("word " * 20_000)
    with pytest.raises(BadRequest, match=r"^refresh is not part of mode 'paper'"):
        pair.answer("What is it?", documents=[FACTS], mode="paper", refresh=True)
    with pytest.raises(BadRequest, match=r"^retrieval_tokens must be below") as refused:
        pair.answer("What is it?", documents=[FACTS], retrieval_tokens=8192)
    assert refused.value.param == "retrieval_tokens"
    with pytest.raises(ConfigurationError, match="ask with mode 'paper'"):
        rapid.open("embedded:target", speculation=rapid.SpeculationConfig(rule="paper"))


@pytest.mark.parametrize("mode", ["plain", "rag", "fused"])
def test_a_call_that_is_refused_leaves_the_engines_as_they_were(pair, mode):
    with pytest.raises(BadRequest, match="max_tokens must be a valid integer"):
        pair.answer("What is it?", documents=[FACTS], mode=mode, max_tokens=20.0)
    assert pair.answer("What is it?", documents=[FACTS], mode=mode, max_tokens=2).text


def test_what_an_engine_cannot_reserve_fails_alone(pair, monkeypatch):
    prefixes = pair._services.pools.target.engine._state.ledger.prefixes
    with monkeypatch.context() as broken:
        broken.setattr(prefixes, "take", None)
        with pytest.raises(TypeError):
            pair.answer("What is it?", mode="plain", max_tokens=2)
    assert pair.answer("What is it?", mode="plain", max_tokens=2).text


@pytest.mark.parametrize("drafter", ["embedded:drafter", None])
def test_a_document_that_leaves_no_room_for_what_is_retrieved_is_refused_with_numbers(drafter):
    """`auto` goes on without, and neither waits for room that never comes."""
    target = EngineConfig(model="embedded:target", max_context=1024, kv_cache_tokens=1024)
    text = "The banner of Tezawe is sozo sema 40. The well of Ruki is dry. " * 35
    asked = {"question": "What is the banner of Tezawe?", "documents": [text], "max_tokens": 20}
    with rapid.open(target, drafter=drafter) as tight:
        for_ever = AnsweringConfig(drafter_wait_s=1e6)
        tight._services = replace(tight._services, config=for_ever)
        with pytest.raises(PromptTooLong, match=r"beside the \d+ .* has 1024 \(kv_cache_tokens\)"):
            tight.answer(mode="fused", **asked)
        receipt = tight.answer(mode="auto", **asked).receipt
        assert (receipt.mode, receipt.is_fallback) == ("plain", True)
        assert receipt.reason.startswith("what the drafter would read does not fit")


@pytest.mark.parametrize(
    "drafter",
    [None, rapid.PromptLookup(), rapid.WindowDrafting(window=64)],
    ids=["target", "lookup", "window"],
)
def test_a_target_drafts_for_itself_or_looks_up_and_loses_no_token(pair, drafter):
    asked = {"documents": [FACTS], "temperature": 0, "max_tokens": 16, "mode": "lossless"}
    with rapid.open("embedded:target", drafter=drafter) as alone:
        answer = alone.answer("What is the banner of Tezawe?", **asked)
    plain = pair.answer("What is the banner of Tezawe?", **(asked | {"mode": "plain"}))
    assert answer.text == plain.text
    assert answer.receipt.choices[0].drafted or answer.receipt.choices[0].rounds > 1


def test_retrieving_again_is_counted_and_changes_no_lossless_token(pair):
    source = Source(loader="generated", split="dev", options={"lengths": {"1000": 1}})
    item = next(iter(load(source, None)))
    asked = {"documents": [item.document], "temperature": 0, "mode": "lossless"}
    question = item.messages[-1].content
    without = pair.answer(question, **asked)
    again = pair.answer(question, refresh=True, **asked)
    assert again.text == without.text
    assert without.receipt.choices[0].refreshes == 0


def test_a_closed_pair_says_so_and_leaves_no_thread():
    before = set(threading.enumerate())
    with rapid.open("embedded:target") as opened:
        assert opened.answer("What is it?", max_tokens=2).text
    with pytest.raises(RapidError, match="this pair is closed"):
        opened.answer("What is it?")
    with pytest.raises(RapidError, match="this pair is closed"), opened:
        pass
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert left <= {"tqdm_monitor"}


def test_opening_a_pair_writes_nothing_and_leaves_bars_as_they_were(capfd):
    def show(factory, given, named):
        return factory(*given, **named)

    before = set_tqdm_hook(show)
    try:
        with rapid.open("embedded:target"):
            assert capfd.readouterr() == ("", "")
    finally:
        assert set_tqdm_hook(before) is show


def test_a_notebook_shows_an_answer_with_its_calls_and_its_receipt():
    call = ToolCall("c", "look", '{"at": "<b>"}')
    shown = Answer("1 < 2\n& so on", "tool_calls", receipt(), (call,))._repr_html_()
    assert shown.startswith(
        '<div style="white-space: pre-wrap">1 &lt; 2\n&amp; so on\n'
        "look({&quot;at&quot;: &quot;&lt;b&gt;&quot;})</div><table>"
    )


def test_a_stream_that_was_given_up_has_ended(pair):
    stream = pair.stream("What is it?", documents=[FACTS], mode="plain")
    assert next(stream)
    stream.close()
    stream.close()
    assert list(stream) == []
    assert stream.answer is None


@pytest.mark.parametrize("drafter", ["embedded:drafter", None])
def test_a_pair_is_closed_with_streams_open(drafter, caplog):
    """One has begun, one has not: both end without a word, and neither can be read on."""
    with rapid.open("embedded:target", drafter=drafter) as opened:
        begun = opened.stream("What is it?", documents=[FACTS], mode="fused", max_tokens=200)
        unread = opened.stream("What is it?", documents=[FACTS])
        assert next(begun)
    opened.close()
    for stream in (begun, unread):
        stream.close()
        with pytest.raises(RapidError, match="this pair is closed"):
            next(stream)
    del begun, unread, stream
    gc.collect()  # a generator that was left open would complain here
    assert caplog.messages == []


def test_a_stream_has_one_reader_at_a_time_and_anyone_may_close_it(pair, monkeypatch):
    stream = pair.stream("What is it?", documents=[FACTS], mode="plain", max_tokens=40)
    assert next(stream)
    runner = pair._services.pools.target.engine._compute.runner
    run, is_waiting, goes_on = runner.run, threading.Event(), threading.Event()

    def waits(feeds):
        is_waiting.set()
        assert goes_on.wait(60)
        return run(feeds)

    monkeypatch.setattr(runner, "run", waits)
    with ThreadPoolExecutor() as threads:
        reading = threads.submit(list, stream)
        assert is_waiting.wait(60)
        with pytest.raises(RapidError, match="give each thread its own stream"):
            next(stream)
        closing = threads.submit(stream.close)
        goes_on.set()
        closing.result()
        reading.result()  # it ends, wherever the other thread has closed it


def test_the_readme_s_example_answers_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from typer.testing import CliRunner

    from deployments.cli import app

    monkeypatch.chdir(tmp_path)
    (options,) = re.findall(r"^\.venv/bin/rapid (sample-document .*)$", README, flags=re.MULTILINE)
    assert CliRunner().invoke(app, options.split()).exit_code == 0
    capsys.readouterr()
    (example,) = re.findall(r"```python\n([^`]*rapid\.open.*?)```", README, flags=re.DOTALL)
    exec(compile(example, "README", "exec"), {})
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("The banner of Tezawe is sozo sema 40. fused")
    assert second.startswith("The first deposit of Lonadu is ")


def test_a_reader_that_pauses_for_long_reads_the_same_answer(pair, monkeypatch):
    asked = {"documents": [FACTS], "mode": "fused", "seed": 3, "max_tokens": 20}
    whole = pair.answer("What is the banner of Tezawe?", **asked)
    pools = pair._services.pools
    engines = [pools.target.engine, pools.drafter.engine]
    now = [0.0]
    for engine in engines:
        monkeypatch.setattr(engine._state.ledger, "clock", lambda: now[0])
    stream = pair.stream("What is the banner of Tezawe?", **asked)
    pieces = []
    for piece in stream:
        pieces.append(piece)
        now[0] += 10_000
        assert [engine.status().leases_open for engine in engines] == [2, 1]  # a witness
    assert "".join(pieces) == whole.text
    assert stream.answer.receipt.failovers == ()


def test_a_step_that_fails_costs_no_token(pair, monkeypatch, caplog):
    asked = {"documents": [FACTS], "mode": "fused", "seed": 3, "max_tokens": 20}
    whole = pair.answer("What is the banner of Tezawe?", **asked)
    runner = pair._services.pools.target.engine._compute.runner
    run, num_runs = runner.run, itertools.count(1)

    def fails_once(feeds):
        if next(num_runs) == 4:
            raise torch.OutOfMemoryError("no memory")
        return run(feeds)

    monkeypatch.setattr(runner, "run", fails_once)
    answer = pair.answer("What is the banner of Tezawe?", **asked)
    assert answer.receipt.failovers == ("target lost",)
    assert answer.text == whole.text
    (told,) = [each for each in caplog.messages if "new leases" in each]
    assert re.match(r"request local-\d+: new leases: .*\(OutOfMemoryError\('no memory'\)\)", told)


@pytest.mark.parametrize("mode", ["auto", "fused"])
@pytest.mark.parametrize(
    ("drafts", "told"),
    [(False, "no drafter: "), (True, "no drafter any more: the drafter gave no")],
)
def test_why_a_drafter_was_lost_is_in_the_log_under_the_requests_id(
    pair, monkeypatch, caplog, drafts, told, mode
):
    """It fails at the first forward that reads, or at the first that drafts."""
    runner = pair._services.pools.drafter.engine._compute.runner
    run, failed = runner.run, []

    def fails_once(feeds):
        if not failed and drafts == any(feed.num_wanted for feed in feeds):
            failed.append(feeds)
            raise RuntimeError("no memory")
        return run(feeds)

    monkeypatch.setattr(runner, "run", fails_once)
    other = f"The gate of Ulen is green in {mode}. " * 5  # which it has not read yet
    asked = {"documents": [other], "mode": mode, "max_tokens": 20}
    if mode == "auto":
        answer = pair.answer(f"What is the gate of Ulen? {drafts}", **asked)
        assert answer.receipt.failovers == ("drafter lost",)
        assert (answer.receipt.contract, answer.receipt.is_fallback) == ("target", True)
    else:
        with pytest.raises(DrafterUnavailable, match="before the first token"):
            pair.answer(f"What is the gate of Ulen? {drafts}", **asked)
    (line,) = [each for each in caplog.messages if "no drafter" in each]
    assert re.match(rf"request local-\d+: {told}.*RuntimeError\('no memory'\)", line)


def test_a_path_is_a_document_under_its_own_name(pair, tmp_path):
    (tmp_path / "facts.html").write_text(f"<p>{FACTS}</p>")
    question = "What is the banner of Tezawe?"
    asked = {"mode": "fused", "max_tokens": 12}
    answer = pair.answer(question, documents=[tmp_path / "facts.html"], **asked)
    as_text = Document("facts.html", FACTS.strip())
    assert answer.text == pair.answer(question, documents=[as_text], **asked).text
    assert {each.document for each in answer.receipt.chunks} == {"facts.html"}
    of_folder = pair.answer(question, documents=[tmp_path], **asked)
    assert of_folder.text == answer.text


def test_documents_of_all_kinds_stay_in_their_order(tmp_path):
    (tmp_path / "more.txt").write_text("Wet.")
    given = ["Green.", tmp_path / "more.txt", Document("b", "Dry.")]
    assert _read_paths(given) == ["Green.", Document("more.txt", "Wet."), Document("b", "Dry.")]


def test_a_path_that_cannot_be_read_is_one_sentence(pair, tmp_path):
    (tmp_path / "a.png").write_bytes(bytes(range(256)))
    with pytest.raises(BadRequest, match=r"a\.png: Files of this kind are not read") as refused:
        pair.answer("Who?", documents=[tmp_path / "a.png"])
    assert refused.value.param == "documents"
    with pytest.raises(BadRequest, match="documents must be a list of texts, paths or"):
        pair.answer("Who?", documents=tmp_path)


def test_how_far_a_document_is_read_is_told_to_who_asks(pair, monkeypatch):
    monkeypatch.setattr("rapid.answering.rounds._READING_S", 0.001)
    told = []
    asked = {"documents": ["The gate of Ulen is blue. " * 200], "mode": "plain", "max_tokens": 3}
    answer = pair.answer("What is the gate of Ulen?", on_progress=told.append, **asked)
    assert told
    assert all(isinstance(each, rapid.Reading) for each in told)
    assert {each.num_all for each in told} == {answer.receipt.prompt_tokens}
    silent = pair.answer("What is the gate of Ulen?", **asked)
    assert silent.text == answer.text


def test_what_a_progress_callback_raises_ends_the_answer(pair, monkeypatch):
    monkeypatch.setattr("rapid.answering.rounds._READING_S", 0.001)

    def give_up(_: rapid.Reading) -> None:
        raise KeyboardInterrupt

    text = "The gate of Ulen is red. " * 200
    with pytest.raises(KeyboardInterrupt):
        pair.answer("Who?", documents=[text], mode="plain", on_progress=give_up)
    assert pair._services.pools.target.engine.status().leases_open == 0


def test_what_is_no_model_is_one_sentence(tmp_path):
    with pytest.raises(ConfigurationError, match="it is of type NoneType"):
        rapid.open(None)
    with pytest.raises(ConfigurationError) as refused:
        rapid.open(tmp_path / "missing")
    assert str(tmp_path / "missing") in str(refused.value)
