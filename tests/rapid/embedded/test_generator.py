"""Generated documents: the same for a seed, and every answer follows from the text."""

from __future__ import annotations

import hashlib
import re
from functools import cache
from typing import get_args

import pytest
from transformers import AutoTokenizer

from rapid.embedded import TARGET
from rapid.embedded.generator import (
    DocumentMix,
    GeneratedDocument,
    Span,
    absent_questions,
    generate_document,
)
from rapid.embedded.wording import DocumentKind

SEEDS = range(8)
PINNED = "A pilot from Hilu walked past the lake. Nobody asked about the engine of Sireso "
KINDS = get_args(DocumentKind)
HASHES = {
    "chronicle": "fd23b082e6e5a3f2",
    "contract": "f3cb0f6fda8edd1d",
    "clinical": "2437c1b830015399",
    "ledger": "28adc6cd9fedcacf",
}
FACTS = {
    "chronicle": r"The (?P<what>\w+) of (?P<name>\w+) is [\w ]+ \d+\.",
    "contract": r"The (?P<what>\w+) due from (?P<name>\w+) is [\w ]+ \d+\.",
    "clinical": r"The (?P<what>\w+) in patient (?P<name>\w+) was [\w ]+ \d+\.",
    "ledger": r"On page (?P<name>\w+), (?P<what>\w+): [\w ]+ \d+\.",
}
LINKS = {
    "chronicle": r"(?P<name>)(?P<other>)(?!)",  # there are none
    "contract": r"The bail for (?P<name>\w+) is (?P<other>\w+)\.",
    "clinical": r"The twin of patient (?P<name>\w+) is (?P<other>\w+)\.",
    "ledger": r"After page (?P<name>\w+) comes page (?P<other>\w+)\.",
}


@cache
def tokenizer():
    return AutoTokenizer.from_pretrained(TARGET)


def read(document: GeneratedDocument):
    """A reader that knows the wording: facts by attribute and name, links by name; each once."""
    facts = list(re.finditer(FACTS[document.kind], document.text))
    links = list(re.finditer(LINKS[document.kind], document.text))
    fact_at: dict[tuple[str, str], Span] = {(m["what"], m["name"]): m.span() for m in facts}
    link_at: dict[str, tuple[str, Span]] = {m["name"]: (m["other"], m.span()) for m in links}
    assert (len(fact_at), len(link_at)) == (len(facts), len(links))
    return fact_at, link_at


def test_a_seed_names_one_text():
    first, again, other = (generate_document(seed, 300) for seed in (1, 1, 2))
    assert first == again
    assert first.text != other.text


def test_the_text_of_a_seed_stays_what_it_is():
    """Documents, tests and READMEs quote what a seed gives."""
    text = generate_document(7, 200).text
    assert text == generate_document(7, 200, mix=DocumentMix()).text
    assert text.startswith(PINNED)


@pytest.mark.parametrize("kind", KINDS)
def test_documents_and_questions_stay_what_they_are(kind):
    """The models were trained on them, and kept results are about them."""
    documents = [generate_document(seed, 400, kind=kind) for seed in (1, 2, "three")]
    # the digests were made when the class had the shorter name
    text = repr(documents).replace("GeneratedQuestion(", "Question(")
    assert hashlib.sha256(text.encode()).hexdigest().startswith(HASHES[kind])


def test_a_kind_is_another_document_in_other_words():
    documents = [generate_document(1, 400, kind=kind) for kind in KINDS]
    for document in documents:
        read_as = [kind for kind in KINDS if re.search(FACTS[kind], document.text)]
        assert read_as == [document.kind]
    assert len({question.answer for each in documents for question in each.questions}) == sum(
        len(document.questions) for document in documents
    )
    with pytest.raises(ValueError, match="a chronicle has no pairs"):
        generate_document(1, 400, mix=DocumentMix(pair=0.1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", SEEDS)
def test_an_answer_is_the_evidence_word_for_word(seed, kind):
    document = generate_document(seed, 1000, kind=kind)
    last = "recite" if kind == "chronicle" else "pair"
    assert {question.kind for question in document.questions} == {"fact", "list", last}
    for question in document.questions:
        pieces = [document.text[start:end] for start, end in question.evidence]
        assert question.answer == " ".join(pieces)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_question_has_one_answer_which_follows_from_the_text(seed, kind):
    document = generate_document(seed, 1500, kind=kind)
    facts, links = read(document)
    for question in document.questions:
        words = set(re.findall(r"\w+", question.question))
        if question.kind == "fact":
            (evidence,) = [span for key, span in facts.items() if words.issuperset(key)]
            assert question.evidence == (evidence,)
        elif question.kind == "pair":
            ((other, link),) = [links[name] for name in words & links.keys()]
            (evidence,) = [facts[what, other] for what in words if (what, other) in facts]
            assert other not in words
            assert question.evidence == (link, evidence)
        elif question.kind == "recite":
            assert document.text.count(question.answer.partition(":")[0] + ":") == 1


@pytest.mark.parametrize("num_tokens", [300, 500, 1000, 2500])
def test_a_document_is_about_as_long_as_asked(num_tokens):
    lengths = [len(tokenizer().encode(generate_document(seed, num_tokens).text)) for seed in SEEDS]
    assert sum(lengths) / len(lengths) == pytest.approx(num_tokens, rel=0.05)
    assert all(length == pytest.approx(num_tokens, rel=0.15) for length in lengths)


def test_longer_answers_are_of_50_to_150_tokens():
    lengths = [
        len(tokenizer().encode(question.answer))
        for seed in SEEDS
        for question in generate_document(seed, 1000).questions
        if question.kind != "fact"
    ]
    assert min(lengths) >= 45
    assert max(lengths) <= 150


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", SEEDS)
def test_absent_questions_have_no_answer_in_the_text(seed, kind):
    document = generate_document(seed, 500, kind=kind)
    asked = absent_questions(seed, document, 40)
    for question in asked:
        assert question.evidence == ()
        beginning = re.match(r".+?(: | is | was | comes page )", question.answer)
        assert beginning[0] not in document.text
    known = {question.kind for question in document.questions}
    assert {question.kind for question in asked} == known | {"list"}
    names = set(re.findall(r"\w+", document.text))
    assert any(names & set(re.findall(r"[A-Z]\w+", each.question[5:])) for each in asked)
