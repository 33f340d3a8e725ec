"""Speed of `lossless` over plain by length of the context, and of drafts from the text on quotes.

    python -m benchmarks.decoding.flat [--lengths 8192 32768] [--quoting] [--quick]

**Acceptance is given, only costs are measured.** The target has SmolLM2-135M's shape, random
weights in bfloat16, KV that is drawn and answers that are scripts (`engine/filled.py`). The same
model on 2,048 tokens, as if retrieved, drafts: it says the script's token with a probability, drawn
apart for every position, that does not know the length of the context. Controllers of model and
text are a server's and learn from earlier answers; the first pays for trials and stands apart.

found    the drafter is right with probability .8      nothing  no drafter, an answer that is new
missed   the drafter is right with probability .2      quote    no drafter, an answer from the text

`--quoting` has the text alone draft given answers that quote pages of this repository, in tokens
learnt from other text: copied from the first third on, every third sentence behind a dash, copied
with every tenth word replaced, and, to compare, another page; all on one server. The chart takes
about 30 minutes, and 14 GiB at 512K tokens; the quotes 10 minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import time
from itertools import product
from typing import Any

import matplotlib
import numpy as np
import psutil
import torch
import yaml
from tokenizers import ByteLevelBPETokenizer

from benchmarks.decoding.decoding_arms import Run, scripts
from benchmarks.engine.filled import SMOLLM2_SHAPE, FilledEngine, Model, random_model
from benchmarks.reporting import RESULTS, ROOT, keep, settings, shown, spread, table
from evaluation.texts.text_questions import document_names, document_text
from rapid.engines.local_ports import EngineDrafter, EngineVerifier
from rapid.speculation.lookup import PromptIndex, PromptLookupDrafter
from rapid.speculation.loop import speculate
from rapid.speculation.pace.controller import Controller
from rapid.speculation.pace.copying import TextController
from rapid.speculation.pace.round_costs import RoundCosts
from rapid.speculation.relay import Relay

matplotlib.use("Agg")

from matplotlib import pyplot

VOCAB, MAX_DRAFT, RETRIEVED = 49_152, 10, 2048  # SmolLM2's words; a server's drafts; tokens
LENGTHS = [8_192, 32_768, 131_072, 524_288]
PLAIN = "plain"
PAGES = ("README.md", "LICENSE", "docs/algorithm.md", "docs/operations.md")
PAGE_CHARACTERS = 16_000  # of a page that are read, about 5,000 tokens
LINES = {"found": "-", "quote": "-.", "missed": "--", "nothing": ":"}
ROUND, CPU = "tokens a drafted round", "speed by processor time"
REPORTED = ROOT / "benchmarks/decoding/reported_drafters.yaml"
SVG = ROOT / "docs/pictures/flat.svg"
COLOURS = {"EAGLE-3": "#E69F00", "DFlash": "#0072B2", "DSpark": "#009E73"}
Script = tuple[list[int], list[int] | None]  # an answer, and what a drafter says instead
Costs = tuple[RoundCosts, RoundCosts]  # of the text's rounds, and of the drafter's
Rows = list[dict[str, Any]]


class Answers:
    """A target and its drafter, which give scripted answers on one prompt."""

    def __init__(self, model: Model, prompt: list[int], num_tokens: int) -> None:
        self._length, self._num_tokens = len(prompt), num_tokens
        self.room = num_tokens + 2 * MAX_DRAFT
        room: dict[str, Any] = {"room": self.room, "max_draft": MAX_DRAFT}
        self._target = FilledEngine(model.ours, len(prompt), **room)
        self._target.prompts = np.array([prompt])
        self._drafter = FilledEngine(model.ours, min(RETRIEVED, len(prompt) // 2), **room)
        self._index = PromptIndex(prompt)

    def _relay(self, costs: Costs, *, with_drafter: bool) -> Relay:
        """Return who drafts, as `rapid.answering.rounds` puts it together."""
        text, limits = PromptLookupDrafter(self._index), (self._length, MAX_DRAFT)
        # Processor time of both engines, which other work on the machine disturbs least.
        own: dict[str, Any] = {"num_left": self._num_tokens, "clock": time.process_time}
        by_text = TextController(costs[0], *limits, lambda: text.longest, **own)
        if not with_drafter:
            return Relay(text, by_text)
        drafter = EngineDrafter(self._drafter.engine, "0")
        pace = Controller(costs[1], *limits, can_rest=True, **own)
        return Relay(text, by_text, drafter, pace)

    async def _answer(self, relay: Relay | None) -> Run:
        """Answer as a server does in `lossless`, or plainly without a relay."""
        await self._target.rewind()
        await self._drafter.rewind()
        verifier, count = EngineVerifier(self._target.engine, "0"), self._num_tokens
        began, used = time.perf_counter(), time.process_time()
        rounds = speculate(relay, verifier, max_tokens=count, max_draft=MAX_DRAFT, pace=relay)
        verdicts = [verdict async for verdict in rounds]
        ms, cpu_ms = 1e3 * (time.perf_counter() - began), 1e3 * (time.process_time() - used)
        token_ids = [token for verdict in verdicts for token in verdict.token_ids]
        return Run(ms / count, cpu_ms / count, token_ids, verdicts)

    async def compare(self, kinds: dict[str, Script], costs: dict[str, Costs], count: int) -> Rows:
        """Return a row for every kind, of `count` answers beside plain ones."""
        runs: dict[str, list[Run]] = {kind: [] for kind in kinds}
        try:
            await self._target.open()
            await self._drafter.open()
            for _, (kind, (script, drafted)) in product(range(count + 1), kinds.items()):
                self._target.script(script)
                self._drafter.script(drafted or script)
                by = None if kind == PLAIN else self._relay(costs[kind], with_drafter=bool(drafted))
                runs[kind].append(await self._answer(by))
                assert runs[kind][-1].token_ids == script[: self._num_tokens], kind
        finally:
            self._target.close()
            self._drafter.close()
        plain = runs.pop(PLAIN)
        return [{"tokens": self._length} | row_of(kind, each, plain) for kind, each in runs.items()]


def row_of(kind: str, runs: list[Run], plain: list[Run]) -> dict[str, Any]:
    """Return speeds over plain, by neighbours in time, and what drafted rounds brought."""
    drafted = [verdict for run in runs[1:] for verdict in run.verdicts if verdict.num_drafted]
    tokens = [len(verdict.token_ids) for verdict in drafted]
    took = [verdict.draft_ms for verdict in drafted]
    speeds = [a.ms / b.ms for a, b in zip(plain, runs, strict=True)]
    by_cpu = [a.cpu_ms / b.cpu_ms for a, b in zip(plain, runs, strict=True)]
    return {
        "answer": kind,
        "plain, ms": spread([run.ms for run in plain[1:]], 1),
        "speed": spread(speeds[1:]),
        CPU: spread(by_cpu[1:]),
        "first answer": round(speeds[0], 2),
        ROUND: round(statistics.mean(tokens), 2) if tokens else None,
        "share of tokens": round(sum(tokens) / sum(len(run.token_ids) for run in runs[1:]), 2),
        "ms a block, 95 %": round(float(np.quantile(took or [0], 0.95)), 3),
    }


async def at_length(model: Model, length: int, repeats: int) -> Rows:
    """Measure every kind of answer at this length; none if there is no memory for it."""
    if length * model.ours.kv_layout.bytes_per_token > 0.8 * psutil.virtual_memory().available:
        print(f"no memory for {length} tokens")
        return []
    prompt = np.random.default_rng(0).integers(10, VOCAB, length).tolist()
    answers = Answers(model, prompt, 48 if length <= 32_768 else 16)
    new, found = scripts(answers.room, VOCAB, 0.8)
    kinds: dict[str, Script] = {PLAIN: (new, None), "found": (new, found)}
    kinds["missed"] = scripts(answers.room, VOCAB, 0.2)
    kinds["nothing"] = new, None
    kinds["quote"] = prompt[length // 2 :][: answers.room], None
    costs = {kind: (RoundCosts(), RoundCosts()) for kind in kinds}
    return await answers.compare(kinds, costs, repeats)


async def on_page(model: Model, page: str, other: str, costs: Costs, repeats: int) -> Rows:
    """Measure answers that quote a page, or say what is on another one, drafted by the text."""
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(map(document_text, document_names()), VOCAB, show_progress=False)
    text, new = ((ROOT / each).read_text()[:PAGE_CHARACTERS] for each in (page, other))
    answers = Answers(model, tokenizer.encode(text).ids, 96)
    copied = text[len(text) // 3 :]
    words = re.split(r"(\s+)", copied)  # with what is between them
    words[18::20] = new.split()[: len(words[18::20])]
    sentences = re.split(r"(?<=[.!?])\s+|\n\n", text)[1::3]
    extracted = "".join(f"\n- {sentence}" for sentence in sentences)
    written = {PLAIN: copied, "copy": copied, "extract": extracted, "rewrite": "".join(words)}
    written["other text"] = new[len(new) // 3 :]
    kinds: dict[str, Script] = {
        kind: (tokenizer.encode(said).ids[: answers.room], None) for kind, said in written.items()
    }
    return await answers.compare(kinds, dict.fromkeys(kinds, costs), repeats)


def table_of(rows: Rows) -> str:
    """Return a Markdown table of the rows."""
    told = [[shown(of) if isinstance(of, dict) else of for of in row.values()] for row in rows]
    return table(list(rows[0]), told)


def draw(rows: Rows, path: str) -> None:
    """Draw tokens a round and speed over plain against context, ours in black."""
    reported = yaml.safe_load(REPORTED.read_text())
    with matplotlib.rc_context({"svg.hashsalt": "rapid", "svg.fonttype": "none", "font.size": 9}):
        figure, axes = pyplot.subplots(1, 2, figsize=(10, 5), layout="constrained")
        for axis, (title, series) in zip(axes, reported.items(), strict=True):
            is_speed = axis is axes[1]
            for kind, line in LINES.items() if is_speed else [("found", "-")]:
                ours = [row for row in rows if row["answer"] == kind]
                if not is_speed:  # where it rests, what trials bring says nothing
                    ours = [row for row in ours if row["share of tokens"] > 0.5]
                ys = [row[CPU]["median"] if is_speed else row[ROUND] for row in ours]
                xs = [row["tokens"] for row in ours]
                label = f"ours, {kind}" + ", acceptance given" * (not is_speed)
                axis.plot(xs, ys, line, color="black", marker="o", markersize=4, label=label)
            for one, mark in zip(series, "sD^vPX", strict=False):
                label, colour = f"{one['drafter']}: {one['of']}", COLOURS[one["drafter"]]
                xs, ys = zip(*one["points"], strict=True)
                axis.plot(xs, ys, marker=mark, color=colour, markersize=4, lw=1, label=label)
            axis.set(xscale="log", xlabel="tokens of context", title=title)
            axis.set_xticks([1_024, *LENGTHS], ["1K", "8K", "32K", "128K", "512K"])
            axis.minorticks_off()
            axis.legend(frameon=False, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.15))
        axes[1].axhline(1, color="grey", linewidth=0.5)
        figure.savefig(path, format="svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--quoting", action="store_true", help="answers that quote, no chart")
    parser.add_argument("--repeats", type=int, default=3, help="of each answer, after a first one")
    parser.add_argument("--quick", action="store_true", help="little of both, nothing kept")
    options = parser.parse_args()
    is_quick, repeats = options.quick, 1 if options.quick else options.repeats
    torch.set_num_threads(1)  # for this thread, which only waits
    shape = SMOLLM2_SHAPE | ({"num_layers": 2} if is_quick else {})
    model = random_model("bfloat16", vocab_size=VOCAB, **shape)
    report: dict[str, Any] = {"settings": settings(options), "rows": []}
    if options.quoting or is_quick:
        shared = RoundCosts(), RoundCosts()
        for place, page in enumerate(PAGES[:1] if is_quick else PAGES):
            other = PAGES[(place + 1) % len(PAGES)]
            rows = asyncio.run(on_page(model, page, other, shared, repeats))
            report["rows"] += [{"page": page} | row for row in rows]
            name, title = "flat-quotes", "Answers that quote, drafted by the text alone, over plain"
            keep(None if is_quick else name, title, table_of(report["rows"]), report)
    kept = RESULTS / "flat.json"
    for length in [2048] if is_quick else [] if options.quoting else options.lengths:
        rows = asyncio.run(at_length(model, length, repeats))
        if kept.exists() and not is_quick:  # other lengths stay
            rows += [row for row in json.loads(kept.read_text())["rows"] if row["tokens"] != length]
        report["rows"] = sorted(rows, key=lambda row: int(row["tokens"]))
        draw(report["rows"], os.devnull if is_quick else str(SVG))
        name, title = "flat", "`lossless` over plain by length, acceptance given"
        keep(None if is_quick else name, title, table_of(report["rows"]), report)


if __name__ == "__main__":
    main()
