"""Which words the generated documents have."""

from __future__ import annotations

from pathlib import Path

import pytest

from rapid.embedded.generator import generate_document
from rapid.embedded.wording import STYLES, DocumentKind, unknown_share


@pytest.mark.parametrize("kind", STYLES)
def test_every_word_of_a_generated_document_and_its_questions_is_known(kind: DocumentKind) -> None:
    document = generate_document(7, 2000, kind=kind)
    questions = " ".join(each.question for each in document.questions)
    assert unknown_share(document.text) == unknown_share(questions) == 0


def test_most_words_of_other_texts_are_not() -> None:
    assert unknown_share(Path("LICENSE").read_text()) > 0.6
    assert unknown_share("Die Katze liegt auf dem Sofa.") > 0.6
    assert unknown_share("これは猫です") == 1


def test_a_text_without_words_has_no_unknown_ones() -> None:
    assert unknown_share("") == unknown_share("1984: 12.5 %") == 0
