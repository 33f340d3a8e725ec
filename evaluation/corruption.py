"""Corrupted retrieval, seeded by the item alone: every system gets the same corrupted chunks."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil

from evaluation.items import Item
from evaluation.tasks import Condition
from rapid.errors import ConfigurationError
from retrieval import Chunk, RetrievedChunk
from retrieval.ranking import select

Span = tuple[int, int]

_SENTENCE = re.compile(r"[^.!?\n]+[.!?]*")
_DIGITS = re.compile(r"\d+")
_MADE_UP = re.compile(r"\b(?:[bdfghklmnprstvwz][aeiou]){2}\b")
"""The form of the values in generated documents. Other words of this form are recognised because
they occur in the question, or more than once in the document."""


def corrupt(
    chunks: Sequence[RetrievedChunk],
    condition: Condition,
    item: Item,
    spare: Sequence[Chunk],
    *,
    budget_tokens: int,
    count_tokens: Callable[[str], int],
) -> list[RetrievedChunk]:
    """Return what the drafter reads instead of `chunks`, in the same order and budget.

    Args:
        chunks: The chunks retrieved for `item`, in document order; for `missed`, more of them
            than the budget holds.
        condition: `empty` takes away every chunk, `unrelated` replaces every chunk, `replaced` a
            share of them (rounded up, whatever they hold), and `contradicting` adds copies of the
            item's evidence with other values. Where the evidence is not known, the sentences with a
            number in the chunk of highest score are taken for it. `missed` takes the best chunks
            without evidence.
        item: The item, whose id seeds every choice.
        spare: All chunks of the item that `choose_unrelated` chose.
        budget_tokens: The maximum number of tokens of the result. Replacements that would exceed
            it are skipped; additions push out the chunks of lowest score.
        count_tokens: Counts tokens with the target's tokenizer.

    Raises:
        ConfigurationError: The evidence of `item` is not known, and the condition is `missed`.
    """
    rng = random.Random(item.id)
    match condition.corruption:
        case "none":
            return list(chunks)
        case "empty":
            return []
        case "unrelated":
            return _replace(rng, chunks, len(chunks), spare, budget_tokens)
        case "replaced":
            number = ceil(condition.share * len(chunks))
            return _replace(rng, chunks, number, spare, budget_tokens)
        case "contradicting":
            return _contradict(rng, chunks, item, budget_tokens, count_tokens)
        case "missed":
            return _miss(chunks, item, budget_tokens)


def choose_unrelated(item: Item, items: Sequence[Item]) -> Item:
    """Choose one of `items` about another text, always the same one for the same `items`.

    Raises:
        ValueError: All of `items` are about one text.
    """
    others = [each for each in items if _text(each) != _text(item)]
    if not others:
        raise ValueError("unrelated chunks need a second item that is about another text")
    return random.Random(f"unrelated {item.id}").choice(others)


def contradiction(rng: random.Random, item: Item, sentence: str) -> str:
    """Return `sentence` with other numbers and made-up words; unchanged if it has neither."""
    text, question = _text(item), item.messages[-1].text

    def other_number(found: re.Match[str]) -> str:
        return _other(found[0], lambda: "".join(rng.choice("123456789") for _ in found[0]))

    def other_word(found: re.Match[str]) -> str:
        if text.count(found[0]) > 1 or found[0] in question:
            return found[0]
        return _other(found[0], lambda: _syllable(rng) + _syllable(rng))

    return _MADE_UP.sub(other_word, _DIGITS.sub(other_number, sentence))


def _replace(
    rng: random.Random,
    chunks: Sequence[RetrievedChunk],
    number: int,
    spare: Sequence[Chunk],
    budget_tokens: int,
) -> list[RetrievedChunk]:
    # The order is the same for every share: what is replaced at 25 % is replaced at 50 % too.
    places = sorted(rng.sample(range(len(chunks)), len(chunks))[:number])
    room = budget_tokens - sum(c.num_tokens for i, c in enumerate(chunks) if i not in places)
    chosen: list[Chunk] = []
    for each in rng.sample(spare, len(spare)):
        if len(chosen) < len(places) and each.num_tokens <= room:
            chosen.append(each)
            room -= each.num_tokens
    chosen.sort(key=lambda chunk: chunk.start)
    # A replacement keeps the identity of the original chunk, so it is shown under the same name.
    instead = {
        place: replace(chunks[place], text=each.text, num_tokens=each.num_tokens)
        for place, each in zip(places, chosen, strict=False)
    }
    kept = {i: chunk for i, chunk in enumerate(chunks) if i not in places}
    return [chunk for _, chunk in sorted((kept | instead).items())]


def _contradict(
    rng: random.Random,
    chunks: Sequence[RetrievedChunk],
    item: Item,
    budget_tokens: int,
    count_tokens: Callable[[str], int],
) -> list[RetrievedChunk]:
    if not chunks:
        return []
    best = max(chunks, key=lambda chunk: chunk.score)
    added: dict[tuple[int, int], list[str]] = {}
    evidence = [(*span, _text(item)[slice(*span)]) for span in item.evidence] or _numbers_of(best)
    for start, _, sentence in evidence:
        changed = contradiction(rng, item, sentence)
        if changed != sentence:
            # The copy goes right before or after the chunk that holds the sentence, or would.
            place = max((i for i, c in enumerate(chunks) if c.start <= start), default=0)
            added.setdefault((place, rng.choice((-1, 1))), []).append(changed)
    order = {(place, 0): chunk for place, chunk in enumerate(chunks)}
    for key, sentences in added.items():
        text = " ".join(sentences)
        order[key] = replace(best, text=text, num_tokens=count_tokens(text))
    spans = [(start, end) for start, end, _ in evidence]
    room = budget_tokens - sum(chunk.num_tokens for chunk in order.values())
    for key in sorted(order, key=lambda key: _worth(order[key], spans, added=key in added)):
        if room >= 0:
            break
        room += order.pop(key).num_tokens
    return [chunk for _, chunk in sorted(order.items(), key=lambda entry: entry[0])]


def _miss(chunks: Sequence[RetrievedChunk], item: Item, budget_tokens: int) -> list[RetrievedChunk]:
    if not item.evidence:
        raise ConfigurationError(
            "corruption missed takes away the chunks that hold evidence, and that of item "
            f"{item.id} is not known"
        )
    return select([c for c in chunks if not _holds_evidence(c, item.evidence)], budget_tokens)


def _worth(chunk: RetrievedChunk, evidence: Sequence[Span], *, added: bool) -> tuple[bool, float]:
    """Return the key by which chunks are dropped: by score, the evidence and its copies last."""
    return added or _holds_evidence(chunk, evidence), chunk.score


def _holds_evidence(chunk: RetrievedChunk, evidence: Sequence[Span]) -> bool:
    return any(chunk.start < end and start < chunk.end for start, end in evidence)


def _numbers_of(chunk: RetrievedChunk) -> list[tuple[int, int, str]]:
    """Return the start, end and text of the sentences of `chunk` that have a number."""
    return [
        (chunk.start + found.start(), chunk.start + found.end(), found[0].strip())
        for found in _SENTENCE.finditer(chunk.text)
        if _DIGITS.search(found[0])
    ]


def _text(item: Item) -> str:
    """Return the long text of `item`: its document, or its whole dialogue."""
    if item.document is not None:
        return item.document.text
    return "\n\n".join(message.text for message in item.messages)


def _other(old: str, draw: Callable[[], str]) -> str:
    """Return the first draw that differs from `old`."""
    while (new := draw()) == old:
        pass
    return new


def _syllable(rng: random.Random) -> str:
    return rng.choice("bdfghklmnprstvwz") + rng.choice("aeiou")
