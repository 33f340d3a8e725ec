import pickle
import subprocess
import sys

import pytest

import retrieval
from retrieval import LexicalEmbedder, retrieval_errors, retrieve_context
from tests.retrieval.tokens import byte_level_bpe

TEXT = "The mills grind slowly. " * 200 + "The harbor of Belaron is Tessin. " + "It rains. " * 300
TOKENIZER = byte_level_bpe([TEXT])


def check(context):
    assert context.cleared_floor
    assert "The harbor of Belaron is Tessin." in context.text
    assert context.num_tokens <= 128


def test_a_researcher_gets_a_context_in_one_call():
    check(
        retrieve_context(
            TEXT,
            "Where is Belaron's harbor?",
            tokenizer=TOKENIZER,
            budget_tokens=128,
            chunk_tokens=32,
        )
    )
    whole = retrieve_context("Belaron is a town.", "Belaron?", tokenizer=TOKENIZER, name="guide")
    assert {chunk.document for chunk in whole.chunks} == {"guide"}
    assert (whole.text, whole.budget_tokens) == ("Belaron is a town.", 4096)


async def test_it_works_in_a_notebook_too_where_a_loop_runs():
    check(
        retrieve_context(
            TEXT,
            "harbor of Belaron",
            tokenizer=TOKENIZER,
            budget_tokens=128,
            chunk_tokens=32,
            embedder=LexicalEmbedder(),
        )
    )


def test_importing_is_light():
    code = "import sys, retrieval; print([m for m in ('torch', 'qdrant_client', 'ray', "
    code += "'transformers', 'FlagEmbedding', 'rapid.engines') if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_what_is_public_is_listed_in_order():
    assert retrieval.__all__ == sorted(retrieval.__all__)
    assert all(hasattr(retrieval, name) for name in retrieval.__all__)


@pytest.mark.parametrize("kind", retrieval_errors.RetrievalError.__subclasses__())
def test_errors_survive_the_way_between_processes(kind):
    error = pickle.loads(pickle.dumps(kind("say what to do")))
    assert type(error) is kind
    assert str(error) == "say what to do"
