"""Settings of retrieval: chunk size, embedder, store, budget and floor."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Annotated, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, model_validator

from rapid.config import Finite, Frozen

_INDEX_FORMAT = "1"  # another one when code changes chunks or vectors
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
OLDEST_QDRANT = (1, 19)  # the first whose term statistics can be limited to a tenant


class LexicalEmbedderConfig(Frozen):
    """Settings of the BM25 embedder, which needs no weights and no download."""

    kind: Literal["lexical"] = "lexical"


class BGEM3EmbedderConfig(Frozen):
    """Settings of BGE-M3, which gives each chunk a dense vector and learned term weights."""

    kind: Literal["bge-m3"]
    model: str = Field("BAAI/bge-m3", description="A local folder or a hub name.")
    device: str = Field("auto", description="One device; 'auto' is a GPU if there is one.")
    max_length: int = Field(
        8192, ge=16, le=8192, description="Tokens of the embedder; longer chunks are cut there."
    )
    batch_tokens: int = Field(
        8192,
        ge=1,
        description="Tokens of the embedder in one forward pass, padding included, unless one "
        "chunk has more. A question waits for one such pass at most.",
    )


class SentenceEmbedderConfig(Frozen):
    """Settings of a small sentence-transformers model with BM25 beside it, which a CPU can run."""

    kind: Literal["sentence-transformers"]
    model: str = Field(
        "all-minilm-l6-v2",
        description="A name of 'rapid models list', a local folder, or a hub name.",
    )
    device: str = Field("auto", description="One device; 'auto' is a GPU if there is one.")
    max_length: int = Field(
        256, ge=16, le=8192, description="Tokens of the embedder; longer chunks are cut there."
    )
    batch_size: int = Field(16, ge=1, description="Chunks in one forward pass.")


class LocalStoreConfig(Frozen):
    """Settings of the store inside this process, for thousands of chunks."""

    is_shared: ClassVar[bool] = False  # by several retrievers
    kind: Literal["local"] = "local"
    folder: str | None = Field(
        None,
        min_length=1,
        description="A folder of this store alone, in which documents outlive the process; without "
        "one they are in memory only.",
    )
    ttl_s: Finite = Field(
        30 * 86_400.0,
        ge=60,
        description="Seconds that a document stays in the folder after its last use.",
    )

    @model_validator(mode="after")
    def _only_files_expire(self) -> Self:
        if self.folder is None and "ttl_s" in self.model_fields_set:
            raise ValueError("store.ttl_s is for documents in a folder: set store.folder too")
        return self

    @property
    def outlives_process(self) -> bool:
        """Whether another process may find the documents of this one."""
        return self.folder is not None


class ServerStoreConfig(Frozen):
    """Connection settings of a Qdrant server, 1.19 or later."""

    is_shared: ClassVar[bool] = True
    outlives_process: ClassVar[bool] = True
    kind: Literal["server"]
    url: str = Field(description="For instance https://qdrant.example.org:6333")
    api_key: SecretStr | None = None
    api_key_env: str | None = Field(None, description="The environment variable with the key.")
    allow_plain_http: bool = Field(
        False, description="Send the key unencrypted, on a network that nobody else reads."
    )
    timeout_s: float = Field(30.0, gt=0)
    ttl_s: Finite = Field(
        86_400.0, ge=60, description="Seconds that a document stays after its last use."
    )

    @model_validator(mode="after")
    def _url_is_usable(self) -> Self:
        url = urlsplit(self.url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"store.url {self.url!r} is no URL: write it as https://host:6333")
        if self.api_key is not None and self.api_key_env is not None:
            raise ValueError("set store.api_key or store.api_key_env, not both")
        has_key = self.api_key is not None or self.api_key_env is not None
        is_readable = url.scheme == "http" and url.hostname not in _LOOPBACK
        if has_key and is_readable and not self.allow_plain_http:
            raise ValueError(
                "the store's API key would cross the network in the clear: use an https URL, or "
                "set store.allow_plain_http on a private network"
            )
        return self

    @property
    def address(self) -> str:
        """The URL for messages, without a user's name and password."""
        url = urlsplit(self.url)
        return url._replace(netloc=url.netloc.rpartition("@")[2]).geturl()

    def key(self) -> str | None:
        """Return the API key, read from the environment where `api_key_env` is set.

        Raises:
            ValueError: `api_key_env` names a variable that is not set.
        """
        if self.api_key_env is None:
            return None if self.api_key is None else self.api_key.get_secret_value()
        if self.api_key_env not in os.environ:
            raise ValueError(
                f"store.api_key_env names {self.api_key_env}, which is not set in this process"
            )
        return os.environ[self.api_key_env]


EmbedderConfig = Annotated[
    LexicalEmbedderConfig | BGEM3EmbedderConfig | SentenceEmbedderConfig,
    Field(discriminator="kind"),
]
StoreConfig = Annotated[LocalStoreConfig | ServerStoreConfig, Field(discriminator="kind")]


class RetrievalConfig(Frozen):
    """Settings of a `Retriever`; the defaults are the paper's."""

    embedder: EmbedderConfig = LexicalEmbedderConfig()
    store: StoreConfig = LocalStoreConfig()
    collection: str = Field("rapid-chunks", min_length=1, description="Its name in the store.")
    chunk_tokens: int = Field(512, ge=1, description="Tokens of the target in a chunk, at most.")
    max_chunk_chars: int | None = Field(
        None, ge=1, description="Characters in a chunk, at most; by default 16 for each token."
    )
    budget_tokens: int | None = Field(
        None, ge=1, description="Tokens of context; by default max(4096, document tokens / 24)."
    )
    floor: float | None = Field(
        None,
        description="The least score of a chunk worth showing, in the embedder's units; set here, "
        "it also decides what 'auto' relies on. By default the embedder's own: cosine 0.3 for "
        "bge-m3, any likeness for the others, which have rules of their own for 'auto'.",
    )
    max_cached_chunks: int = Field(
        131_072,  # a vector store of a thousand files
        ge=1,
        description="Chunks of documents that are ready for the next question. In the local store "
        "the default takes 0.2 GB (words of short chunks) to 1.2 GB (bge-m3) once they are there; "
        "others are read again from its folder. A document with more than half of them counts as "
        "half. Of a server's chunks a retriever knows so many by name; they stay for store.ttl_s.",
    )

    @model_validator(mode="after")
    def _chunks_fit(self) -> Self:
        if self.budget_tokens is not None and self.budget_tokens < self.chunk_tokens:
            raise ValueError(
                f"a budget of {self.budget_tokens} tokens holds no chunk of {self.chunk_tokens}: "
                "raise budget_tokens or lower chunk_tokens"
            )
        most = getattr(self.embedder, "max_length", self.chunk_tokens)
        if most < self.chunk_tokens:
            raise ValueError(
                f"chunks of {self.chunk_tokens} tokens would be cut at {most}: "
                "raise embedder.max_length or lower chunk_tokens"
            )
        return self

    def index_name(self, tokenizer: str) -> str:
        """Return a name of everything beside a text that decides its chunks and vectors."""
        embedder = self.embedder.model_dump(exclude={"device", "batch_size", "batch_tokens"})
        parts = [_INDEX_FORMAT, embedder, self.chunk_tokens, self.max_chunk_chars, tokenizer]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest()

    def budget_for(self, document_tokens: int) -> int:
        """Return the budget, in tokens, for documents of `document_tokens` in total."""
        if self.budget_tokens is not None:
            return self.budget_tokens
        return max(4096, document_tokens // 24)
