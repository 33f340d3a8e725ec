"""A drafter of vLLM's: what it asks of vLLM, what it makes of the answers, and what it refuses."""

from __future__ import annotations

import asyncio
import collections
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rapid.config import EngineConfig, SamplingConfig, SpeculationConfig
from rapid.engines.local_ports import EngineDrafter
from rapid.engines.vllm_engine import VllmEngine, open_vllm
from rapid.errors import (
    BadRequest,
    ConfigurationError,
    EngineFailed,
    LeaseNotFound,
    OutOfStep,
    PromptTooLong,
)
from rapid.messages import DraftBlock, LeaseRequest, Terms, Verdict, as_prompt
from rapid.speculation.draw import Draw
from rapid.speculation.loop import speculate
from rapid.speculation.sampling import probabilities, proposal
from rapid.vllm_config import VllmConfig
from tests import fake_vllm
from tests.answered import ATLAS, receipt, script, tokens
from tests.fakes import FakeEngine
from tests.local_pools import LocalApplication
from tests.ray_cluster import question
from tests.toy import ToyModel, ToyVerifier

PROMPT = [7, 8, 9]
EOS, VOCAB = 5, 1024  # of the embedded tokenizer
TARGET, DRAFTER = ToyModel("target"), ToyModel("drafter")
CONFIG = VllmConfig(kind="vllm", model="embedded:drafter", max_context=64, max_leases=2)

Opener = Callable[..., VllmEngine]


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Opener:
    """A function from toy logits to an engine."""

    def opened(logits: Any = None, vocab: int = 5, **changes: Any) -> VllmEngine:
        fake_vllm.install(monkeypatch, tmp_path, logits or DRAFTER.logits, vocab=vocab)
        return open_vllm(CONFIG.model_copy(update=changes))

    return opened


def fake(engine: VllmEngine) -> fake_vllm.AsyncLLMEngine:
    llm: fake_vllm.AsyncLLMEngine = engine._llm
    return llm


def request(
    name: str = "a", prompt: Sequence[int] = PROMPT, max_tokens: int = 20, **settings: Any
) -> LeaseRequest:
    sampling = {*SamplingConfig.model_fields}
    terms = Terms(
        "tenant",
        SamplingConfig(**{key: settings.pop(key) for key in sampling & settings.keys()}),
        SpeculationConfig(**({"draft_top_k": 3} | settings)),
        max_tokens,
    )
    return LeaseRequest(name, terms, as_prompt(prompt))


async def drafted(engine: VllmEngine, num_tokens: int = 4, **settings: Any) -> DraftBlock:
    await engine.open(request(**settings))
    return await engine.draft("a", 0, None, num_tokens)


def constant(*numbers: float) -> Callable[[Sequence[int]], Any]:
    return lambda _: np.array(numbers)


@pytest.mark.parametrize(("temperature", "min_p"), [(0.0, 0), (0.6, 0), (1.0, 0), (1.0, 0.3)])
async def test_a_block_tells_what_its_tokens_were_drawn_from(
    vllm: Opener, temperature: float, min_p: float
) -> None:
    engine = vllm()
    block = await drafted(engine, temperature=temperature, min_p=min_p)
    assert len(block) == 4
    terms = request(temperature=temperature, min_p=min_p).terms
    text = list(PROMPT)
    for row, token in enumerate(block.token_ids.tolist()):
        draw = Draw(terms.sampling, terms.speculation, 0, row)
        ids, probs = proposal(DRAFTER.logits(text), draw)
        listed = zip(block.candidate_ids[row], block.candidate_probs[row], strict=True)
        told = {each: prob for each, prob in listed if prob}
        assert told == pytest.approx(dict(zip(ids, probs, strict=True)), abs=1e-6)
        assert token in told
        if temperature == 0:
            assert token == ids[0]
        text.append(token)


async def test_lossless_follows_the_targets_distribution(vllm: Opener) -> None:
    """Two positions in blocks of two, over 600 answers, against the closed form."""
    engine = vllm()
    fake(engine).random = np.random.default_rng(3)  # a fixed outcome
    speculation = SpeculationConfig(eta=0, draft_top_k=3)
    counts: collections.Counter[tuple[int, ...]] = collections.Counter()
    num_accepted = 0
    for seed in range(600):
        lease = LeaseRequest(
            f"{seed}", Terms("", SamplingConfig(seed=seed), speculation, 2), as_prompt(PROMPT)
        )
        await engine.open(lease)
        verifier = ToyVerifier(TARGET, SamplingConfig(seed=seed), speculation, max_tokens=2)
        drafter = EngineDrafter(engine, f"{seed}")  # type: ignore[arg-type]
        async for verdict in speculate(drafter, verifier, max_tokens=2, max_draft=2):
            num_accepted += verdict.num_accepted
        counts[tuple(verifier.committed)] += 1
        engine.release(f"{seed}")
    assert num_accepted > 200
    for answer in itertools.product(range(TARGET.vocab), repeat=2):
        expected = math.prod(
            float(probabilities(TARGET.logits(answer[:i]), 1.0)[token])
            for i, token in enumerate(answer)
        )
        assert counts[answer] / 600 == pytest.approx(expected, abs=4 * 0.5 / 600**0.5)


async def test_vllm_is_asked_for_the_prompt_and_what_is_committed(vllm: Opener) -> None:
    engine = vllm(lambda ids: np.arange(VOCAB + 2.0) % (len(ids) + 7), VOCAB + 2)
    await engine.open(request(temperature=0.5, top_p=0.9, top_k=2, logit_bias=((3, -1.5),)))
    filled = await engine.prefill("a")
    assert (filled.num_tokens, filled.num_cached_tokens) == (3, 1)
    assert engine.read_so_far("a") == (2, 1)
    first = await engine.draft("a", 0, None, 3)
    assert first.position == 0
    verdict = Verdict("a", 0, 0, (4, 2), 3, 1, False)
    second = await engine.draft("a", 0, verdict, 3)
    assert second.position == 2
    assert second.digest != first.digest
    (prompt, reading), (_, asked), (later, _) = fake(engine).asked
    assert (reading.max_tokens, reading.logprobs) == (1, None)
    assert prompt == {"prompt_token_ids": PROMPT, "cache_salt": "tenant\0"}
    assert later["prompt_token_ids"] == [*PROMPT, 4, 2]
    assert (asked.max_tokens, asked.temperature, asked.top_p, asked.top_k) == (3, 0.5, 0.9, 2)
    assert asked.stop_token_ids == [EOS]
    assert asked.logit_bias == {3: -1.5, VOCAB: -math.inf, VOCAB + 1: -math.inf}
    with pytest.raises(OutOfStep, match="for position 0"):
        await engine.draft("a", 0, verdict, 3)
    args = fake(engine).args
    assert (args.logprobs_mode, args.max_model_len) == ("processed_logprobs", 64)


async def test_rows_of_no_token_are_never_drafted(vllm: Opener) -> None:
    best = np.zeros(VOCAB + 2)
    best[VOCAB:], best[40] = 9, 5
    block = await drafted(vllm(lambda _: best, VOCAB + 2), temperature=0.0)
    assert block.token_ids.tolist() == [40] * 4
    assert block.candidate_ids.max() < VOCAB


async def test_nothing_is_drafted_behind_the_end_of_an_answer(vllm: Opener) -> None:
    block = await drafted(vllm(constant(0, 0, 0, 0, 0, 50)))
    assert block.token_ids.tolist() == [EOS]


async def test_equal_tokens_are_candidates_beyond_the_limit(vllm: Opener) -> None:
    block = await drafted(vllm(constant(5, 4, 4, 4, 4, -9)), draft_top_k=2)
    assert sorted(block.candidate_ids[0]) == [0, 1, 2, 3, 4]


async def test_a_proposal_that_vllm_does_not_tell_whole_is_not_used(vllm: Opener) -> None:
    block = await drafted(vllm(lambda ids: np.zeros(64) if len(ids) > 4 else np.arange(64.0)))
    assert len(block) == 2


async def test_a_block_may_be_empty(vllm: Opener) -> None:
    block = await drafted(vllm(lambda _: np.zeros(64)))
    assert (len(block), block.candidate_ids.shape) == (0, (0, 0))
    committed = await ToyVerifier(TARGET, SamplingConfig(), SpeculationConfig()).verify(block)
    assert len(committed.token_ids) == 1


async def test_a_block_ends_with_the_context(vllm: Opener) -> None:
    engine = vllm(max_context=16)
    assert len(await drafted(engine, 9, prompt=range(4, 16), max_tokens=4)) == 4
    with pytest.raises(PromptTooLong):
        await engine.open(request("b", range(4, 16), max_tokens=5))


async def test_leases_wait_for_a_place_and_end(vllm: Opener) -> None:
    engine = vllm()
    for name in "ab":
        await engine.open(request(name))
    waiting = asyncio.create_task(engine.open(request("c")))
    given_up = asyncio.create_task(engine.open(request("d")))
    await asyncio.sleep(0)
    assert engine.status().leases_waiting == 2
    given_up.cancel()
    ending = asyncio.create_task(engine.wait_closed("a"))
    await asyncio.sleep(0)
    engine.release("a")
    await waiting
    assert await ending == "released"
    engine.check_integrity()
    assert (engine.status().leases_open, engine.status().leases_waiting) == (2, 0)


@pytest.mark.parametrize("how", ["released", "cancelled"])
async def test_what_nobody_waits_for_is_aborted(vllm: Opener, how: str) -> None:
    engine = vllm()
    await engine.open(request())
    fake(engine).gate = asyncio.Event()
    drafting = asyncio.create_task(engine.draft("a", 0, None, 2))
    await fake(engine).is_asked.wait()
    with pytest.raises(OutOfStep, match="in progress"):
        await engine.draft("a", 0, None, 2)
    if how == "released":
        engine.release("a")
        with pytest.raises(LeaseNotFound):
            await drafting
    else:
        drafting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await drafting
    assert len(fake(engine).aborted) == 1


async def test_a_failure_of_vllm_is_one_of_the_engine(vllm: Opener) -> None:
    engine = vllm()
    await engine.open(request())
    fake(engine).fail = ValueError("no memory at 10.0.0.7")
    with pytest.raises(EngineFailed) as failed:
        await engine.draft("a", 0, None, 2)
    assert "10.0.0.7" not in str(failed.value)
    fake(engine).fail = None
    assert len(await engine.draft("a", 0, None, 2)) == 2
    fake(engine).errored = True
    with pytest.raises(EngineFailed, match="closed"):
        await engine.draft("a", 0, None, 2)
    await engine.until_closed()
    assert fake(engine).is_shut
    assert engine.status().leases_open == 0


@pytest.mark.parametrize("version", [None, "0.29.1"])
def test_a_vllm_that_is_missing_or_old_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str | None
) -> None:
    if version is not None:
        fake_vllm.install(monkeypatch, tmp_path, version=version)
    with pytest.raises(ConfigurationError, match=r"needs vllm 0\.30 or later"):
        open_vllm(CONFIG)


# --- whole requests -----------------------------------------------------------------------------


def drafts_of(vllm: Opener, logits: Any) -> LocalApplication:
    """An application with a scripted target, whose drafter is vLLM's."""

    def load(config: EngineConfig | VllmConfig) -> Any:
        if isinstance(config, VllmConfig):
            return vllm(logits, VOCAB, **config.model_dump(exclude_unset=True))
        return FakeEngine(config)

    drafts = {"kind": "vllm", "model": "embedded:drafter", "max_context": 1024}
    return LocalApplication(drafts=drafts, load=load)


def scripted_logits(seed: int) -> Callable[[Sequence[int]], Any]:
    """The scripted answer, as the next token of any text that ends with one of its tokens."""
    said = script(seed, 24)
    after = dict(itertools.pairwise(said))

    def logits(ids: Sequence[int]) -> Any:
        row = np.zeros(VOCAB)
        row[after.get(ids[-1], said[0])] = 30
        return row

    return logits


async def test_an_answer_is_drafted_by_vllm(vllm: Opener) -> None:
    app = drafts_of(vllm, scripted_logits(5))
    asked = {"mode": "lossless", "documents": ATLAS, "seed": 5, "max_tokens": 12}
    events = await app.answered(question("r", **asked, rapid={"coupling": "maximal"}, explain=True))
    assert tokens(events) == script(5, 12)
    (choice,) = receipt(events).choices
    assert receipt(events).coupling == "maximal"
    assert choice.accepted >= 10


async def test_rag_is_decoded_by_vllm(vllm: Opener) -> None:
    app = drafts_of(vllm, scripted_logits(5))
    asked = {"mode": "rag", "documents": ATLAS, "temperature": 0.0, "max_tokens": 12}
    events = await app.answered(question("r", **asked, top_p=0.5, explain=True))
    assert tokens(events) == script(5, 12)


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"seed": 5}, "rapid.coupling"),
        ({"mode": "rag", "seed": 5}, "rapid.coupling"),
        ({"rapid": {"coupling": "shared_noise"}}, "rapid.coupling"),
        ({"rapid": {"all_draft_tokens": True}}, "rapid.draft_top_k"),
        ({"mode": "paper"}, "rapid.draft_top_k"),
        ({"rapid": {"draft_top_k": 257}}, "rapid.draft_top_k"),
        ({"mode": "rag", "num_logprobs": 2, "top_p": 0.5}, "logprobs"),
        ({"repetition_penalty": 1.1, "penalize_documents": True}, "rapid.mode"),
        ({"bad_words": ("a",)}, "rapid.mode"),
    ],
)
async def test_what_vllm_cannot_do_is_refused_by_name(
    vllm: Opener, asked: dict[str, Any], param: str
) -> None:
    app = drafts_of(vllm, None)
    with pytest.raises(BadRequest) as refused:
        await app.answered(question("r", documents=ATLAS, **asked))
    assert refused.value.param == param
    await app.answered(question("r", documents=ATLAS, max_tokens=2, **asked | {"mode": "plain"}))


@pytest.mark.gpu
async def test_the_real_vllm_tells_what_it_drew_from() -> None:
    pytest.importorskip("vllm")
    model = "Qwen/Qwen2.5-0.5B-Instruct"
    engine = open_vllm(CONFIG.model_copy(update={"model": model, "gpu_memory_share": 0.5}))
    prompt = list(range(100, 130))
    await engine.open(request(prompt=prompt, temperature=0.8, draft_top_k=64))
    await engine.prefill("a")
    block = await engine.draft("a", 0, None, 8)
    assert 1 <= len(block) <= 8
    for row, token in enumerate(block.token_ids):
        assert token in block.candidate_ids[row]
        assert block.candidate_probs[row].sum() == pytest.approx(1, abs=1e-5)
    engine.close()
