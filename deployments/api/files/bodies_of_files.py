"""The bodies of requests about files and vector stores, validated strictly."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from library.files.attribute_filters import AttributeFilter
from library.files.vector_stores import AUTO
from rapid.config import Finite
from rapid.requests.request_fields import MAX_QUERY, Fields, Text, refuse

_MOST_FILES = 500  # of one request, as OpenAI's


class StoreExpiry(Fields):
    """When a vector store expires."""

    anchor: Literal["last_active_at"]
    days: int = Field(ge=1, le=365)


class StaticChunks(Fields):
    """Sizes of passages, in tokens."""

    max_chunk_size_tokens: int = Field(ge=16, le=4096)
    chunk_overlap_tokens: int = Field(0, ge=0)

    @field_validator("chunk_overlap_tokens")
    @classmethod
    def _is_half_at_most(cls, overlap: int, info: ValidationInfo) -> int:
        if 2 * overlap > info.data.get("max_chunk_size_tokens", 2 * overlap):
            refuse("chunk_overlap_tokens", "must be at most half of max_chunk_size_tokens")
        return overlap


class Chunking(Fields):
    """How texts are cut into passages: as the retriever does, or of at most so many tokens."""

    type: Literal["auto", "static"]
    static: StaticChunks | None = None

    def resolve(self) -> dict[str, Any]:
        """Return the strategy as it is carried out."""
        if self.static is None:
            return AUTO
        return {"type": "static", "static": self.static.model_dump()}


def _has_its_sizes(chunking: Chunking) -> Chunking:
    if (chunking.type == "static") != (chunking.static is not None):
        refuse("chunking", "needs 'static' with type 'static', and only then")
    return chunking


ChunkingStrategy = Annotated[Chunking, AfterValidator(_has_its_sizes)]


def _short(facts: dict[str, str]) -> dict[str, str]:
    if len(facts) > 16 or any(len(k) > 64 or len(v) > 512 for k, v in facts.items()):
        refuse("metadata", "may have 16 entries, with keys of 64 and values of 512 characters")
    return facts


Metadata = Annotated[dict[Text, Text], AfterValidator(_short)]
Attributes = dict[Text, bool | int | Finite | Text]
FileIds = Annotated[list[Text], Field(max_length=_MOST_FILES)]


def _check_printable(name: str) -> str:
    if not name.isprintable():
        refuse("name", "must be one line of printable characters")
    return name


Name = Annotated[Text, Field(max_length=256), AfterValidator(_check_printable)]


class NewStore(Fields):
    """The body of ``POST /v1/vector_stores``."""

    name: Name | None = None
    file_ids: FileIds | None = None
    chunking_strategy: ChunkingStrategy | None = None
    expires_after: StoreExpiry | None = None
    metadata: Metadata | None = None


class ChangedStore(Fields):
    """The body of ``POST /v1/vector_stores/{id}``."""

    name: Name | None = None
    expires_after: StoreExpiry | None = None
    metadata: Metadata | None = None


class NewStoreFile(Fields):
    """The body of ``POST /v1/vector_stores/{id}/files``."""

    file_id: Text
    attributes: Attributes | None = None
    chunking_strategy: ChunkingStrategy | None = None


class ChangedStoreFile(Fields):
    """The body of ``POST /v1/vector_stores/{id}/files/{file_id}``."""

    attributes: Attributes


class NewBatch(Fields):
    """The body of ``POST /v1/vector_stores/{id}/file_batches``."""

    file_ids: FileIds = Field(min_length=1)
    attributes: Attributes | None = None
    chunking_strategy: ChunkingStrategy | None = None


class RankingOptions(Fields):
    """Which results of a search are shown; there is one ranker."""

    ranker: Literal["auto", "none", "default-2024-11-15"] | None = None
    score_threshold: Finite | None = None


def _join_query(query: str | list[str]) -> str:
    query = query if isinstance(query, str) else "\n".join(query)
    if not query.strip():
        refuse("query", "is empty")
    if len(query) > MAX_QUERY:
        refuse("query", f"is too long: at most {MAX_QUERY} characters")
    return query


def _refuse_rewriting(is_rewritten: bool | None) -> bool | None:
    if is_rewritten:
        refuse("rewrite_query", "is not supported: the query is searched for as it is")
    return is_rewritten


class StoreSearch(Fields):
    """The body of ``POST /v1/vector_stores/{id}/search``; a query is searched for as it is."""

    query: Annotated[Text | list[Text], AfterValidator(_join_query)]
    filters: AttributeFilter | None = None
    max_num_results: int = Field(10, ge=1, le=50)
    ranking_options: RankingOptions | None = None
    rewrite_query: Annotated[bool | None, AfterValidator(_refuse_rewriting)] = None
