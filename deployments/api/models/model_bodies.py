"""The bodies of requests for tokens, vectors and relevance, validated strictly."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from deployments.api.dialects.chat.chat_request import ChatMessage
from deployments.api.dialects.completions.completion_request import as_prompt_ids
from rapid.messages import GenerateRequest
from rapid.requests import MAX_NAME, MAX_QUERY, Fields, Text, encodable, refuse

_MOST_TEXTS = 2048  # of one request, as OpenAI's


class ModelBody(Fields):
    """A body that names a model; unknown fields are passed over, as in chats."""

    model_config = ConfigDict(extra="ignore")

    model: Text | None = Field(None, max_length=MAX_NAME)


class Tokenization(ModelBody):
    """The body of ``POST /tokenize``, in vLLM's shape."""

    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = Field(
        None, validate_default=True
    )
    add_special_tokens: bool | None = None
    add_generation_prompt: Literal[True] | None = None
    return_token_strs: bool | None = None

    @field_validator("messages")
    @classmethod
    def _is_one_of_two(cls, given: Any, info: ValidationInfo) -> Any:
        if (given is None) == (info.data.get("prompt") is None) and "prompt" in info.data:
            refuse("messages", "or prompt must be given, one of them")
        return given

    @property
    def num_chars(self) -> int:
        """The characters of its texts."""
        return len(self.prompt or "") + sum(len(each.content) for each in self.messages or ())

    def as_request(self, model: str, request_id: str, tenant: str) -> GenerateRequest:
        """Return a request with the prompt whose tokens are asked for."""
        return GenerateRequest(
            request_id,
            tenant,
            tuple(message.as_message() for message in self.messages or ()),
            prompts=() if self.prompt is None else (self.prompt,),
            adds_special_tokens=self.add_special_tokens is not False,
            model=model,
        )


def _as_ids(given: object) -> object:
    if not isinstance(given, list):
        refuse("tokens", "must be a list of token ids")
    return as_prompt_ids(given) if given else ()


class Detokenization(ModelBody):
    """The body of ``POST /detokenize``."""

    tokens: Annotated[tuple[int, ...], BeforeValidator(_as_ids, json_schema_input_type=list[int])]


def _as_texts(given: object) -> object:
    if isinstance(given, str):
        given = [given]
    if isinstance(given, list) and any(isinstance(each, int | list) for each in given):
        # Ids are of one tokenizer: those of OpenAI's, which some clients send, mean other texts.
        what = "(with LangChain: check_embedding_ctx_length=False)"
        refuse("input", f"must be texts and no token ids {what}")
    if not isinstance(given, list) or not given or len(given) > _MOST_TEXTS:
        refuse("input", f"must be a text or a list of 1 to {_MOST_TEXTS} texts")
    for each in given:
        if not isinstance(each, str) or not each:
            refuse("input", "must have texts only, none of them empty")
        encodable(each)
    return tuple(given)


_Texts = Annotated[
    tuple[str, ...], BeforeValidator(_as_texts, json_schema_input_type=str | list[str])
]


class EmbeddingQuestion(ModelBody):
    """The body of ``POST /v1/embeddings``."""

    input: _Texts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Any = None

    @field_validator("dimensions")
    @classmethod
    def _is_whole(cls, given: Any) -> Any:
        if given is not None:
            refuse("dimensions", "is not supported: vectors are whole, leave it out")
        return given


def _as_documents(given: object) -> object:
    if isinstance(given, list):  # Cohere's and Jina's documents may be objects with a text
        given = [each.get("text") if isinstance(each, dict) else each for each in given]
    return _as_texts(given) if isinstance(given, list) else refuse("documents", "must be a list")


class RerankQuestion(ModelBody):
    """The body of ``POST /v1/rerank``, in the shape of Cohere, Jina and vLLM."""

    query: Text = Field(min_length=1, max_length=MAX_QUERY)
    documents: Annotated[
        tuple[str, ...],
        BeforeValidator(_as_documents, json_schema_input_type=list[str] | list[dict[str, str]]),
    ]
    top_n: int | None = Field(None, ge=0)
    return_documents: bool | None = None
