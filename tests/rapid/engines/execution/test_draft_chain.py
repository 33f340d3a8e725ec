"""Drafts fed on the device: the blocks of one forward at a time, read once, and interrupted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from rapid.config import SamplingConfig, SpeculationConfig, WindowDrafting
from rapid.engines.attention.batch import Feed
from rapid.engines.engine import Engine
from rapid.engines.execution import draft_chain
from rapid.engines.execution.draft_chain import count_forwards
from rapid.engines.kv.cache import PageRun, PageTable
from rapid.engines.kv.sequences import Gap
from rapid.messages import DraftBlock, LeaseRequest, Verdict
from rapid.speculation.draw import Draw
from rapid.speculation.fast.step import DrawnDrafts, draw_drafts, draw_together
from rapid.speculation.questions import ToPropose
from tests.rapid.engines.gate import EXPECTED, Gate, opened
from tests.rapid.engines.test_sliding_engine import engine_of
from tests.rapid.tiny_models import lease_request, random_prompt, tiny_engine

DrawDrafts = Callable[[Sequence[ToPropose]], DrawnDrafts]


class Reads:
    """Draws as on a device, with the kernels in the interpreter, and counts what is read."""

    def __init__(self, draw: DrawDrafts = draw_together) -> None:
        self.draw = draw
        self.sizes: list[int] = []

    def use(self, monkeypatch: pytest.MonkeyPatch) -> Reads:
        read = draft_chain.read_drafts

        def count(drawn: Sequence[DrawnDrafts]) -> Any:
            self.sizes.append(len(drawn))
            return read(drawn)

        monkeypatch.setattr(draft_chain, "draw_drafts", torch.inference_mode()(self.draw))
        monkeypatch.setattr(draft_chain, "read_drafts", count)
        monkeypatch.setattr(draft_chain, "_is_known_to_end", lambda *_: False)
        return self


def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rapid.engines.execution.compute.count_forwards", lambda _: 1)


def told(block: DraftBlock) -> tuple[Any, ...]:
    return (
        block.choice, block.position, block.token_ids.tolist(),
        block.candidate_ids.tolist(), block.candidate_probs.tolist(),
    )  # fmt: skip


LOSSLESS = SpeculationConfig(eta=0.0)
WAYS = {
    "greedy": (SamplingConfig(temperature=0.0), LOSSLESS),
    "sampled": (SamplingConfig(seed=3), LOSSLESS),
    "filtered": (SamplingConfig(temperature=0.7, top_p=0.9, top_k=20, seed=4), LOSSLESS),
    "shared": (
        SamplingConfig(temperature=1.3, seed=-5),
        SpeculationConfig(coupling="shared_noise", draft_top_k=8),
    ),
    "uncut": (SamplingConfig(seed=6), SpeculationConfig(draft_top_k=None)),
}


def request(
    name: str, sampling: SamplingConfig, speculation: SpeculationConfig, seed: int = 2
) -> LeaseRequest:
    asked = lease_request(name, random_prompt(40, seed=seed))
    return replace(asked, terms=replace(asked.terms, sampling=sampling, speculation=speculation))


async def draft_blocks(engine: Engine, window: WindowDrafting | None) -> list[tuple[Any, ...]]:
    """Blocks of several lengths of leases of all settings at once, half of them half accepted."""

    async def ask(name: str, number: int) -> list[tuple[Any, ...]]:
        blocks: list[DraftBlock] = []
        verdict = None
        for length in (3 + number % 2, 5, 1, 4):
            block = await (
                engine.draft(name, 0, verdict, length)
                if window is None
                else engine.draft_in_window(name, 0, window, length)
            )
            blocks.append(block)
            kept = len(block) if length % 2 else len(block) // 2
            token_ids = (*block.token_ids.tolist()[:kept], *([] if kept == len(block) else [9]))
            verdict = Verdict(name, 0, block.position, token_ids, len(block), kept, False)
            if window is not None:
                await engine.commit(name, verdict)
        return [told(block) for block in blocks]

    for number, (name, way) in enumerate(WAYS.items()):
        await engine.open(request(name, *way, seed=number))
        await engine.prefill(name)
    found = await asyncio.gather(*(ask(name, number) for number, name in enumerate(WAYS)))
    return [block for blocks in found for block in blocks]


@pytest.mark.parametrize("kind", ["ahead", "pages", "rings", "window"])
async def test_blocks_are_those_of_one_forward_at_a_time(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chain's tokens never come to the host before the block is whole."""
    monkeypatch.setattr(Gap, "num_steps", lambda *_, at_most: at_most)
    window = WindowDrafting(num_sinks=2, window=9) if kind == "window" else None

    def engine() -> Engine:
        if kind == "rings":
            return engine_of("mistral", max_leases=5)
        return tiny_engine(max_leases=8, draft_ahead=kind == "ahead", deterministic=kind == "ahead")

    async def ask() -> list[tuple[Any, ...]]:
        asked = engine()
        try:
            return await draft_blocks(asked, window)
        finally:
            asked.close()
            asked.check_integrity()

    with monkeypatch.context() as patch:
        one_by_one(patch)
        expected = await ask()
    reads = Reads().use(monkeypatch)
    found = await ask()
    assert max(reads.sizes) > 1
    for one, other in zip(found, expected, strict=True):
        assert one[:3] == other[:3]
        if kind == "ahead":  # which forwards share rows moves float32 logits elsewhere
            assert one == other


async def test_a_block_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(draft_ahead=False)
    await opened(engine)
    reads, gate = Reads().use(monkeypatch), Gate(engine)
    gate.open()
    block = await engine.draft("a", 0, None, 6)
    assert block.token_ids.tolist() == EXPECTED
    assert (reads.sizes, len(gate.feeds)) == ([6], 6)
    assert all(feed.drawn is not None for (feed,) in gate.feeds[1:])
    engine.close()


async def test_nothing_is_drafted_behind_the_end_where_the_tokens_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a CPU; on a device the rows behind it are computed and dropped."""
    eos = EXPECTED[2]
    for reads, num_forwards in ((None, 3), (Reads(), 6)):
        if reads is not None:
            reads.use(monkeypatch)
        engine = tiny_engine(eos=eos, draft_ahead=False)
        await opened(engine)
        gate = Gate(engine)
        gate.open()
        assert (await engine.draft("a", 0, None, 6)).token_ids.tolist() == EXPECTED[:3]
        assert len(gate.feeds) == num_forwards
        other = Verdict("a", 0, 0, (*EXPECTED[:2], 9), 3, 2, False)
        again = await engine.draft("a", 0, other, 2)
        assert (again.position, len(again)) == (3, 2)
        engine.close()


async def test_a_token_that_differs_from_the_fed_one_ends_the_chain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where two candidates are closer than a rounding: the host's token counts."""

    def draw_wrong(questions: Sequence[ToPropose]) -> DrawnDrafts:
        drawn = draw_drafts(questions)
        return DrawnDrafts((drawn.tokens + 1) % 50, drawn.parts, drawn.receive)

    reads = Reads(draw_wrong).use(monkeypatch)
    engine = tiny_engine(draft_ahead=False)
    await opened(engine)
    block = await engine.draft("a", 0, None, 6)
    assert block.token_ids.tolist() == EXPECTED
    assert reads.sizes == [6, 5, 4, 3, 2]
    assert (await engine.decode("a", 0, 6)).token_ids == tuple(EXPECTED)
    engine.close()


async def test_a_call_waits_for_the_forward_in_progress_alone(engine: Engine) -> None:
    """What was drafted so far is kept, and the block goes on beside the other call."""
    await opened(engine)
    await opened(engine, "b")
    gate = Gate(engine)
    drafting = asyncio.ensure_future(engine.draft("a", 0, None, 6))
    await gate.forward_started()
    gate.let_one_through()
    await gate.forward_started()
    decoding = asyncio.ensure_future(engine.decode("b", 0, 2))
    await asyncio.sleep(0)
    gate.open()
    assert (await decoding).token_ids == tuple(EXPECTED[:2])
    assert (await drafting).token_ids.tolist() == EXPECTED
    assert [len(feeds) for feeds in gate.feeds[:4]] == [1, 1, 2, 2]


@pytest.mark.parametrize(
    "way",
    [
        (SamplingConfig(), SpeculationConfig(rule="paper", eta=5.0)),
        (SamplingConfig(logit_bias=((3, 1.0),)), LOSSLESS),
    ],
)
async def test_what_the_host_must_look_at_is_drafted_one_by_one(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    way: tuple[SamplingConfig, SpeculationConfig],
) -> None:
    """Whether a block ends, by the rule `paper`; and logits that follow the tokens before."""
    counted: list[int] = []

    def count(scheduled: Any) -> int:
        counted.append(count_forwards(scheduled))
        return counted[-1]

    await engine.open(request("a", *way))
    await engine.prefill("a")
    monkeypatch.setattr("rapid.engines.execution.compute.count_forwards", count)
    await engine.draft("a", 0, None, 3)
    assert set(counted) == {1}


class _Short:
    """Drafting of a few tokens."""

    _eos_ids = frozenset[int]()

    def __init__(self, num_left: int) -> None:
        self.num_left = num_left

    def ask_after(self, num_more: int, logits: torch.Tensor) -> ToPropose:
        return ToPropose(logits[0], Draw(SamplingConfig(), LOSSLESS, 0, num_more))

    def follow(self, feed: Feed, token: torch.Tensor) -> Feed:
        return replace(feed, drawn=token)


def test_work_that_has_drafted_enough_has_no_rows_in_the_rest_of_a_chain() -> None:
    fed: list[list[float]] = []

    def run(scheduled: Any) -> list[torch.Tensor]:
        fed.append([feed.position for _, feed in scheduled])
        return [torch.randn(1, 20) for _ in scheduled]

    table = PageTable([PageRun(0, 4)], 4)
    scheduled: Any = [(_Short(n), Feed([1], n, table, 1)) for n in (4, 2, 3)]
    forwards = draft_chain.run_chain(scheduled, 4, run, lambda: False)
    assert fed == [[4, 2, 3], [4, 2, 3], [4, 3], [4]]
    assert [len(forward.answers or ()) for forward in forwards] == [3, 3, 2, 1]
