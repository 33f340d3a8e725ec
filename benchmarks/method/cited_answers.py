"""Precision and recall of citations by kind of evidence, on generated documents or on real text.

    python -m benchmarks.method.cited_answers [--items 120] [--text]

Half of the items choose the thresholds (`rapid.citing.copies.CitingRule`), the other half judges.
An item is a document of 1,000 tokens, a question, and five answers, whose sources are known:

* `model`: the embedded target's, fused. A statement that is no sentence of the document is from
  nowhere.
* `short`: the values alone that the right answer consists of.
* `reworded`: the words of the right answer, in another order.
* `foreign`, `foreign short`: the arbitrary answer to a question that the document does not answer.

With `--text` sixty questions on documentation and licences judge the thresholds as they are. Both
models are SmolLM2-135M, which answers from what is retrieved; a statement of it that has the right
answer is from the evidence. `quoted` is the evidence itself, `foreign` that of another document.

Right is a citation of `copied` that overlaps the sentence which the statement is from; one of
`needed` or `present`, if the passage overlaps it, and one is missing where a passage holds all of
it. `copied` is judged on all answers but `reworded`. `needed` is judged on all statements, also
where they are copied; what is missing is counted for `model` and `quoted` alone, as the embedded
drafter knows no other wording. `present` is judged on all but `model` and `short`, as if nothing
else was found. The drafter's rows are counted for `model`: those of its prompt and of one reading
of the answer, and those of the masks where something is not copied, as a server measures, and
everywhere.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, product
from typing import Any

import numpy as np

import rapid
from benchmarks.reporting import keep, settings, table
from evaluation.items import Item
from evaluation.loaders import real_text
from evaluation.loaders.generated import load
from evaluation.tasks import Source
from evaluation.texts.text_questions import holds
from rapid.answering.citing import CompleteAnswer
from rapid.answering.prompting import DrafterPrompt, RequestPrompts
from rapid.checkpoints.text import ChatText
from rapid.citing.copies import CitingRule, Claim, find_claims, find_copies, find_near, find_overlap
from rapid.citing.words import is_content, words
from rapid.config import EngineConfig, SamplingConfig, SpeculationConfig
from rapid.embedded.generator import GeneratedDocument, absent_questions
from rapid.engines.engine import Engine
from rapid.engines.forward.loading import load_model
from rapid.engines.local_ports import make_engine
from rapid.messages import Float32Array, GenerateRequest, LeaseRequest, Terms
from rapid.ports import Passage
from retrieval import RetrievalConfig, open_retriever

TOKENS = 1000  # of a generated document
REAL_MODEL = "smollm2-135m"
RETRIEVAL = RetrievalConfig(chunk_tokens=64, budget_tokens=320)  # as `rapid.open` has it


@dataclass(frozen=True)
class Told:
    """An answer to an item, with the drafter's scores, whole and without each passage.

    `sources` are the places of its statements in the document, in order; None is nowhere.
    """

    item: Item
    kind: str
    question: str
    text: str
    sources: list[tuple[int, int] | None]
    passages: Sequence[Passage]
    complete: CompleteAnswer
    scores: Float32Array
    num_prompt: int

    @property
    def claims(self) -> list[Claim]:
        """The statements, without any citation."""
        return find_claims(0, self.text, self.question)


Answer = tuple[str, str, list[str], list[Any]]
"""A question, the kind of the answer, its statements, and the places that these are from."""


def split(model: str) -> list[str]:
    """Return the statements of a model's answer."""
    return [model[claim.start : claim.stop] for claim in find_claims(0, model, "")]


def places_of(
    claims: Sequence[Claim],
    answer: str,
    statements: Sequence[str],
    sources: Sequence[tuple[int, int] | None],
) -> list[tuple[int, int] | None]:
    """Return where each claim of an answer is from; claims may cut its statements elsewhere."""
    texts = [answer[claim.start : claim.stop] for claim in claims]
    both = list(zip(statements, sources, strict=True))
    return [next((at for own, at in both if text in own or own in text), None) for text in texts]


def answer_generated(item: Item, model: str, _: Item) -> Iterator[Answer]:
    """Yield the answers to a question on a generated document."""
    assert item.document is not None
    text, rng = item.document.text, random.Random(item.id)
    own, told = [text[start:stop] for start, stop in item.evidence], split(model)
    places = [(at, at + len(each)) if (at := text.find(each)) >= 0 else None for each in told]
    asked = item.messages[-1].text
    yield asked, "model", told, places
    yield asked, "short", [shorten(each) for each in own], list(item.evidence)
    yield asked, "reworded", [reword(each, rng) for each in own], list(item.evidence)
    document = GeneratedDocument(item.document.name, text, (), item.groups["document"])  # type: ignore[arg-type]
    (absent,) = absent_questions(item.id, document, 1)
    foreign = [absent.answer[c.start : c.stop] for c in find_claims(0, absent.answer, "")]
    yield absent.question, "foreign", foreign, [None] * len(foreign)
    short = [shorten(each) for each in foreign]
    yield absent.question, "foreign short", short, [None] * len(foreign)


def answer_real(item: Item, model: str, other: Item) -> Iterator[Answer]:
    """Yield the answers to a question on real text; `other` is about another document."""
    assert item.document is not None
    assert other.document is not None
    asked, (place, *_), rng = item.messages[-1].text, item.evidence, random.Random(item.id)
    own, foreign = item.document.text[slice(*place)], other.document.text[slice(*other.evidence[0])]
    told = split(model)
    yield asked, "model", told, [place if holds_answer(each, item) else None for each in told]
    right, strange = (f"{each.answers[0]}.".replace("\n", ", ") for each in (item, other))
    for kind, answer, source in (
        ("quoted", own, place),
        ("reworded", reword(own, rng), place),
        ("short", right, place),
        ("foreign", foreign, None),
        ("foreign short", strange, None),
    ):
        told = split(" ".join(answer.split()))
        yield asked, kind, told, [source] * len(told)


def holds_answer(statement: str, item: Item) -> bool:
    """Return whether a statement has all parts of a right answer."""
    answers = [each.split("\n") for each in item.answers]
    return any(all(holds(statement, part) for part in parts) for parts in answers)


def shorten(sentence: str) -> str:
    """Return the last three words of a sentence, which hold its value."""
    return " ".join(sentence.rstrip(".").split()[-3:]) + "."


def reword(sentence: str, rng: random.Random) -> str:
    """Return the words of a sentence that say something, in another order."""
    content = [word.text for word in words(sentence) if is_content(word.text)]
    return " ".join(rng.sample(content, len(content))) + "."


async def score(
    engine: Engine, number: int, found: DrafterPrompt, text: ChatText, token_ids: Sequence[int]
) -> Float32Array:
    """Return what tokens are worth with all and without each passage [1 + passages, tokens]."""
    prompt, name = found.prompt_ids, str(number)
    spans = text.find_tokens(prompt.tolist(), [each.text.strip() for each in found.chunks])
    masks = [(0, 0), *spans]
    sampling, speculation = SamplingConfig(seed=0), SpeculationConfig()
    terms = Terms("local", sampling, speculation, len(token_ids), num_choices=len(masks))
    committed = (tuple(token_ids),) * len(masks)
    await engine.open(LeaseRequest(name, terms, prompt, committed, masks=tuple(masks)))
    scores = np.array((await engine.prefill(name)).scores)
    engine.release(name)
    return scores


async def gather(
    items: Sequence[Item],
    models: Sequence[str],
    answers_of: Callable[[Item, str, Item], Iterator[Answer]],
    drafter: str,
) -> list[Told]:
    """Return the answers to all items, scored by the drafter."""
    config = EngineConfig(model=drafter, max_context=2048, kv_cache_tokens=16384)
    engine, text = make_engine(load_model(config), None), ChatText.load(config.model)
    retriever = await open_retriever(RETRIEVAL, text.token_offsets)
    prompts = RequestPrompts(
        text, text, retriever, budget_tokens=RETRIEVAL.budget_tokens, budget_for=lambda _: 0
    )
    told: list[Told] = []
    for item, model, other in zip(items, models, [*items[1:], *items[:1]], strict=True):
        assert item.document is not None
        asked = GenerateRequest(item.id, "local", item.messages, (item.document,))
        found = await prompts.drafter_prompt(asked)
        for question, kind, statements, sources in answers_of(item, model, other):
            answer = "\n".join(statements) if kind != "model" else model
            token_ids, stream = text.encode(answer), text.stream()
            ends = [*accumulate(len(stream.push([each])) for each in token_ids)]
            if not ends or not found.chunks:
                continue
            scores = await score(engine, len(told), found, text, token_ids)
            complete = CompleteAnswer(token_ids, ends, [])
            sources = places_of(find_claims(0, answer, question), answer, statements, sources)
            told.append(
                Told(
                    item,
                    kind,
                    question,
                    answer,
                    sources,
                    found.chunks,
                    complete,
                    scores,
                    len(found.prompt_ids),
                )
            )
    prompts.close()
    engine.close()
    return told


# --- what is right --------------------------------------------------------------------------------


@dataclass(slots=True)
class Counts:
    """Citations and the right ones of them; what should be cited, and what of it is."""

    cited: int = 0
    right: int = 0
    due: int = 0
    found: int = 0

    def shares(self) -> tuple[float, float]:
        """Return precision and recall."""
        return self.right / max(self.cited, 1), self.found / max(self.due, 1)


def is_of(start: int, stop: int, source: tuple[int, int] | None) -> bool:
    """Return whether a place overlaps the sentence that a statement is from."""
    return source is not None and start < source[1] and source[0] < stop


def judge_copied(told: Sequence[Told], rule: CitingRule) -> Counts:
    """Count the citations of copies."""
    counts = Counts()
    for one in told:
        if one.kind == "reworded":
            continue
        assert one.item.document is not None
        claims = one.claims
        find_copies(claims, [one.item.document], one.passages, rule)
        for claim, source in zip(claims, one.sources, strict=True):
            cited = [is_of(c.document_start, c.document_end, source) for c in claim.citations]
            counts.cited, counts.right = counts.cited + len(cited), counts.right + sum(cited)
            counts.due, counts.found = counts.due + (source is not None), counts.found + any(cited)
    return counts


def judge_needed(told: Sequence[Told], rule: CitingRule) -> Counts:
    """Count the citations of needed passages."""
    counts = Counts()
    for one in told:
        for claim, source in zip(one.claims, one.sources, strict=True):
            near = find_near([claim], one.passages)
            whole, *parts = one.scores[:, one.complete.tokens_of(claim)].sum(axis=1).tolist()
            for passage, part in zip(one.passages, parts, strict=True):
                is_cited = rule.is_needed(whole, part) and passage in near
                is_right = holds_part(passage, source)
                counts.cited += is_cited
                counts.right += is_cited and is_right
                if one.kind in ("model", "quoted") and holds_all(passage, source):
                    counts.due, counts.found = counts.due + 1, counts.found + is_cited
    return counts


def judge_present(told: Sequence[Told], rule: CitingRule) -> Counts:
    """Count the citations of passages with most words."""
    counts = Counts()
    for one in told:
        if one.kind in ("model", "short"):
            continue
        for claim, source in zip(one.claims, one.sources, strict=True):
            best = find_overlap(claim, one.passages, rule)
            is_right = best is not None and holds_part(best, source)
            is_due = any(holds_all(passage, source) for passage in one.passages)
            counts.cited, counts.right = counts.cited + (best is not None), counts.right + is_right
            counts.due, counts.found = counts.due + is_due, counts.found + (is_due and is_right)
    return counts


def holds_part(passage: Passage, source: tuple[int, int] | None) -> bool:
    """Return whether a passage has a part of a sentence."""
    return is_of(passage.start, passage.end, source)


def holds_all(passage: Passage, source: tuple[int, int] | None) -> bool:
    """Return whether a passage has a whole sentence."""
    return source is not None and passage.start <= source[0] and source[1] <= passage.end


JUDGES = {"copied": judge_copied, "needed": judge_needed, "present": judge_present}
CHOICES: dict[str, dict[str, tuple[float, ...]]] = {
    "copied": {"least_words": (2, 3, 4, 5, 6), "most_rare": (0, 1, 2, 4, 8)},
    "needed": {"least_fall": (0, 1, 2, 3), "least_gain": (0, 0.05, 0.1, 0.2)},
    "present": {"least_overlap": (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)},
}
LEAST_PRECISION = {"copied": 0.99, "needed": 0.9, "present": 0.9}


def choose(kind: str, told: Sequence[Told]) -> tuple[CitingRule, list[list[object]]]:
    """Return the rule with the highest recall at the least precision, with all that were tried."""
    tried: list[list[object]] = []
    best, most = CitingRule(), (-1.0, -1.0)
    for values in product(*CHOICES[kind].values()):
        rule = replace(CitingRule(), **dict(zip(CHOICES[kind], values, strict=True)))  # type: ignore[arg-type]
        precision, recall = JUDGES[kind](told, rule).shares()
        tried.append([kind, *values, f"{precision:.3f}", f"{recall:.3f}"])
        if precision >= LEAST_PRECISION[kind] and (recall, precision) > most:
            best, most = rule, (recall, precision)
    return best, tried


def count_rows(told: Sequence[Told], *, measures_all: bool) -> tuple[int, int]:
    """Return the drafter's rows without citations, and those that measuring adds."""
    usual = added = 0
    for one in told:
        if one.kind != "model":
            continue
        claims = one.claims
        assert one.item.document is not None
        find_copies(claims, [one.item.document], one.passages, CitingRule())
        waiting = [claim for claim in claims if measures_all or not claim.citations]
        near = find_near(waiting, one.passages)
        usual += one.num_prompt + len(one.complete.token_ids)
        if near:
            added += (1 + len(near)) * one.complete.tokens_of(waiting[-1]).stop
    return usual, added


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--items", type=int, default=120)
    parser.add_argument("--text", action="store_true", help="sixty questions on real text")
    parser.add_argument("--quick", action="store_true", help="eight items, nothing kept")
    options = parser.parse_args()
    if options.text:
        judge_real_text(options)
    else:
        judge_generated(options)


def ask(items: Sequence[Item], target: str, drafter: str, mode: Any, max_tokens: int) -> list[str]:
    """Return a pair's answers."""
    with rapid.open(target, drafter=drafter) as pair:
        return [
            pair.answer(
                item.messages[-1].text,
                documents=[item.document] if item.document else [],
                mode=mode,
                max_tokens=max_tokens,
            ).text
            for item in items
        ]


def judge_real_text(options: argparse.Namespace) -> None:
    """Judge the rule as it is."""
    from_each = Source(loader="real_text", split="test", options={"per_document": 3})
    items = [item for item in real_text.load(from_each, None) if item.evidence]
    # Neighbours are of different documents.
    items = sorted(items, key=lambda item: int(item.id.rpartition("-")[2]))[: options.items // 2]
    items = items[:4] if options.quick else items
    models = ask(items, REAL_MODEL, REAL_MODEL, "rag", 48)
    told = asyncio.run(gather(items, models, answer_real, REAL_MODEL))
    report: dict[str, Any] = {"settings": settings(options), "judged": {}}
    rows = [judge_one(report, kind, kind, told) for kind in JUDGES]
    right = sum(holds_answer(each, item) for each, item in zip(models, items, strict=True))
    report["right answers"] = right
    lines = [table(["evidence", "cited", "due", "precision", "recall"], rows)]
    lines.append(f"\n{right} of {len(items)} of the model's answers are right.")
    title = "Citations of answers on real text, by kind of evidence"
    keep(None if options.quick else "cited_real_text", title, "\n".join(lines), report)


def judge_one(report: dict[str, Any], kind: str, name: str, told: Sequence[Told]) -> list[object]:
    """Return a row for a kind of evidence, and note its counts in the report."""
    counts = JUDGES[kind](told, CitingRule())
    report["judged"][name] = asdict(counts)
    precision, recall = counts.shares()
    return [name, counts.cited, counts.due, f"{precision:.3f}", f"{recall:.3f}"]


def judge_generated(options: argparse.Namespace) -> None:
    """Choose the rule on one half of the items and judge it on both."""
    half = 4 if options.quick else options.items // 2
    lengths = {"lengths": {TOKENS: half}}
    items = [
        item
        for split in ("dev", "test")
        for item in load(Source(loader="generated", split=split, options=lengths), None)
    ]
    models = ask(items, "embedded:target", "embedded:drafter", "fused", 160)
    told = asyncio.run(gather(items, models, answer_generated, "embedded:drafter"))
    dev = [one for one in told if one.item.id.startswith("dev")]
    test = [one for one in told if not one.item.id.startswith("dev")]
    report: dict[str, Any] = {"settings": settings(options), "judged": {}, "tried": []}
    rows = []
    for kind in JUDGES:
        chosen, tried = choose(kind, dev)
        report["tried"] += tried
        for name, half_of in (("choosing", dev), ("judging", test)):
            rows.append(judge_one(report, kind, f"{kind}, {name}", half_of))
        best = {field: getattr(chosen, field) for field in CHOICES[kind]}
        report[f"best for {kind}"] = best
        print(kind, best, flush=True)
    lines = [table(["evidence, half", "cited", "due", "precision", "recall"], rows)]
    costs = []
    for name, measures_all in (("what is not copied", False), ("everything", True)):
        usual, added = count_rows(told, measures_all=measures_all)
        costs.append([name, usual, added, f"{added / usual:.3f}"])
    report["rows"] = costs
    lines.append(table(["measured", "the drafter's rows", "rows added", "share"], costs))
    title = "Citations of answers on generated documents, by kind of evidence"
    keep(None if options.quick else "cited_answers", title, "\n".join(lines), report)


if __name__ == "__main__":
    main()
