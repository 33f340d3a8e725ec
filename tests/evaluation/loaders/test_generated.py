from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest

from evaluation.loaders.generated import load
from evaluation.tasks import Source
from rapid.errors import ConfigurationError


def source(split: str = "test", **options: object) -> Source:
    return Source(loader="generated", split=split, options={"lengths": {400: 24}} | options)


def test_an_item_asks_what_its_evidence_answers():
    for item in load(source(), None):
        assert item.document is not None
        said = " ".join(item.document.text[start:end] for start, end in item.evidence)
        assert (said,) == item.answers
        assert len(item.evidence) > 1 or item.groups["places"] == "one"


def test_kinds_are_balanced_also_among_the_first_items():
    items = list(islice(load(source(lengths={400: 12, 600: 24}), None), 24))
    kinds = Counter((i.groups["length"], i.groups["document"], i.groups["question"]) for i in items)
    assert len(kinds) == 24
    assert set(kinds.values()) == {1}


def test_every_length_has_its_number_of_items():
    items = list(load(source(lengths={300: 5, 400: 17}), None))
    assert Counter(item.groups["length"] for item in items) == {"300": 5, "400": 17}
    assert len({item.id for item in items}) == 22


def test_no_document_is_in_both_splits():
    texts = {
        split: {item.document for item in load(source(split), None)} for split in ("dev", "test")
    }
    assert len(texts["dev"]) == len(texts["test"]) == 24
    assert not texts["dev"] & texts["test"]


def test_a_seed_gives_documents_that_no_choice_has_seen():
    texts = [{item.document for item in load(source(seed=seed), None)} for seed in (None, 1, 2)]
    assert len(set.union(*texts)) == 3 * 24


def test_the_long_text_of_a_dialogue_is_the_dialogue():
    for item in load(source(conversations=2, lengths={1200: 12}), None):
        *history, last = item.messages
        assert item.document is None
        assert last.role == "user"
        assert [m.role for m in history] == ["user", "assistant"] * (len(history) // 2)
        assert sum('Document "' in m.content for m in history) == 2
        assert item.answers[0] not in {m.content for m in history}
        assert sum(len(m.content) for m in history) > 1000 * 2.8


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (source("train"), "dev, test, test 2"),
        (source(lengths={}), "lengths"),
        (source(number=4), "number"),
        (source(documents=["contract"], questions=["recite"]), "chronicles"),
    ],
)
def test_options_that_do_not_fit_are_refused(wrong, said):
    with pytest.raises(ConfigurationError, match=said):
        list(load(wrong, None))
