"""A sentence-transformers model with BM25 beside it, on a checkpoint of a few kilobytes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from retrieval import Document, EmbedderFailed, LexicalEmbedder, RetrievalConfig, open_retriever
from retrieval.chunking import Chunk, RetrievedChunk
from retrieval.embeddings.embedders import SentenceEmbedder
from retrieval.settings import SentenceEmbedderConfig
from retrieval.stores.local_store import LocalChunkStore
from tests.retrieval.tokens import words

VOCABULARY = ["[PAD]", "[UNK]", "the", "harbor", "of", "belaron", "is", "tessin", "mayor", "vael"]
PASSAGES = [
    "the harbor of belaron is tessin",
    "the mayor is vael",
    "of the of",
    "mayor harbor vael",
]
HIDDEN = 16


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        initializer_range=0.5,
    )
    BertModel(config).eval().save_pretrained(folder / "bert")
    tokenizer = Tokenizer(
        models.WordLevel({word: n for n, word in enumerate(VOCABULARY)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]"
    ).save_pretrained(folder / "bert")
    transformer = Transformer(str(folder / "bert"))
    pooling = Pooling(HIDDEN, pooling_mode="mean")
    SentenceTransformer(modules=[transformer, pooling], device="cpu").save(str(folder / "whole"))
    return folder / "whole"


@pytest.fixture(scope="module")
def embedder(checkpoint) -> SentenceEmbedder:
    config = SentenceEmbedderConfig(
        kind="sentence-transformers", model=str(checkpoint), batch_size=3, max_length=32
    )
    return SentenceEmbedder(config)


@pytest.mark.parametrize("text", PASSAGES)
def test_dense_vectors_are_the_unit_mean_of_an_own_forward(embedder, checkpoint, text) -> None:
    model = BertModel.from_pretrained(checkpoint.parent / "bert").eval()
    ids = [VOCABULARY.index(word) for word in text.split()]
    with torch.no_grad():
        mean = model(torch.tensor([ids])).last_hidden_state[0].mean(0)
    want = torch.nn.functional.normalize(mean, dim=-1).numpy()
    np.testing.assert_allclose(embedder.embed_query(text).dense, want, atol=1e-5)


def test_term_weights_are_the_lexical_embedders(embedder) -> None:
    words_only = LexicalEmbedder()
    for ours, theirs in zip(
        embedder.embed_passages(PASSAGES), words_only.embed_passages(PASSAGES), strict=True
    ):
        assert ours.sparse == theirs.sparse
    assert embedder.embed_query("harbor").sparse == words_only.embed_query("harbor").sparse
    assert embedder.space.dense_size == HIDDEN
    assert embedder.space.idf


def test_passages_keep_their_order_whatever_batch_they_are_in(embedder) -> None:
    for text, embedding in zip(PASSAGES, embedder.embed_passages(PASSAGES), strict=True):
        np.testing.assert_allclose(embedding.dense, embedder.embed_query(text).dense, atol=1e-5)


async def test_a_retriever_floors_and_fuses_with_it(checkpoint) -> None:
    settings = {
        "embedder": {
            "kind": "sentence-transformers",
            "model": str(checkpoint),
            "max_length": 32,
        },
        "chunk_tokens": 8,
        "budget_tokens": 8,
    }
    document = Document("facts", "\n\n".join(PASSAGES[:2]))
    for floor, cleared in ((-1.0, True), (1.01, False)):
        config = RetrievalConfig.model_validate(settings | {"floor": floor})
        retriever = await open_retriever(config, words)
        found = await retriever.retrieve("local", [document], PASSAGES[1])
        assert found.cleared_floor == found.is_evidence == cleared
        assert not cleared or PASSAGES[1] in found.text
        await retriever.close()


@pytest.mark.parametrize(
    ("cosines", "is_evidence"),
    [((), False), ((0.1, 0.38), False), ((0.1, 0.4), True), ((None,), False)],
)
def test_the_best_cosine_decides_what_is_evidence(embedder, cosines, is_evidence) -> None:
    chunks = [RetrievedChunk("d:0", "d", 0, 7, "harbor", 1, 9.0, cosine) for cosine in cosines]
    assert embedder.is_evidence("the harbor of tessin", chunks) == is_evidence


async def test_words_raise_a_chunk_by_a_share_of_their_score(embedder) -> None:
    store = LocalChunkStore(embedder.space)
    chunks = [Chunk(f"d:{n}", "d", n, n + 1, text, 8) for n, text in enumerate(PASSAGES)]
    await store.add("local", "d", chunks, list(embedder.embed_passages(PASSAGES)), 9)
    dense, both = embedder.embed_query("mayor vael"), embedder.embed_query("mayor vael")
    dense = replace(dense, sparse=None)
    by_cosine = {c.id: c for c in await store.search("local", ["d"], dense, limit=9, floor=-1.0)}
    found = await store.search("local", ["d"], both, limit=9, floor=-1.0)
    raised = {c.id for c in found if c.score > by_cosine[c.id].score + 1e-3}
    assert raised == {"d:1", "d:3"}
    assert all(c.cosine == pytest.approx(by_cosine[c.id].score, abs=1e-5) for c in found)
    await store.close()


def test_a_model_that_was_not_fetched_says_how_to_get_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("RAPID_HOME", str(tmp_path))
    with pytest.raises(EmbedderFailed, match="run `rapid models get all-minilm-l6-v2`"):
        SentenceEmbedder(SentenceEmbedderConfig(kind="sentence-transformers"))


def test_a_folder_without_a_model_is_refused(tmp_path) -> None:
    config = SentenceEmbedderConfig(kind="sentence-transformers", model=str(tmp_path))
    with pytest.raises(EmbedderFailed, match=r"cannot load the embedder .* Give embedder\.model"):
        SentenceEmbedder(config)


def test_a_failing_model_is_named(embedder, monkeypatch) -> None:
    def fail(*args, **kwargs):
        raise RuntimeError("no memory")

    monkeypatch.setattr(embedder._model, "encode", fail)
    with pytest.raises(EmbedderFailed, match="no memory"):
        embedder.embed_query("what")


def test_chunks_that_the_model_would_cut_are_refused() -> None:
    with pytest.raises(ValidationError, match="chunks of 300 tokens would be cut at 256"):
        RetrievalConfig.model_validate(
            {"embedder": {"kind": "sentence-transformers"}, "chunk_tokens": 300}
        )
