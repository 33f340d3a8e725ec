"""The words of the generated documents: syllables, vocabulary, and the sentences of each kind."""

import re
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from functools import cache
from typing import Literal

DocumentKind = Literal["chronicle", "contract", "clinical", "ledger"]

SYLLABLES = tuple(c + v for c in "bdfghklmnprstvwz" for v in "aeiou")
ATTRIBUTES = (
    "harbor", "vault", "engine", "garden", "archive", "signal", "bridge", "tower", "charter",
    "lantern", "ledger", "orchard", "keeper", "market", "river", "temple", "banner", "mirror",
    "anchor", "kitchen", "valley", "barrel", "candle", "window",
)  # fmt: skip
DUES = (
    "rent", "fee", "bond", "tax", "toll", "wool", "salt", "oil", "wine", "tea", "grain", "iron",
)  # fmt: skip
FINDINGS = (
    "pulse", "fever", "dose", "bone", "sight", "cough", "skin", "heart", "eye", "sleep",
    "blood", "ward",
)  # fmt: skip
GOODS = (
    "gold", "sugar", "silver", "copper", "bread", "coal", "milk", "rice", "honey", "paper",
    "fish", "rope",
)  # fmt: skip
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")
COUNTS = {3: "three", 4: "four", 5: "five", 6: "six"}
CONTAINERS = ("crates", "barrels", "bags", "boxes", "sheets", "rolls")
PEOPLE = (
    "the baker", "the clerk", "a pilot", "the council", "an old judge", "the nurse", "a trader",
    "the captain", "a young singer", "the doctor",
)  # fmt: skip
VERBS = (
    "walked past", "wrote about", "painted", "forgot", "measured", "praised", "visited", "closed",
    "bought", "repaired",
)  # fmt: skip
PLACES = (
    "the station", "a quiet street", "the old mill", "an empty hall", "the northern road",
    "a small chapel", "the long wall", "the school", "a stone house", "the lake",
)  # fmt: skip
TIMES = (
    "in the morning", "before noon", "at dusk", "during the storm", "last winter", "on a Friday",
    "after the war", "every spring",
)  # fmt: skip
PHRASES = (
    "What is the", " of", " is", "Tell me the", "Recite the entry", "Repeat the entry", "List the",
    " deposits of", "What are the", "The", " deposit of", "Entry", " in the year", "Then", "Later",
    " met", " near", "So", " paid", " to", "Now", " sells", "Nobody asked about the",
    "The people of", " from", "Chronicle of", "Notes from",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Style:
    """The wording of one kind of document: templates of sentences and of their questions."""

    attributes: tuple[str, ...]
    fact: str
    fact_questions: tuple[str, str]
    deposit: str
    list_questions: tuple[str, str]
    aside: str
    link: str = ""
    pair_question: str = ""

    def topic(self, template: str, **names: str) -> str:
        """Return the beginning of a sentence, up to the value that its question is about."""
        return template.split("{value}")[0].split("{count}")[0].format(**names)


STYLES: dict[DocumentKind, Style] = {
    "chronicle": Style(
        attributes=ATTRIBUTES,
        fact="The {attribute} of {name} is {value}.",
        fact_questions=(
            "What is the {attribute} of {name}?",
            "Tell me the {attribute} of {name}.",
        ),
        deposit="The {ordinal} deposit of {name} is {count} {container} of {value}.",
        list_questions=(
            "List the {number} deposits of {name}.",
            "What are the {number} deposits of {name}?",
        ),
        aside="Nobody asked about the {attribute} of {name} {time}.",
    ),
    "contract": Style(
        attributes=DUES,
        fact="The {attribute} due from {name} is {value}.",
        fact_questions=(
            "What is the {attribute} due from {name}?",
            "Tell me the {attribute} due from {name}.",
        ),
        deposit="The {ordinal} part of the debt of {name} is {count} {container} of {value}.",
        list_questions=(
            "List the {number} parts of the debt of {name}.",
            "What are the {number} parts of the debt of {name}?",
        ),
        aside="Nobody must pay the {attribute} for {name} {time}.",
        link="The bail for {name} is {other}.",
        pair_question="What is the {attribute} due from the bail for {name}?",
    ),
    "clinical": Style(
        attributes=FINDINGS,
        fact="The {attribute} in patient {name} was {value}.",
        fact_questions=(
            "What was the {attribute} in patient {name}?",
            "Tell me the {attribute} in patient {name}.",
        ),
        deposit="The {ordinal} visit to patient {name} was {count} {container} of {value}.",
        list_questions=(
            "List the {number} visits to patient {name}.",
            "What were the {number} visits to patient {name}?",
        ),
        aside="The nurse saw no {attribute} in patient {name} {time}.",
        link="The twin of patient {name} is {other}.",
        pair_question="What was the {attribute} in the twin of patient {name}?",
    ),
    "ledger": Style(
        attributes=GOODS,
        fact="On page {name}, {attribute}: {value}.",
        fact_questions=(
            "What is on page {name} for {attribute}?",
            "Tell me what is on page {name} for {attribute}.",
        ),
        deposit="On page {name}, {ordinal} sale: {count} {container} of {value}.",
        list_questions=(
            "List the {number} sales on page {name}.",
            "What are the {number} sales on page {name}?",
        ),
        aside="Nobody paid for {attribute} from page {name} {time}.",
        link="After page {name} comes page {other}.",
        pair_question="What is on the page after {name} for {attribute}?",
    ),
}


def syllables() -> Iterator[str]:
    """Yield the syllables of names and values, in each form that they take in a word."""
    for syllable in SYLLABLES:
        yield from (syllable, syllable.capitalize(), f" {syllable}", f" {syllable.capitalize()}")


def wording() -> Iterator[str]:
    """Yield every fixed phrase of chronicles, without names and values."""
    # The tokenizer was trained on these, and does not change with new kinds of documents.
    phrases = [*ATTRIBUTES, *ORDINALS, *COUNTS.values(), *CONTAINERS]
    phrases += [*PEOPLE, *VERBS, *PLACES, *TIMES]
    for phrase in phrases:
        yield from (f" {phrase}", phrase.capitalize())
    for phrase in PHRASES:
        yield from (phrase, f" {phrase.lstrip()}")
    for phrase in (*PEOPLE, "nobody"):
        yield f" {phrase.capitalize()}"


def unknown_share(text: str) -> float:
    """Return the share of a text's words that no generated document has, from 0 to 1.

    It is 0 for every generated document and question, and about 0.7 for other English.
    """
    words = _words(text)
    name = re.compile(f"(?:{'|'.join(SYLLABLES)})+")
    unknown = [word for word in words if word not in _vocabulary() and not name.fullmatch(word)]
    return len(unknown) / len(words) if words else 0.0


@cache
def _vocabulary() -> frozenset[str]:
    styles = (each for style in STYLES.values() for each in astuple(style))
    phrases = [each if isinstance(each, str) else " ".join(each) for each in styles]
    return frozenset(_words(" ".join([*phrases, *wording()])))


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W\d_]+", text.lower())
