import subprocess
import sys

import pytest

from retrieval.chunking import RetrievedChunk
from retrieval.embeddings.embedders import LexicalEmbedder, coverage, make_embedder
from retrieval.settings import LexicalEmbedderConfig
from tests.process_memory import keeps_words

lexical = LexicalEmbedder()


def terms(text: str) -> set[int]:
    return set(lexical.embed_query(text).sparse.terms)


def passage(*texts: str) -> list[dict[int, float]]:
    return [
        dict(zip(e.sparse.terms, e.sparse.weights, strict=True))
        for e in lexical.embed_passages(texts)
    ]


def test_words_match_whatever_their_case_form_or_neighbours():
    assert terms("BELARON") == terms("Belaron's") == terms("“belaron”, please")
    assert terms("ﬁle_name42") == terms("file name42")
    assert terms("STRASSE") == terms("straße")


def test_what_is_asked_counts_and_how_it_is_asked_does_not():
    assert terms("What is the harbor of Belaron?") == terms("harbor Belaron")
    assert terms("To be or not to be") == terms("to be or not")  # nothing else to go by


def test_scripts_without_spaces_match_by_pairs_of_characters():
    assert terms("港は深い") & terms("あの港は")
    assert not terms("港は深い") & terms("市長は誰")
    assert terms("GPUの価格") >= terms("GPU")


def test_weights_are_bm25_with_the_documents_own_average():
    (number,) = terms("tessin")
    one, two = passage("Tessin Tessin harbor", "Tessin")
    # lengths 3 and 1, average 2: k1 (1 - b + b length / average) is 1.65 and 0.75
    assert one[number] == pytest.approx(2 * 2.2 / (2 + 1.65))
    assert two[number] == pytest.approx(2.2 / (1 + 0.75))


def test_texts_without_words_have_no_terms():
    assert passage("", " \n", "***") == [{}, {}, {}]
    assert list(lexical.embed_passages([])) == []
    assert terms("?!") == set()


def test_term_numbers_are_the_same_in_every_process():
    code = "from retrieval import LexicalEmbedder as L; import sys; "
    code += "sys.stdout.write(str(L().embed_query('Belaron harbor 42').sparse))"
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert there.stdout == str(lexical.embed_query("Belaron harbor 42").sparse)


def test_the_configuration_chooses():
    assert isinstance(make_embedder(LexicalEmbedderConfig()), LexicalEmbedder)


@pytest.mark.parametrize(
    ("question", "covered"),
    [
        ("What is the harbor of Belaron?", 1.0),
        ("What is the harbor of Orrin?", 1 / 5),  # the name counts four times
        ("List the deep harbors of Belaron.", 5 / 7),
        ("Which comets are old?", 0.0),
        ("?", 0.0),
    ],
)
def test_coverage_is_the_share_of_the_questions_content_in_all_texts(question, covered):
    texts = ["The harbor of Tessin is deep.", "Belaron has a mayor."]
    assert coverage(question, texts) == pytest.approx(covered)


def test_one_shared_word_is_no_evidence_for_words_alone():
    chunks = [
        RetrievedChunk("d:0", "d", 0, 30, "The harbor of Belaron is deep.", 8, score=9.0),
    ]
    assert lexical.is_evidence("What is the harbor of Belaron?", chunks)
    assert not lexical.is_evidence("What is the harbor of Orrin?", chunks)
    assert not lexical.is_evidence("What is the harbor of Belaron?", [])


@pytest.mark.parametrize("kind", ["BPE", "Unigram"])
def test_a_tokenizer_of_an_embedder_keeps_no_word_of_what_it_has_read(kind):
    made = {"BPE": "BPE({c: i for i, c in enumerate(letters)}, [])"}
    made |= {"Unigram": "Unigram([(c, -1.0) for c in letters], unk_id=0)"}
    reader = f"""
import string
from types import SimpleNamespace
from tokenizers import Tokenizer, models, pre_tokenizers
from rapid.documents import keep_no_words
letters = " ." + string.ascii_letters
tokenizer = Tokenizer(models.{made[kind]})
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
keep_no_words(SimpleNamespace(backend_tokenizer=tokenizer))
def read(words):
    tokenizer.encode_batch([words])
"""
    assert keeps_words(reader) == [True, False]
