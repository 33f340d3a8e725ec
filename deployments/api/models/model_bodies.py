"""The bodies of requests for tokens, vectors and relevance, validated strictly."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from deployments.api.dialects.chat.chat_request import ChatMessage, names_in
from deployments.api.dialects.chat.parsing import MESSAGES_OF_CHATS, TOOLS_OF_CHATS
from deployments.api.dialects.completions.completion_request import as_prompt_ids
from deployments.api.http.dialect import StoredNames
from deployments.api.http.field_table import FieldTable
from rapid.calling.tool_fields import MOST_TOOLS, ToolFields, as_tools
from rapid.messages import GenerateRequest
from rapid.requests.request_fields import MAX_NAME, MAX_QUERY, Fields, Text, encodable, refuse

_MOST_TEXTS = 2048  # of one request, as OpenAI's

# Fields of vLLM, Cohere, Jina and TEI: the embedder's own length cuts texts behind their beginning.
_OF_EMBEDDERS: dict[str, tuple[Any, ...]] = {
    "activation": (),
    "add_special_tokens": (True,),
    "chat_template": (),
    "padding": ("do_not_pad",),
    "softmax": (),
    "truncate": (True, "END"),
    "truncate_prompt_tokens": (),
    "truncation": (True,),
    "truncation_side": ("right",),
    "use_activation": (True,),
}
_NAMES = ("cache_salt", "mm_processor_kwargs", "priority", "request_id", "user")


class ModelBody(Fields):
    """A body that names a model; fields that change nothing are passed over and named, as in chats.

    Attributes:
        refused: The fields of other servers that are not supported, as of a `FieldTable`.
        passed: Those that change no answer.
        nested: The tables of fields with objects.
    """

    model_config = ConfigDict(extra="ignore")
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    passed: ClassVar[Collection[str]] = ()
    nested: ClassVar[Mapping[str, FieldTable]] = {}

    model: Text | None = Field(None, max_length=MAX_NAME)
    _ignored: tuple[str, ...] = PrivateAttr(())

    @classmethod
    def table(cls) -> FieldTable:
        """Return what is done with the fields of such a body."""
        return FieldTable(cls.model_fields, cls.refused, cls.passed, nested=cls.nested)

    @model_validator(mode="wrap")
    @classmethod
    def _classify(cls, fields: Any, validate: Any) -> Any:
        ignored = cls.table().list_ignored(fields)
        body = validate(fields)
        body._ignored = ignored
        return body

    @property
    def receipt(self) -> dict[str, Any]:
        """What the answer says of fields that changed nothing."""
        return {"rapid": {"ignored": [*self._ignored]}} if self._ignored else {}


class Tokenization(ModelBody):
    """The body of ``POST /tokenize``, in vLLM's shape."""

    refused = {  # noqa: RUF012 - of vLLM
        "chat_template": (),
        "chat_template_kwargs": ({},),
        "continue_final_message": (False,),
    }
    passed = ("media_io_kwargs", "mm_processor_kwargs")
    nested = {"messages": MESSAGES_OF_CHATS, "tools": TOOLS_OF_CHATS}  # noqa: RUF012

    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = Field(
        None, validate_default=True
    )
    add_special_tokens: bool | None = None
    add_generation_prompt: Literal[True] | None = None
    return_token_strs: bool | None = None
    tools: Annotated[list[ToolFields], Field(max_length=MOST_TOOLS)] | None = None

    @field_validator("messages")
    @classmethod
    def _is_one_of_two(cls, given: Any, info: ValidationInfo) -> Any:
        if (given is None) == (info.data.get("prompt") is None) and "prompt" in info.data:
            refuse("messages", "or prompt must be given, one of them")
        return given

    @field_validator("add_special_tokens")
    @classmethod
    def _is_of_a_prompt(cls, given: bool | None, info: ValidationInfo) -> bool | None:
        if given and info.data.get("prompt") is None:
            refuse("switch", "goes with prompt: those of messages come from their template")
        return given

    @field_validator("tools")
    @classmethod
    def _are_of_messages(cls, given: Any, info: ValidationInfo) -> Any:
        if given and info.data.get("prompt") is not None:
            refuse("tools", "go with messages, which the template writes them into")
        return given

    @property
    def stored(self) -> StoredNames | None:
        """The stored documents that its messages name; None for none."""
        return names_in(self.messages or ())

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
            tools=as_tools(self.tools, None, is_parallel=True),
            model=model,
        )


def _as_ids(given: object) -> object:
    if not isinstance(given, list):
        refuse("tokens", "must be a list of token ids")
    return as_prompt_ids(given) if given else ()


class Detokenization(ModelBody):
    """The body of ``POST /detokenize``."""

    refused = {"skip_special_tokens": (False,)}  # noqa: RUF012 - of SGLang

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

    refused = _OF_EMBEDDERS | {
        "dimensions": (),
        "embed_dtype": ("float32",),
        "embedding_type": ("float",),
        "endianness": ("native", "little"),
        "input_type": (),
        "late_chunking": (False,),
        "messages": (),
        "normalize": (True,),
        "normalized": (True,),
        "prompt_name": (),
        "task": (),
    }
    passed = _NAMES

    input: _Texts
    encoding_format: Literal["float", "base64"] | None = None


def _as_documents(given: object) -> object:
    if isinstance(given, list):  # Cohere's and Jina's documents may be objects with a text
        given = [each.get("text") if isinstance(each, dict) else each for each in given]
    return _as_texts(given) if isinstance(given, list) else refuse("documents", "must be a list")


class RerankQuestion(ModelBody):
    """The body of ``POST /v1/rerank``, in the shape of Cohere, Jina and vLLM."""

    refused = _OF_EMBEDDERS | {
        "instruction": (),
        "max_chunks_per_doc": (),
        "max_tokens_per_doc": (),
        "rank_fields": ([], ["text"]),
        "raw_scores": (),
        "return_embeddings": (False,),
    }
    passed = _NAMES

    query: Text = Field(min_length=1, max_length=MAX_QUERY)
    documents: Annotated[
        tuple[str, ...],
        BeforeValidator(_as_documents, json_schema_input_type=list[str] | list[dict[str, str]]),
    ]
    top_n: int | None = Field(None, ge=0)
    return_documents: bool | None = None
