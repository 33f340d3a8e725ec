"""A writer of random sentences, and of the questions that they answer."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from rapid.embedded.wording import (
    CONTAINERS,
    COUNTS,
    ORDINALS,
    PEOPLE,
    PLACES,
    SYLLABLES,
    TIMES,
    VERBS,
    Style,
)


@dataclass(frozen=True, slots=True)
class Writer:
    """A writer in one style; `ask_...` return a question with the sentences of its answer."""

    # The order in which the methods draw from it is part of every document: a seed gives the same
    # text only as long as the order stays.
    rng: random.Random
    style: Style

    def name(self) -> str:
        """Return a name of two or three syllables."""
        return self._word(self.rng.choice((2, 3))).capitalize()

    def distinct_names(self, count: int) -> tuple[str, ...]:
        """Return `count` different names."""
        names: dict[str, None] = {}
        while len(names) < count:
            names[self.name()] = None
        return tuple(names)

    def document_name(self) -> str:
        """Return the name that a document is attached under."""
        name = self.name()
        return self.rng.choice(
            ("document.txt", "document", f"Chronicle of {name}", f"Notes from {name}")
        )

    def attribute(self) -> str:
        """Return one of the attributes that a name has a value of."""
        return self.rng.choice(self.style.attributes)

    def filler(self, names: Sequence[str]) -> str:
        """Return a sentence that answers no question, mostly about one of `names`."""
        rng = self.rng
        name, time = rng.choice(names), rng.choice(TIMES)
        form = rng.random()
        if form < 0.3:
            return self.style.aside.format(attribute=self.attribute(), name=name, time=time)
        if form < 0.5:
            return f"The people of {name} {rng.choice(VERBS)} {rng.choice(PLACES)} {time}."
        person = rng.choice(PEOPLE).capitalize()
        if form < 0.75:
            return f"{person} from {name} {rng.choice(VERBS)} {rng.choice(PLACES)}."
        return f"{person} {rng.choice(VERBS)} {rng.choice(PLACES)} {time}."

    def entry(self, name: str) -> str:
        """Return a verse of random words, which can only be reproduced by copying it verbatim."""
        words = " ".join(self._word(2) for _ in range(self.rng.randint(20, 27)))
        return f"Entry {name}: {words}."

    def recite_question(self, name: str) -> str:
        """Return the question whose answer is the entry of `name`."""
        verb = "Recite" if self.rng.random() < 0.8 else "Repeat"
        return f"{verb} the entry {name}."

    def ask_fact(self, attribute: str, name: str) -> tuple[str, list[str]]:
        """Return the question about an attribute of `name`."""
        parts = [self._fact(attribute, name)]
        return self._either(self.style.fact_questions, attribute=attribute, name=name), parts

    def ask_pair(self, attribute: str, name: str, other: str) -> tuple[str, list[str]]:
        """Return the question that takes the link from `name` to `other`, and a fact of that."""
        parts = [self.style.link.format(name=name, other=other), self._fact(attribute, other)]
        return self.style.pair_question.format(attribute=attribute, name=name), parts

    def ask_list(self, name: str) -> tuple[str, list[str]]:
        """Return the question about the three to six deposits of `name`."""
        parts = [
            self.style.deposit.format(
                ordinal=ordinal,
                name=name,
                count=self.rng.randint(10, 99),
                container=self.rng.choice(CONTAINERS),
                value=f"{self._word(2)} {self._word(2)}",
            )
            for ordinal in ORDINALS[: self.rng.choice((3, 4, 4, 5, 6))]
        ]
        number = COUNTS[len(parts)]
        return self._either(self.style.list_questions, number=number, name=name), parts

    def _fact(self, attribute: str, name: str) -> str:
        words = " ".join(self._word(2) for _ in range(self.rng.choice((1, 2, 2, 3))))
        value = f"{words} {self.rng.randint(10, 999)}"
        return self.style.fact.format(attribute=attribute, name=name, value=value)

    def _word(self, num_syllables: int) -> str:
        return "".join(self.rng.choice(SYLLABLES) for _ in range(num_syllables))

    def _either(self, templates: tuple[str, str], **words: str) -> str:
        return templates[0 if self.rng.random() < 0.8 else 1].format(**words)
