"""BGE-M3 through FlagEmbedding, on a checkpoint of a few kilobytes made here in its format."""

import multiprocessing
import threading
import time

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, XLMRobertaConfig, XLMRobertaModel

from retrieval import BGEM3Embedder, Document, EmbedderFailed, RetrievalConfig, open_retriever
from retrieval.embeddings.bge_m3 import batches
from retrieval.embeddings.embedding import device_named
from retrieval.settings import BGEM3EmbedderConfig
from tests.retrieval.tokens import words

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
VOCABULARY = [
    *SPECIAL,
    *[
        "the",
        "harbor",
        "of",
        "belaron",
        "is",
        "tessin",
        "mayor",
        "orrin",
        "vael",
        ".",
        "what",
        "who",
    ],
]
PASSAGES = ["the harbor of belaron is tessin .", "the mayor of orrin is vael", "what", "zzz"]
HIDDEN = 16


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bge-m3")
    torch.manual_seed(0)
    config = XLMRobertaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=1026,
        initializer_range=0.5,
    )
    XLMRobertaModel(config).eval().save_pretrained(folder)
    for name, size in (("sparse_linear", 1), ("colbert_linear", HIDDEN)):
        torch.save(torch.nn.Linear(HIDDEN, size).state_dict(), folder / f"{name}.pt")
    vocabulary = {word: number for number, word in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        cls_token="<s>",
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def embedder(checkpoint):
    config = BGEM3EmbedderConfig(
        kind="bge-m3", model=str(checkpoint), device="cpu", batch_tokens=24
    )
    return BGEM3Embedder(config)


@pytest.fixture(scope="module")
def own_forward(checkpoint):
    """The model card's arithmetic, without FlagEmbedding."""
    model = XLMRobertaModel.from_pretrained(checkpoint).eval()
    linear = torch.nn.Linear(HIDDEN, 1)
    linear.load_state_dict(torch.load(checkpoint / "sparse_linear.pt", weights_only=True))

    @torch.no_grad()
    def forward(text):
        ids = [0, *(VOCABULARY.index(w) if w in VOCABULARY else 3 for w in text.split()), 2]
        hidden = model(torch.tensor([ids])).last_hidden_state[0]
        weights: dict[int, float] = {}
        for token, weight in zip(ids, torch.relu(linear(hidden))[:, 0].tolist(), strict=True):
            if token >= len(SPECIAL) and weight > 0:
                weights[token] = max(weight, weights.get(token, 0))
        return torch.nn.functional.normalize(hidden[0], dim=-1).numpy(), weights

    return forward


def as_dict(sparse):
    return dict(zip(sparse.terms, sparse.weights, strict=True))


@pytest.mark.parametrize("text", PASSAGES)
def test_a_query_equals_an_own_forward_exactly(embedder, own_forward, text):
    dense, weights = own_forward(text)
    embedding = embedder.embed_query(text)
    assert np.array_equal(embedding.dense, dense)
    assert as_dict(embedding.sparse) == weights


def test_passages_keep_their_order_whatever_batch_they_are_in(embedder, own_forward):
    for text, embedding in zip(PASSAGES, embedder.embed_passages(PASSAGES), strict=True):
        dense, weights = own_forward(text)
        np.testing.assert_allclose(embedding.dense, dense, atol=1e-5)
        assert as_dict(embedding.sparse) == pytest.approx(weights, abs=1e-5)


def test_a_passage_beyond_512_tokens_is_read_to_its_end(embedder, own_forward):
    text = "the mayor " * 400 + "tessin"
    dense, weights = own_forward(text)
    (embedding,) = embedder.embed_passages([text])
    np.testing.assert_allclose(embedding.dense, dense, atol=1e-5)
    assert as_dict(embedding.sparse).keys() == weights.keys()


def test_it_runs_in_this_process(embedder):
    assert embedder.space.dense_size == HIDDEN
    assert multiprocessing.active_children() == []


async def test_a_retriever_floors_and_fuses_with_it(checkpoint):
    settings = {
        "embedder": {"kind": "bge-m3", "model": str(checkpoint), "device": "cpu"},
        "chunk_tokens": 7,
        "budget_tokens": 14,
    }
    document = Document("facts", PASSAGES[0] + "\n\n" + PASSAGES[1])
    for floor, cleared in ((-1.0, True), (1.01, False)):
        config = RetrievalConfig.model_validate(settings | {"floor": floor})
        retriever = await open_retriever(config, words)
        found = await retriever.retrieve("local", [document], PASSAGES[0])
        assert found.cleared_floor == found.is_evidence == cleared
        assert not cleared or found.chunks[0].text.strip() == PASSAGES[0]
        await retriever.close()


def test_a_checkpoint_without_its_term_weights_is_refused(tmp_path):
    config = BGEM3EmbedderConfig(kind="bge-m3", model=str(tmp_path))
    with pytest.raises(EmbedderFailed, match=r"no sparse_linear\.pt.*embedder\.model"):
        BGEM3Embedder(config)


def test_a_failing_model_is_named(embedder, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("no memory")

    monkeypatch.setattr(embedder._model, "forward", fail)
    with pytest.raises(EmbedderFailed, match="no memory"):
        embedder.embed_query("what")


@pytest.mark.parametrize(
    ("lengths", "runs"),
    [
        ([], []),
        ([5], [[5]]),
        ([5, 5, 5], [[5, 5], [5]]),
        ([1, 9, 1], [[1], [9], [1]]),  # 1 padded to 9 takes 9
        ([30, 2, 2], [[30], [2, 2]]),  # longer than the bound: alone
        ([2, 2, 30], [[2, 2], [30]]),
        ([1] * 25, [[1] * 10, [1] * 10, [1] * 5]),
    ],
)
def test_batches_are_bounded_by_padded_tokens(lengths, runs):
    assert [[lengths[i] for i in run] for run in batches(lengths, 10)] == runs


def test_every_batch_is_computed_once_and_a_question_comes_between_two(embedder, monkeypatch):
    """FlagEmbedding's own loop computes the first batch of every call twice."""
    shapes, asking = [], []
    forward = embedder._model.forward

    def watched(inputs, **how):
        shapes.append(tuple(inputs["input_ids"].shape))
        if not asking:  # somebody asks while the first batch is computed
            asking.append(threading.Thread(target=embedder.embed_query, args=("what",)))
            asking[0].start()
            while not embedder._turns._num_questions:
                time.sleep(0.001)
        return forward(inputs, **how)

    monkeypatch.setattr(embedder._model, "forward", watched)
    assert len(list(embedder.embed_passages(PASSAGES[:2] * 3))) == 6
    asking[0].join()
    assert shapes == [(2, 9), (1, 3), (2, 9), (2, 9)]


def test_auto_is_a_gpu_only_where_there_is_one(monkeypatch):
    for is_there, device in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda is_there=is_there: is_there)
        assert device_named("auto") == device
        assert device_named("cuda:1") == "cuda:1"
