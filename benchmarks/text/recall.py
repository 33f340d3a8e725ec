"""Recall of retrieval on real text and on generated documents, and what counts as evidence.

    python -m benchmarks.text.recall --split dev

needs `rapid models get smollm2-135m all-minilm-l6-v2`. It searches as the product does, through a
`Retriever` with the local store, and measures two things:

* **Recall**: how often all passages of an answer are within the budget of retrieved tokens, by the
  words alone (BM25), the dense vectors alone, both fused by reciprocal rank (with a floor of cosine
  0.25 and with none), and the product's weighted sum of both scores.
* **Evidence**: how well numbers of a retrieval tell questions that a document answers from those
  that it does not. The latter are `elsewhere`: questions about other documents (of the same kind
  and length, where they are generated); and `unanswerable`: questions written to have no answer in
  words of the document, for generated documents those of `absent_questions`. The combination is a
  logistic function, fitted on the split `dev`. A last table has what the product's rule lets pass.

Weights and thresholds were chosen on `dev`. The script writes `results/recall-SPLIT.json` and
`.md`.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import ceil
from typing import get_args

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from benchmarks.reporting import keep, settings, table
from evaluation.drivers.prompter import evidence_found
from evaluation.items import Item
from evaluation.loaders.generated import SPLITS
from evaluation.loaders.real_text import load
from evaluation.reports.estimates import Estimate, estimate_difference, mean
from evaluation.tasks import Source
from rapid.checkpoints.text import ChatText
from rapid.embedded.generator import absent_questions, generate_document
from rapid.embedded.wording import DocumentKind
from rapid.messages import Document, Message
from retrieval import Embedder, LexicalEmbedder, RetrievalConfig, SentenceEmbedder, open_retriever
from retrieval.embedders import coverage
from retrieval.settings import SentenceEmbedderConfig

BUDGETS = (288, 384, 768)
EVIDENCE_BUDGET = 384  # of the task `real-text`
CHUNK_TOKENS = 96
GENERATED_BUDGET, GENERATED_CHUNK_TOKENS = 320, 64  # those of serve_config.yaml
GENERATED_LENGTHS = (500, 1500, 3000)
DOCUMENTS_PER_KIND = 3
QUESTIONS_PER_KIND = 3
OTHER_DOCUMENTS = 5  # that a question of real text is asked of
TRUE_POSITIVES = 0.9
ANSWERED = ("one place", "several places", "paraphrase", "fact", "recite", "list", "pair")
LITERAL = tuple(kind for kind in ANSWERED if kind != "paraphrase")


@dataclass(frozen=True, slots=True)
class Asked:
    """A question, asked of one document, with its kind or why the document does not answer it."""

    kind: str
    question: str
    item: Item


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was retrieved for a question.

    Attributes:
        kind: The kind of question, as in `Asked`.
        is_found: Whether all evidence was retrieved.
        cosine: The best cosine of a retrieved chunk.
        coverage: The share of the question's content words that the chunks have.
        best: The best score of a retrieved chunk.
        is_evidence: What the product's rule says.
    """

    kind: str
    is_found: bool
    cosine: float
    coverage: float
    best: float
    is_evidence: bool


class Remembering(SentenceEmbedder):
    """A sentence embedder that computes the vector of a text once; its copies share the vectors."""

    def __init__(self) -> None:
        super().__init__(SentenceEmbedderConfig(kind="sentence-transformers"))
        self._seen: dict[str, NDArray[np.float32]] = {}

    def ranked(self, weight: float | None, floor: float = 0.0) -> Embedder:
        """Return a copy that fuses with this weight of words (see `VectorSpace`) and floor."""
        other = copy.copy(self)
        other.space = replace(self.space, sparse_weight=weight)
        other.floor = floor
        return other

    def _dense(self, texts: Sequence[str]) -> NDArray[np.float32]:
        new = [text for text in dict.fromkeys(texts) if text not in self._seen]
        if new:
            self._seen.update(zip(new, super()._dense(new), strict=True))
        return np.stack([self._seen[text] for text in texts])


def real_text(split: str) -> list[Asked]:
    """Return the questions of a split, each asked of its own and of a few other documents."""
    rng = random.Random(0)
    items = list(load(Source(loader="real_text", split=split), None))
    documents = {item.document.name: item.document for item in items if item.document}
    asked = []
    for item in items:
        assert item.document is not None
        asked.append(Asked(item.groups["kind"], item.messages[-1].content, item))
        if item.groups["kind"] != "unanswerable":
            others = sorted(documents.keys() - {item.document.name})
            for name in rng.sample(others, OTHER_DOCUMENTS):
                elsewhere = replace(item, document=documents[name], evidence=())
                asked.append(Asked("elsewhere", item.messages[-1].content, elsewhere))
    return asked


def generated(split: str) -> list[Asked]:
    """Return questions about documents of all kinds and lengths, also asked of their neighbours."""
    return [
        each
        for kind in get_args(DocumentKind)
        for length in GENERATED_LENGTHS
        for each in _generated(split, kind, length)
    ]


def _generated(split: str, kind: DocumentKind, length: int) -> Iterator[Asked]:
    seeds = [f"recall {split} {number}" for number in range(DOCUMENTS_PER_KIND)]
    made = [generate_document(seed, length, kind=kind) for seed in seeds]
    for number, document in enumerate(made):
        own = Document(document.name, document.text)
        other = made[(number + 1) % len(made)]
        neighbour = Document(other.name, other.text)
        left = dict.fromkeys(ANSWERED, QUESTIONS_PER_KIND)
        for each in document.questions:
            if left[each.kind]:
                left[each.kind] -= 1
                item = Item("", (Message("user", each.question),), own, (), evidence=each.evidence)
                yield Asked(each.kind, each.question, item)
                elsewhere = replace(item, document=neighbour, evidence=())
                yield Asked("elsewhere", each.question, elsewhere)
        for each in absent_questions(seeds[number], document, 2 * QUESTIONS_PER_KIND):
            item = Item("", (Message("user", each.question),), own, ())
            yield Asked("unanswerable", each.question, item)


async def retrieve(
    asked: Sequence[Asked], embedder: Embedder, text: ChatText, chunk_tokens: int, budget: int
) -> list[Outcome]:
    """Retrieve for every question, one document after the other."""
    config = RetrievalConfig(chunk_tokens=chunk_tokens, max_cached_chunks=1)
    retriever = await open_retriever(config, text.token_offsets, embedder)
    outcomes: dict[int, Outcome] = {}
    by_document = sorted(range(len(asked)), key=lambda i: _document(asked[i]).text)
    for number in by_document:
        each = asked[number]
        found = await retriever.retrieve(
            "recall", [_document(each)], each.question, budget_tokens=budget
        )
        outcomes[number] = Outcome(
            kind=each.kind,
            is_found=bool(evidence_found(each.item, found.text)),
            cosine=max((chunk.cosine or 0.0 for chunk in found.chunks), default=0.0),
            coverage=coverage(each.question, [chunk.text for chunk in found.chunks]),
            best=max((chunk.score for chunk in found.chunks), default=0.0),
            is_evidence=found.is_evidence,
        )
    await retriever.close()
    return [outcomes[number] for number in range(len(asked))]


def _document(asked: Asked) -> Document:
    assert asked.item.document is not None
    return asked.item.document


def recall_table(results: Mapping[tuple[str, int], list[Outcome]]) -> str:
    """Tabulate recall by ranking, budget and kind, and the gain on paraphrases over words."""
    kinds = ANSWERED[:3]
    rows = []
    for budget in BUDGETS:
        words = _found(results["lexical", budget], ("paraphrase",))
        for ranking in dict.fromkeys(name for name, _ in results):
            outcomes = results[ranking, budget]
            gain = estimate_difference(_found(outcomes, ("paraphrase",)), words)
            shares = [
                _shown(mean(_found(outcomes, each))) for each in (*[(k,) for k in kinds], kinds)
            ]
            rows.append((budget, ranking, *shares, _shown(gain, "+.2f")))
    columns = ("tokens", "ranking", *kinds, "all", "paraphrases against lexical")
    return table(columns, rows)


def _found(outcomes: Sequence[Outcome], kinds: Sequence[str]) -> list[float]:
    return [float(each.is_found) for each in outcomes if each.kind in kinds]


def _shown(estimate: Estimate, form: str = ".2f") -> str:
    return f"{estimate.value:{form}} ({estimate.low:{form}} to {estimate.high:{form}})"


Feature = Callable[[Outcome], float]


def combination(dev: Sequence[Outcome]) -> Feature:
    """Fit a logistic function of cosine and coverage: answered questions against `elsewhere`."""
    chosen = [each for each in dev if each.kind != "unanswerable"]
    fitted = LogisticRegression(class_weight="balanced", C=1000).fit(
        [(each.cosine, each.coverage) for each in chosen],
        [each.kind in ANSWERED for each in chosen],
    )
    (by_cosine, by_coverage), (constant,) = fitted.coef_[0], fitted.intercept_
    return lambda each: float(by_cosine * each.cosine + by_coverage * each.coverage + constant)


def roc_rows(
    name: str, outcomes: Sequence[Outcome], features: Mapping[str, Feature]
) -> list[tuple[object, ...]]:
    """Return rows: area under the ROC curve, and false positives at 90 % of true ones."""
    rows = []
    for positives, kinds in (("answered", ANSWERED), ("no paraphrases", LITERAL)):
        yes = [each for each in outcomes if each.kind in kinds]
        if len(yes) == sum(each.kind in ANSWERED for each in outcomes) and kinds is LITERAL:
            continue
        for against in ("elsewhere", "unanswerable"):
            no = [each for each in outcomes if each.kind == against]
            for feature, value in features.items():
                good, bad = [value(each) for each in yes], [value(each) for each in no]
                area = roc_auc_score([1] * len(good) + [0] * len(bad), good + bad)
                least = sorted(good)[len(good) - ceil(TRUE_POSITIVES * len(good))]
                passed = mean([float(each >= least) for each in bad])
                rows.append(
                    (
                        name,
                        positives,
                        against,
                        feature,
                        f"{area:.3f}",
                        _shown(passed),
                        f"{least:.2f}",
                    )
                )
    return rows


def rule_row(name: str, outcomes: Sequence[Outcome]) -> tuple[object, ...]:
    """Return what the product's rule lets pass, by kind."""

    def passed(kinds: Sequence[str]) -> str:
        values = [float(each.is_evidence) for each in outcomes if each.kind in kinds]
        return _shown(mean(values)) if values else ""

    columns = (LITERAL, ("paraphrase",), ("elsewhere",), ("unanswerable",))
    return (name, *(passed(kinds) for kinds in columns))


async def measure(split: str) -> str:
    text, embedded = ChatText.load("smollm2-135m"), ChatText.load("embedded:target")
    sentences, words = Remembering(), LexicalEmbedder()
    weight = sentences.space.sparse_weight
    rankings = {
        "lexical": words,
        "dense": sentences.ranked(0.0),
        "reciprocal ranks, cosine 0.25": sentences.ranked(None, floor=0.25),
        "reciprocal ranks": sentences.ranked(None),
        f"dense + {weight:g} lexical": sentences,
    }
    asked = real_text(split)
    own = [each for each in asked if each.kind in ANSWERED]
    recalls = {
        (name, budget): await retrieve(own, embedder, text, CHUNK_TOKENS, budget)
        for name, embedder in rankings.items()
        for budget in BUDGETS
    }
    made = await retrieve(
        generated(split), words, embedded, GENERATED_CHUNK_TOKENS, GENERATED_BUDGET
    )
    by_kind = [
        (kind, len(values), _shown(mean(values)))
        for kind in ANSWERED[3:]
        if (values := _found(made, (kind,)))
    ]

    async def evidence(questions: Sequence[Asked], embedder: Embedder) -> list[Outcome]:
        return await retrieve(questions, embedder, text, CHUNK_TOKENS, EVIDENCE_BUDGET)

    dense, lexical = await evidence(asked, sentences), await evidence(asked, words)
    dev = dense if split == "dev" else await evidence(real_text("dev"), sentences)
    by_words: dict[str, Feature] = {
        "best score": lambda each: each.best,
        "coverage": lambda each: each.coverage,
    }
    by_both = {"cosine": lambda each: each.cosine, **by_words, "combination": combination(dev)}
    rows = [
        *roc_rows("sentence-transformers, real text", dense, by_both),
        *roc_rows("lexical, real text", lexical, by_words),
        *roc_rows("lexical, generated", made, by_words),
    ]
    counts = [(kind, len(list(each))) for kind, each in groupby(sorted(o.kind for o in dense))]
    parts = [
        "Whole evidence within the budget, real text (95 % bootstrap intervals; "
        + ", ".join(f"{count} {kind}" for kind, count in counts) + "):",
        recall_table(recalls),
        f"The same on generated documents, lexical, {GENERATED_BUDGET} tokens:",
        table(("question", "questions", "recall"), by_kind),
        f"Evidence, {EVIDENCE_BUDGET} tokens (generated: {GENERATED_BUDGET}):",
        table(
            ("embedder", "true", "false", "by", "area", "false positives at 90 % of true", "least"),
            rows,
        ),
        "What the product's rule lets pass:",
        table(
            ("embedder", "in the question's words", "paraphrases", "elsewhere", "unanswerable"),
            [
                rule_row("sentence-transformers, real text", dense),
                rule_row("lexical, real text", lexical),
                rule_row("lexical, generated", made),
            ],
        ),
    ]  # fmt: skip
    return "\n".join(part if part.endswith("\n") else part + "\n" for part in parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--split", choices=SPLITS[:2], default="test")
    options = parser.parse_args()
    shown = asyncio.run(measure(options.split))
    report = {"settings": settings(options), "tables": shown.splitlines()}
    title = f"Recall and evidence of retrieval ({options.split} split)"
    keep(f"recall-{options.split}", title, shown, report)


if __name__ == "__main__":
    main()
