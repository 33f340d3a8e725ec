"""How often the embedded models are right, by document length and kind of question.

    .venv/bin/python benchmarks/embedded_accuracy.py

Greedy, through the public API. An answer counts when all of it is right, to the last character.
The questions are of documents that no training has seen (other seeds). Writes
`results/embedded-accuracy.json` and `.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

import rapid
from evaluation.circumstances import circumstances
from rapid.embedded import DRAFTER, TARGET
from rapid.embedded.generator import GeneratedDocument, Question, generate_document
from rapid.messages import Document, Message
from rapid.prompts import drafter_messages, plan_drafter_chat, target_messages
from retrieval import RetrievedContext, retrieve_context

RESULTS = Path(__file__).parent / "results"
KINDS = ("fact", "recite", "list")
SYSTEMS = ("target", "drafter", "lossless", "fused")
MEANING = {
    "target": "the target alone on the whole document",
    "drafter": "the drafter alone on the retrieved chunks",
    "lossless": "speculation with the target's own distribution",
    "fused": "speculation with the fused distribution",
}


@dataclass(frozen=True)
class Item:
    """One question and what became of it."""

    length: int
    kind: str
    retrieved: bool
    """All of the evidence is among the chunks."""
    right: dict[str, bool]
    accepted: dict[str, tuple[int, int]]
    """Accepted and drafted tokens of the systems that speculate."""


@dataclass(frozen=True)
class Chunk:
    document: str
    text: str


def questions(length: int, count: int, seed: str) -> Iterator[tuple[GeneratedDocument, Question]]:
    """Yield `count` questions of every kind, no two of one kind about the same document."""
    for kind in KINDS:
        found = number = 0
        while found < count:
            document = generate_document(f"{seed} {kind} {length} {number}", length)
            number += 1
            question = next((q for q in document.questions if q.kind == kind), None)
            if question is not None:
                found += 1
                yield document, question


def prompts(
    tokenizer, document: GeneratedDocument, question: Question, options: argparse.Namespace
) -> tuple[list[int], list[int], RetrievedContext]:
    """Return the ids that the target reads, those that the drafter reads, and what was found."""
    chat = [Message("user", question.question)]
    attached = [Document(document.name, document.text)]
    plan = plan_drafter_chat(
        chat,
        attached,
        budget_tokens=options.budget_tokens,
        count_tokens=lambda text: len(tokenizer.encode(text)),
    )
    context = retrieve_context(
        document.text,
        plan.question,
        tokenizer=tokenizer,
        budget_tokens=options.budget_tokens,
        chunk_tokens=options.chunk_tokens,
    )
    chunks = [Chunk(document.name, chunk.text) for chunk in context.chunks]
    ids = [
        tokenizer.apply_chat_template(
            [asdict(message) for message in messages], add_generation_prompt=True
        )["input_ids"]
        for messages in (target_messages(chat, attached), drafter_messages(plan, chunks))
    ]
    return ids[0], ids[1], context


def ask(
    target, drafter, document: GeneratedDocument, question: Question, options: argparse.Namespace
) -> Item:
    long, short, context = prompts(target.tokenizer, document, question, options)
    common = {"temperature": 0.0, "max_tokens": options.max_tokens, "seed": 1}
    answers = {
        "target": rapid.generate(target, None, long, **common),
        "drafter": rapid.generate(drafter, None, short, **common),
        "lossless": rapid.generate(target, drafter, long, short, eta=0.0, **common),
        "fused": rapid.generate(
            target, drafter, long, short, eta=options.eta, transfer=options.transfer, **common
        ),
    }
    decode = target.tokenizer.decode
    found = " ".join(context.text.split())
    return Item(
        length=options.length,
        kind=question.kind,
        retrieved=all(document.text[start:end] in found for start, end in question.evidence),
        right={
            name: decode(answer.token_ids, skip_special_tokens=True) == question.answer
            for name, answer in answers.items()
        },
        accepted={
            name: (answers[name].statistics.accepted, answers[name].statistics.drafted)
            for name in ("lossless", "fused")
        },
    )


def interval(outcomes: Sequence[bool], *, resamples: int = 2000) -> tuple[float, float]:
    """95 % of the bootstrap over items."""
    rng = random.Random(0)
    means = sorted(fmean(rng.choices(outcomes, k=len(outcomes))) for _ in range(resamples))
    return means[int(0.025 * resamples)], means[int(0.975 * resamples) - 1]


def summary(items: Sequence[Item]) -> dict[str, object]:
    row: dict[str, object] = {
        "items": len(items),
        "evidence_retrieved": fmean(item.retrieved for item in items),
    }
    for system in SYSTEMS:
        outcomes = [item.right[system] for item in items]
        low, high = interval(outcomes)
        row[system] = {"right": fmean(outcomes), "low": low, "high": high}
    for system in ("lossless", "fused"):
        accepted, drafted = map(sum, zip(*(i.accepted[system] for i in items), strict=True))
        row[f"{system}_acceptance_rate"] = accepted / max(1, drafted)
    return row


def table(rows: Sequence[dict]) -> str:
    lines = [
        "| document tokens | questions | items | evidence retrieved | target alone | "
        "drafter on chunks | `lossless` | `fused` | drafts accepted, lossless / fused |",
        "| --- " * 9 + "|",
    ]
    for row in rows:
        cells = [str(row["length"]), row["kind"], str(row["items"])]
        cells.append(f"{row['evidence_retrieved']:.2f}")
        for system in SYSTEMS:
            cell = row[system]
            cells.append(f"{cell['right']:.2f} ({cell['low']:.2f}-{cell['high']:.2f})")
        rates = [f"{row[f'{s}_acceptance_rate']:.2f}" for s in ("lossless", "fused")]
        cells.append(" / ".join(rates))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def crossings(items: Sequence[Item]) -> str:
    """Say who is right where the other is wrong: what fusing has to work with."""
    lines = [
        "| target alone | drafter on chunks | items | `fused` right |",
        "| --- | --- | --- | --- |",
    ]
    for target in (True, False):
        for drafter in (True, False):
            chosen = [
                i for i in items if i.right["target"] == target and i.right["drafter"] == drafter
            ]
            words = ["right" if each else "wrong" for each in (target, drafter)]
            share = f"{fmean(i.right['fused'] for i in chosen):.2f}" if chosen else "-"
            lines.append(f"| {words[0]} | {words[1]} | {len(chosen)} | {share} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--target", default=str(TARGET))
    parser.add_argument("--drafter", default=str(DRAFTER))
    parser.add_argument("--lengths", type=int, nargs="+", default=[500, 1000, 1500, 2500])
    parser.add_argument("--items", type=int, default=24, help="of each kind and length")
    parser.add_argument("--budget-tokens", type=int, default=320)
    parser.add_argument("--chunk-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--eta", type=float, default=10.0)
    parser.add_argument("--transfer", default="boost", choices=("boost", "distill"))
    parser.add_argument("--seed", default="held out")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    target, drafter = rapid.load(options.target), rapid.load(options.drafter)
    items: list[Item] = []
    rows: list[dict] = []
    began = time.monotonic()
    for length in options.lengths:
        options.length = length
        for document, question in questions(length, options.items, options.seed):
            items.append(ask(target, drafter, document, question, options))
        here = [item for item in items if item.length == length]
        for kind in (*KINDS, "all"):
            chosen = [item for item in here if kind in (item.kind, "all")]
            rows.append({"length": length, "kind": kind, **summary(chosen)})
        sys.stdout.write(table(rows[-4:]))
        sys.stdout.flush()
    rows.sort(key=lambda row: row["length"])  # stable: the kinds keep their order
    settings = {
        name: getattr(options, name)
        for name in ("items", "budget_tokens", "chunk_tokens", "eta", "transfer", "seed")
    }
    different = sum(item.right["target"] != item.right["lossless"] for item in items)
    report = {
        "settings": settings,
        **circumstances(),
        "torch": torch.__version__,
        "seconds": round(time.monotonic() - began, 1),
        "lossless_differs_from_target": different,
        "rows": rows,
        "items": [asdict(item) for item in items],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "embedded-accuracy.json").write_text(json.dumps(report, indent=1) + "\n")
    told = "\n".join(f"- {name}: {MEANING[name]}" for name in SYSTEMS)
    text = (
        "# Accuracy of the embedded models\n\n"
        f"Whole answers right, greedy; 95 % bootstrap intervals over items. {settings}\n\n"
        f"{told}\n\n{table(rows)}\n"
        f"Where the two differ, all lengths and kinds together:\n\n{crossings(items)}\n"
        f"Items on which `lossless` and the target alone disagree: {different} of {len(items)}.\n"
    )
    (options.out / "embedded-accuracy.md").write_text(text)
    sys.stdout.write(crossings(items))


if __name__ == "__main__":
    main()
