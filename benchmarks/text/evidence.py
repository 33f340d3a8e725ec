"""Can `auto` tell more surely whether a document answers a question? Numbers beside the cosine.

    python -m benchmarks.text.evidence --split dev

needs `rapid models get smollm2-135m all-minilm-l6-v2`. Questions on real text are asked of their
own document, which answers them, and of five others, as in `recall.py`. For every pair the script
computes numbers from the vectors and the words of all passages, and shows the area under the ROC
curve and the false positives at 90 % of the true ones:

* the best **cosine** with a passage of 96 tokens, which is what the product goes by;
* the **parts**: the mean of the best three cosines with windows of 32 words;
* the **margin** of the best cosine over the median one;
* the **words**: the share of the question's content words, weighted by idf, in the best passage;
* the cosine less what **any text** gives: the mean of the five best cosines with passages of
  generated documents, about something else in every sense;
* the cosine less what **such text** gives: the mean over other documents of `dev` of their best
  cosine. No server has these documents; this shows what knowing the field would be worth.

Logistic functions of several numbers are fitted on `dev`, by which everything was chosen. The
script writes `results/evidence-SPLIT.json` and `.md`.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler

from benchmarks.reporting import keep, settings, table
from benchmarks.text.recall import (
    ANSWERED,
    CHUNK_TOKENS,
    TRUE_POSITIVES,
    Asked,
    Remembering,
    real_text,
)
from evaluation.loaders.generated import SPLITS
from evaluation.reports.estimates import mean
from rapid.checkpoints.text import ChatText
from rapid.embedded.generator import generate_document
from rapid.embedded.wording import DocumentKind
from retrieval.chunking import chunk_text
from retrieval.terms import content_terms, terms

WINDOW_WORDS = 32
BEST_WINDOWS = 3
BEST_OF_ANY = 5
BACKGROUND_TOKENS = 500
TOGETHER: dict[str, tuple[str, ...]] = {
    "logistic: cosine, margin, words": ("cosine", "margin", "words"),
    "logistic: parts, words": ("parts", "words"),
    "logistic: parts, any text": ("parts", "any text"),
    "logistic: parts, mean, such text": ("parts", "mean", "such text"),
}
ALONE = ("cosine", "parts", "margin", "words", "cosine - any text", "cosine - such text")

Numbers = dict[str, float]
Vectors = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Passages:
    """A document's passages: their vectors, those of their windows, and their words."""

    vectors: Vectors
    windows: Vectors
    words: list[Counter[str]]


class Reader:
    """Documents and questions as vectors; each is computed once."""

    def __init__(self) -> None:
        self._embedder = Remembering()
        self._text = ChatText.load("smollm2-135m")
        self._read: dict[str, Passages] = {}
        kinds = get_args(DocumentKind)
        self.any_text = np.concatenate(
            [
                self.passages(generate_document(f"any {n}", BACKGROUND_TOKENS, kind=kind).text)
                for kind in kinds
                for n in range(2)
            ]
        )

    def passages(self, text: str) -> Vectors:
        """Return the vectors of a text's passages."""
        return self.read(text).vectors

    def read(self, text: str) -> Passages:
        """Return a text's passages."""
        if text not in self._read:
            cut = chunk_text(text, self._text.token_offsets, max_tokens=CHUNK_TOKENS)
            texts = [chunk.text for chunk in cut if not chunk.text.isspace()]
            self._read[text] = Passages(
                self.vectors(texts),
                self.vectors([each for text in texts for each in _windows(text)]),
                [Counter(terms(text)) for text in texts],
            )
        return self._read[text]

    def vectors(self, texts: Sequence[str]) -> Vectors:
        """Return the vectors of texts, [number, size]."""
        return np.stack([each.dense for each in self._embedder.embed_passages(texts)])


def _windows(text: str) -> list[str]:
    words = text.split()
    step = WINDOW_WORDS // 2
    starts = range(0, max(1, len(words) - step // 2), step)
    return [" ".join(words[start : start + WINDOW_WORDS]) for start in starts]


def numbers_of(asked: Asked, own: str, such: Mapping[str, str], reader: Reader) -> Numbers:
    """Return the numbers of a question and the document that it is asked of.

    Args:
        asked: The question with the document.
        own: The name of the document that answers the question.
        such: Texts of other documents by name.
        reader: Makes the vectors.
    """
    document = asked.item.document
    assert document is not None
    read = reader.read(document.text)
    (question,) = reader.vectors([asked.question])
    cosines, windows = read.vectors @ question, read.windows @ question
    frequency = Counter(word for words in read.words for word in words)
    idf = {
        word: math.log(1 + (len(read.words) - frequency[word] + 0.5) / (frequency[word] + 0.5))
        for word in set(content_terms(asked.question))
    }
    in_best = read.words[int(cosines.argmax())]
    unrelated = [text for name, text in such.items() if name not in (own, document.name)]
    numbers = {
        "cosine": float(cosines.max()),
        "mean": float(cosines.mean()),
        "parts": float(np.sort(windows)[-BEST_WINDOWS:].mean()),
        "margin": float(cosines.max() - np.median(cosines)),
        "words": sum(idf[word] for word in idf if in_best[word]) / sum(idf.values()),
        "any text": float(np.sort(reader.any_text @ question)[-BEST_OF_ANY:].mean()),
        "such text": float(np.mean([(reader.passages(t) @ question).max() for t in unrelated])),
    }
    for name in ("any text", "such text"):
        numbers[f"cosine - {name}"] = numbers["cosine"] - numbers[name]
    return numbers


def measured(split: str, such: Mapping[str, str], reader: Reader) -> list[tuple[Asked, Numbers]]:
    """Return every pair of question and document of a split with its numbers."""
    asked = real_text(split)
    own = {
        each.question: each.item.document.name
        for each in asked
        if each.kind != "elsewhere" and each.item.document
    }
    return [(each, numbers_of(each, own[each.question], such, reader)) for each in asked]


def fitted(dev: Sequence[tuple[Asked, Numbers]], names: Sequence[str]) -> Pipeline:
    """Fit a logistic function: answered questions against those asked of another document."""
    chosen = [(asked, each) for asked, each in dev if asked.kind != "unanswerable"]
    return make_pipeline(StandardScaler(), LogisticRegression(class_weight="balanced")).fit(
        [[each[name] for name in names] for _, each in chosen],
        [asked.kind in ANSWERED for asked, _ in chosen],
    )


def row(name: str, kinds: Sequence[str], values: Sequence[float]) -> tuple[str, ...]:
    """Return a line of the table for one number, with its values for questions of these kinds."""
    pairs = list(zip(kinds, values, strict=True))
    good = [value for kind, value in pairs if kind in ANSWERED]
    least = sorted(good)[len(good) - math.ceil(TRUE_POSITIVES * len(good))]
    cells = []
    for against in ("elsewhere", "unanswerable"):
        bad = [value for kind, value in pairs if kind == against]
        area = roc_auc_score([1] * len(good) + [0] * len(bad), good + bad)
        passed = mean([float(value >= least) for value in bad])
        cells += [f"{area:.3f}", f"{passed.value:.2f} ({passed.low:.2f} to {passed.high:.2f})"]
    paraphrased = [value for kind, value in pairs if kind == "paraphrase"]
    kept = np.mean([value >= least for value in paraphrased])
    return name, *cells, f"{kept:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--split", choices=SPLITS[:2], default="test")
    options = parser.parse_args()
    reader = Reader()
    documents = [each.item.document for each in real_text("dev")]
    such = {each.name: each.text for each in documents if each is not None}
    dev = measured("dev", such, reader)
    pairs = dev if options.split == "dev" else measured(options.split, such, reader)
    kinds = [asked.kind for asked, _ in pairs]
    rows = [row(name, kinds, [each[name] for _, each in pairs]) for name in ALONE]
    for name, names in TOGETHER.items():
        model = fitted(dev, names)
        scores = model.decision_function([[each[n] for n in names] for _, each in pairs])
        rows.append(row(name, kinds, [float(score) for score in scores]))
    counts = ", ".join(f"{count} {kind}" for kind, count in Counter(kinds).items())
    columns = (
        "number",
        "elsewhere: area",
        "passed at 90 % of true",
        "unanswerable: area",
        "passed at 90 % of true",
        "paraphrases kept",
    )
    text = f"all-MiniLM-L6-v2; {counts}. Logistic functions were fitted on dev.\n\n"
    text += table(columns, rows)
    report = {"settings": settings(options), "rows": rows}
    keep(f"evidence-{options.split}", f"Numbers for evidence ({options.split} split)", text, report)


if __name__ == "__main__":
    main()
