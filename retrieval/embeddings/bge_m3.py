"""BGE-M3: a dense vector and learned term weights of each text from one forward pass."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence, Set
from typing import Any

from rapid.documents import keep_no_words
from retrieval.chunking import RetrievedChunk
from retrieval.embeddings.embedding import (
    Embedding,
    SparseVector,
    VectorSpace,
    device_named,
)
from retrieval.embeddings.priority_lock import PriorityLock
from retrieval.retrieval_errors import EmbedderFailed
from retrieval.settings import BGEM3EmbedderConfig


class BGEM3Embedder:
    """A BGE-M3 embedder: dense vectors (cosine) and learned term weights from one forward pass."""

    floor = 0.3  # of the dense cosine: the paper's threshold

    def __init__(self, config: BGEM3EmbedderConfig) -> None:
        """Load the model; importing FlagEmbedding alone takes seconds.

        Raises:
            EmbedderFailed: The model is missing or not in BGE-M3's format.
        """
        self._config = config
        self._turns = PriorityLock()
        try:
            from FlagEmbedding import BGEM3FlagModel

            self._device = device_named(config.device)
            on_gpu = self._device.startswith("cuda")
            # Its `encode` runs the first batch of every call twice, and is not used.
            # One string, never a list: a list of devices starts a pool of processes.
            folder = _checkpoint(config.model)
            loaded: Any = BGEM3FlagModel(folder, devices=self._device, use_fp16=on_gpu)
            self._tokenizer = loaded.tokenizer
            keep_no_words(self._tokenizer)
            self._model = loaded.model.to(self._device).eval()
        except Exception as error:
            raise EmbedderFailed(
                f"cannot load the embedder {config.model!r}: {error}. "
                "Give embedder.model a folder in BGE-M3's format, or a hub name"
            ) from error
        size = int(self._model.model.config.hidden_size)
        self.space = VectorSpace(dense_size=size, sparse=True)

    def embed_passages(self, texts: Sequence[str]) -> Iterator[Embedding]:
        """Embed passages, so many in a forward pass as `batch_tokens` allows.

        Raises:
            EmbedderFailed: The model raised.
        """
        if not texts:
            return
        lengths = [len(ids) for ids in self._encode(texts)["input_ids"]]
        for batch in batches(lengths, self._config.batch_tokens):
            with self._turns.batch():
                embeddings = self._embed([texts[i] for i in batch])
            yield from embeddings

    def embed_query(self, text: str) -> Embedding:
        """Embed a query, before any batch that waits; errors are those of `embed_passages`."""
        with self._turns.question():
            return self._embed([text])[0]

    def is_evidence(self, query: str, chunks: Sequence[RetrievedChunk]) -> bool:
        """Return whether there is any chunk: each is above the floor."""
        return bool(chunks)

    def _encode(self, texts: Sequence[str], **how: Any) -> Any:
        most = self._config.max_length
        return self._tokenizer(list(texts), truncation=True, max_length=most, **how)

    def _embed(self, texts: list[str]) -> list[Embedding]:
        try:
            import torch

            inputs = self._encode(texts, padding=True, return_tensors="pt").to(self._device)
            with torch.inference_mode():
                output = self._model(inputs, return_dense=True, return_sparse=True)
            dense = output["dense_vecs"].float().cpu().numpy()
            weights = output["sparse_vecs"].squeeze(-1).float().tolist()
        except Exception as error:
            raise EmbedderFailed(f"the embedder failed on {len(texts)} texts: {error}") from error
        special = set(self._tokenizer.all_special_ids)
        texts_of = zip(dense, inputs["input_ids"].tolist(), weights, strict=True)
        return [Embedding(vector, _by_token(ids, of, special)) for vector, ids, of in texts_of]


def batches(lengths: Sequence[int], most_tokens: int) -> list[range]:
    """Cut texts of these lengths into runs of `most_tokens` tokens at most, padding included.

    A longer text is a run of its own.
    """
    runs: list[range] = []
    start = longest = 0
    for i, length in enumerate(lengths):
        longest = max(longest, length)
        if i > start and (i + 1 - start) * longest > most_tokens:
            runs.append(range(start, i))
            start, longest = i, length
    return [*runs, range(start, len(lengths))] if lengths else []


def _checkpoint(model: str) -> str:
    """Return the folder of a model, downloaded from the hub if `model` is no local folder."""
    if not os.path.isdir(model):
        from huggingface_hub import snapshot_download

        others = ["onnx/*", "imgs/*", "*.h5", "*.msgpack", "*.ot"]
        model = snapshot_download(model, ignore_patterns=others)
    # Without either of BGE-M3's extra weight files FlagEmbedding would use random term weights.
    for name in ("sparse_linear.pt", "colbert_linear.pt"):
        if not os.path.exists(os.path.join(model, name)):
            raise FileNotFoundError(f"{model} has no {name}")
    return model


def _by_token(ids: list[int], weights: list[float], special: Set[int]) -> SparseVector:
    """Return the weight of each token of a text, the largest where it comes several times."""
    found: dict[int, float] = {}
    for token, weight in zip(ids, weights, strict=True):
        if weight > 0 and token not in special:
            found[token] = max(weight, found.get(token, 0.0))
    terms = tuple(sorted(found))
    return SparseVector(terms, tuple(found[term] for term in terms))
