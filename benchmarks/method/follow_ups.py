"""Share of follow-up questions, such as "And the fee?", whose evidence retrieval finds.

It is searched for alone, with the questions before it, and rewritten by a small model.

    python -m benchmarks.method.follow_ups [--quick]

Each item is a dialogue about documents; counted is how often retrieval finds all of the evidence
for its last question. On generated documents of 4,000 tokens it leaves out the thing (`same thing`)
or the attribute (`same attribute`), or is `whole` and about something else. On real text it is
`whole`, or asks on about the first one (`go on`). The chats of the task `laptop-dialogue`, whose
long text is the dialogue itself, end with `whole` questions.

`alone` searches for the last question, `joined` for the one before it as well, `short joined` for
both where the last one has at most 12 tokens, `as served` for what `rapid.answering.query` chooses,
and `rewritten` for what SmolLM2-135M, the smallest drafter of the catalogue that writes prose,
makes of it greedily, in 32 tokens at most; with `--quick` it is not asked.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any

import rapid
from benchmarks.reporting import keep, settings, table
from evaluation.items import Item
from evaluation.loaders import generated, real_text
from evaluation.tasks import Source
from rapid.answering.prompting import plan_search
from rapid.answering.query import choose_query, join_earlier
from rapid.chat_messages import Document, Message
from rapid.checkpoints.text import ChatText
from rapid.embedded.generator import GeneratedQuestion, Span, generate_document
from rapid.embedded.wording import STYLES
from rapid.pair import Pair
from retrieval.embedders import make_embedder
from retrieval.retriever import Retriever, open_retriever
from retrieval.settings import RetrievalConfig

DRAFTER = "smollm2-135m"
NUM_DOCUMENTS, REWRITTEN = 40, 10  # of each kind of documents, and items of each kind of question
SHORT = 12  # tokens
TOKENS = {"generated": (64, 320), "real": (96, 384)}  # of a chunk, and of the budget
ASKED = (
    'Somebody asked "{first}" and then "{second}". Write the second question again, so that it can '
    "be understood alone. Reply with that question only."
)


@dataclass(frozen=True)
class Dialogue:
    """Two questions about a document, and where the second one's answer stands."""

    corpus: str
    kind: str
    document: Document
    first: str
    second: str
    evidence: tuple[Span, ...]


def list_generated(number: int) -> Iterator[Dialogue]:
    """Yield the dialogues about generated documents."""
    for kind, style in STYLES.items():
        for index in range(number):
            made = generate_document(f"follow-up {index}", 4000, kind=kind)
            document, rng = Document(made.name, made.text), random.Random(f"{kind} {index}")
            facts = [
                (*found, each)
                for each in made.questions
                if each.kind == "fact" and (found := take_apart(each, style.attributes))
            ]
            rng.shuffle(facts)
            for name in ("same thing", "same attribute", "whole"):
                pairs = (
                    (a, b)
                    for a in facts
                    for b in facts
                    if (a[0] == b[0]) == (name == "same attribute")
                    and (a[1] == b[1]) == (name == "same thing")
                )
                pair = next(pairs, None)
                if pair is not None:
                    (_, _, before), (attribute, thing, after) = pair
                    said = {
                        "same thing": f"And the {attribute}?",
                        "same attribute": f"And {thing}?",
                    }
                    second = said.get(name, after.question)
                    yield Dialogue(
                        "generated", name, document, before.question, second, after.evidence
                    )


def take_apart(question: GeneratedQuestion, attributes: tuple[str, ...]) -> tuple[str, str] | None:
    """Return the attribute and the thing that a question is about."""
    words = re.findall(r"\w+", question.question)
    attribute = next((each for each in attributes if each in words), None)
    thing = next((each for each in words[1:] if each.istitle()), None)
    return (attribute, thing) if attribute and thing else None


def list_real() -> Iterator[Dialogue]:
    """Yield the dialogues about real text, of neighbouring questions on one document."""
    items: list[Item] = list(real_text.load(Source(loader="real_text", split="test"), None))
    for before, after in pairwise(items):
        first, document = before.messages[-1].text, after.document
        if before.document is None or document is None or before.document.name != document.name:
            continue
        if after.evidence:
            second = after.messages[-1].text
            yield Dialogue("real", "whole", document, first, second, after.evidence)
        if before.evidence:
            second = "Can you explain that?"
            yield Dialogue("real", "go on", document, first, second, before.evidence)


def load_dialogues(number: int) -> Iterator[Item]:
    """Yield items of the task `laptop-dialogue`, of its test split."""
    options = {"lengths": {1500: number}, "conversations": 2}
    return generated.load(Source(loader="generated", split="test", options=options), None)


async def finds(retriever: Retriever, dialogue: Dialogue, query: str) -> bool:
    """Return whether all of the evidence is in what a query finds."""
    budget = TOKENS[dialogue.corpus][1]
    found = await retriever.retrieve("t", [dialogue.document], query, budget)
    text = " ".join(" ".join(chunk.text.split()) for chunk in found.chunks)
    whole = dialogue.document.text
    return all(" ".join(whole[start:end].split()) in text for start, end in dialogue.evidence)


def rewrite(pair: Pair, dialogue: Dialogue) -> str:
    """Return the second question as the drafter writes it."""
    asked = ASKED.format(first=dialogue.first, second=dialogue.second)
    said = pair.answer([Message("user", asked)], mode="plain", temperature=0, max_tokens=32).text
    return said.strip().partition("\n")[0].removeprefix("Question:").strip() or dialogue.second


async def measure(options: argparse.Namespace) -> tuple[list[list[object]], float, list[Any]]:
    """Return the shares by kind and way, the seconds of one rewriting, and what was written."""
    number = 2 if options.quick else NUM_DOCUMENTS
    dialogues = [*list_generated(number), *list_real()][: 12 if options.quick else None]
    text = {"generated": ChatText.load("embedded:target")}
    text |= {} if options.quick else {"real": ChatText.load(DRAFTER)}
    hits: defaultdict[tuple[str, str, str], list[bool]] = defaultdict(list)
    seconds, written = list[float](), list[tuple[str, str, str]]()
    retrievers = {
        corpus: await open_retriever(
            (config := RetrievalConfig(chunk_tokens=TOKENS[corpus][0])),
            each.token_offsets,
            make_embedder(config.embedder),
            tokenizer=each.fingerprint,
        )
        for corpus, each in text.items()
    }
    with ExitStack() as opened:
        pair = None if options.quick else opened.enter_context(rapid.open(DRAFTER, drafter=None))
        for each in dialogues:
            search = retrievers[each.corpus]
            alone, both = each.second, f"{each.first} {each.second}"
            told = {"alone": await finds(search, each, alone)}
            told["joined"] = await finds(search, each, both)
            length = text[each.corpus].count_tokens(alone)
            told["short joined"] = told["joined" if length <= SHORT else "alone"]
            chat = [Message("user", each.first), Message("user", each.second)]
            offsets = text[each.corpus].token_offsets
            follows = join_earlier(chat, offsets, budget_tokens=TOKENS[each.corpus][1])
            told["as served"] = told["joined" if follows else "alone"]
            if pair is not None and len(hits[each.corpus, each.kind, "rewritten"]) < REWRITTEN:
                began = perf_counter()
                said = await asyncio.to_thread(rewrite, pair, each)
                written.append((each.first, each.second, said))
                seconds.append(perf_counter() - began)
                told["rewritten"] = await finds(search, each, said)
                hits[each.corpus, each.kind, "the same alone"].append(told["alone"])
                hits[each.corpus, each.kind, "the same joined"].append(told["joined"])
            for way, is_found in told.items():
                hits[each.corpus, each.kind, way].append(is_found)
    for item in load_dialogues(4 if options.quick else 96):
        offsets = text["generated"].token_offsets
        planned = plan_search(
            item.messages,
            (),
            text["generated"],
            budget_tokens=320,
            budget_for=RetrievalConfig().budget_for,
        )
        first, last = [each.text for each in item.messages if each.role == "user"][-2:]
        first = choose_query(first, offsets, budget_tokens=320).text
        both = f"{first} {last}"
        is_short = len(offsets(last)) <= SHORT
        queries = {"alone": last, "joined": both, "as served": planned.query}
        queries["short joined"] = both if is_short else last
        for way, query in queries.items():
            found = await retrievers["generated"].retrieve("t", planned.plan.documents, query, 320)
            shown = " ".join(" ".join(chunk.text.split()) for chunk in found.chunks)
            parts = (part.rstrip(".") for part in item.answers[0].split(". "))
            hits["laptop-dialogue", "whole", way].append(all(part in shown for part in parts))
    rows = [
        [*key, len(found), f"{sum(found) / len(found):.3f}"] for key, found in sorted(hits.items())
    ]
    return rows, sum(seconds) / max(1, len(seconds)), written


def main() -> None:
    """Measure, and keep what was measured unless it was quick."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    rows, seconds, written = asyncio.run(measure(options))
    told = table(["documents", "second question", "searched for", "items", "evidence found"], rows)
    told += f"\nA rewriting took {seconds:.2f} s in the mean.\n"
    report = {"settings": settings(options), "rows": rows, "rewriting_s": seconds}
    report |= {"rewritten": written}
    keep(None if options.quick else "follow_ups", "Follow-up questions", told, report)


if __name__ == "__main__":
    main()
