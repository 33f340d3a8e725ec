"""Metrics that score one answer in [0, 1], each by the rule of the benchmark that defines it."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING

from evaluation.items import Item
from evaluation.texts.text_questions import holds
from rapid.errors import ConfigurationError

if TYPE_CHECKING:
    from rouge_score.rouge_scorer import RougeScorer

Metric = Callable[[str, Item], float]


def exact(prediction: str, item: Item) -> float:
    """Score whether the whole answer is right to the last character, but for outer white space."""
    return float(prediction.strip() in {answer.strip() for answer in item.answers})


def contains(prediction: str, item: Item) -> float:
    """Score whether every line of a right answer is in the prediction, as whole words."""
    return float(
        any(all(holds(prediction, line) for line in answer.splitlines()) for answer in item.answers)
    )


def longbench_choice(prediction: str, item: Item) -> float:
    """Score LongBench v2 by the letter after "The correct answer is", in brackets or bare.

    Source: ``extract_answer`` in ``pred.py`` of github.com/THUDM/LongBench.
    """
    return float(_find_stated_choice("The correct answer is", prediction) in item.answers)


def longbench_choice_rapid(prediction: str, item: Item) -> float:
    """Score LongBench v2 by the letter after "correct answer is", without "The".

    This is the laxer rule behind the numbers that RAPID's authors publish.

    Source: ``eval/pred_longbench.py`` of github.com/John-AI-Lab/RAPID.
    """
    return float(_find_stated_choice("correct answer is", prediction) in item.answers)


def _find_stated_choice(phrase: str, prediction: str) -> str | None:
    """Return the letter after `phrase`; one in brackets goes before an earlier bare one."""
    text = prediction.replace("*", "")
    found = re.search(rf"{phrase} \(([A-D])\)", text) or re.search(rf"{phrase} ([A-D])", text)
    return found[1] if found else None


def infinitebench_choice(prediction: str, item: Item) -> float:
    """Score InfiniteBench En.MC, whose right answers are the option's text and its letter.

    The answer is a first letter A-D, even that of a word; else the option's text; else what follows
    the first of four phrases; else the first word that is a run of "ABCD". Source:
    ``get_score_one_longbook_choice_eng`` in ``src/compute_scores.py`` of
    github.com/OpenBMB/InfiniteBench.
    """
    text = prediction.strip()
    if not text:
        return 0.0
    if text[0] in "ABCD":
        return float(text[0] in item.answers)
    if text in item.answers:
        return 1.0
    text = re.sub(" +", " ", re.sub(r"[\n\"'.,?!{}]", " ", text))
    for phrase in ("answer is:", "answer:", "answer is", "option is"):
        _, found, rest = text.partition(phrase)
        if found:
            return float(rest[1:].startswith(item.answers))
    letters = (word for word in text.split() if word in "ABCD")
    return float(next(letters, None) in item.answers)


def f1(prediction: str, item: Item) -> float:
    """Score InfiniteBench En.QA by the F1 of the bags of words, the best over the answers.

    Words are lower case, without punctuation and articles. Source: ``qa_f1_score`` in
    ``src/compute_scores.py`` of github.com/OpenBMB/InfiniteBench.
    """
    return max((_f1(_words(prediction), _words(answer)) for answer in item.answers), default=0.0)


def _words(text: str) -> list[str]:
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def _f1(predicted: list[str], right: list[str]) -> float:
    common = (Counter(predicted) & Counter(right)).total()
    return 2 * common / (len(predicted) + len(right)) if common else 0.0


def rouge_l_sum(prediction: str, item: Item) -> float:
    """Score InfiniteBench En.Sum by the F-measure of ROUGE-L-Sum, the best over the answers.

    Lines are sentences. There is no stemming, as in ``evaluate.load("rouge")``, which the
    benchmark's scorer calls.
    """
    return float(_rouge().score_multi(item.answers, prediction)["rougeLsum"].fmeasure)


@cache
def _rouge() -> RougeScorer:
    from rouge_score.rouge_scorer import RougeScorer  # the import takes a second

    return RougeScorer(["rougeLsum"])


_CHOICES = (longbench_choice, longbench_choice_rapid, infinitebench_choice)
METRICS: dict[str, Metric] = {
    metric.__name__: metric for metric in (exact, contains, *_CHOICES, f1, rouge_l_sum)
}
JUDGED = ("judge", "judge_equality")
"""Names of the metrics that ask a language model (`evaluation.drivers.judge`)."""
NAMES = (*METRICS, *JUDGED)
"""Names of all metrics."""


def scorers(names: Iterable[str], judges: Mapping[str, Metric]) -> dict[str, Metric]:
    """Return the metrics of `names`, checked before a run so that none is missing after it.

    `judges` has the metrics of `JUDGED` by name, and is empty where there is no judge.

    Raises:
        ConfigurationError: A name is unknown, or it needs a judge and there is none.
    """
    names = tuple(names)
    if unknown := [name for name in names if name not in NAMES]:
        raise ConfigurationError(
            f"unknown metric {', '.join(unknown)}; known are {', '.join(NAMES)}"
        )
    known = {**METRICS, **judges}
    if missing := [name for name in names if name not in known]:
        raise ConfigurationError(
            f"the metric {missing[0]} needs an endpoint: give --judge-url and --judge-model"
        )
    return {name: known[name] for name in names}
