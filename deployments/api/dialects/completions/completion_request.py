"""The body of ``POST /v1/completions``: OpenAI's older fields, and vLLM's beside them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from deployments.api.dialects.chat.chat_request import StreamedFields
from deployments.api.http.dialect import StoredNames
from rapid.config import MAX_DRAFT, Coupling
from rapid.messages import GenerateRequest, RawPrompt
from rapid.requests.method_fields import Explained, MethodFields
from rapid.requests.request_fields import MAX_NAME, Fields, Text, encodable, refuse

MOST_ANSWERS = 128  # of one request: each has its place in the ids of a stream's events
_MAX_TOKENS = 16  # of an answer whose length is not given, as in the API of OpenAI
_MOST_ID = 2**31 - 1  # engines have ids of 32 bits
_FORM = "must be a text, a list of token ids, or a list of texts or of such lists"


def as_prompt_ids(given: list[Any]) -> tuple[int, ...]:
    """Return a list of token ids as a prompt, and refuse others."""
    if not given:
        refuse("prompt", "is empty")
    if not all(type(each) is int and 0 <= each <= _MOST_ID for each in given):
        refuse("prompt", _FORM)
    return tuple(given)


def _as_prompts(given: object) -> object:
    if isinstance(given, str):
        given = [given]
    if not isinstance(given, list):
        refuse("prompt", _FORM)
    if given and type(given[0]) is int:
        return (as_prompt_ids(given),)
    if not given or len(given) > MOST_ANSWERS:
        refuse("prompt", f"must have 1 to {MOST_ANSWERS} entries" if given else "is empty")
    prompts: list[RawPrompt] = []
    for each in given:
        if isinstance(each, list):
            prompts.append(as_prompt_ids(each))
        elif isinstance(each, str) and each:
            prompts.append(encodable(each))
        else:
            refuse("prompt", _FORM if each != "" else "is empty")
    return tuple(prompts)


class CompletionOptions(Fields):
    """The ``rapid`` object of a completion; nothing is retrieved for a prompt that is no chat."""

    mode: Literal["auto", "lossless", "plain"] | None = None
    max_draft: int | None = Field(None, ge=1, le=MAX_DRAFT)
    coupling: Coupling | None = None
    draft_top_k: int | None = Field(None, ge=1)
    explain: Explained | None = None
    progress: bool | None = None

    def as_method(self) -> MethodFields:
        """Return the fields that chats have too."""
        own = self.model_dump(exclude_unset=True, exclude={"progress"})
        return MethodFields.model_validate(own)


class CompletionRequest(StreamedFields):
    """The body of ``POST /v1/completions``."""

    model_config = ConfigDict(extra="ignore")

    model: Text = Field(max_length=MAX_NAME)
    prompt: Annotated[
        tuple[str | tuple[int, ...], ...],
        BeforeValidator(
            _as_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]
        ),
    ]
    max_tokens: int | None = Field(None, ge=0)
    n: int | None = Field(None, ge=1)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    add_special_tokens: bool | None = None
    rapid: CompletionOptions | None = None

    @field_validator("n")
    @classmethod
    def _is_not_too_many(cls, n: int | None, info: ValidationInfo) -> int | None:
        if n is not None and n * len(info.data.get("prompt", ())) > MOST_ANSWERS:
            refuse("n", f"must be at most {MOST_ANSWERS} with the number of prompts as a factor")
        return n

    @field_validator("rapid")
    @classmethod
    def _explains_one(cls, given: CompletionOptions | None, info: ValidationInfo) -> Any:
        explained = given and given.explain
        if explained not in (None, "none") and len(info.data.get("prompt", ())) > 1:
            refuse("explain", f"has explain: {explained}, which goes with one prompt")
        return given

    @property
    def stored(self) -> StoredNames | None:
        """The stored documents that the request names: none can be."""
        return None

    @property
    def says_progress(self) -> bool:
        """Whether a stream has comments that say how far the server is."""
        return bool(self.rapid and self.rapid.progress)

    @property
    def shows_thinking(self) -> bool:
        """Whether the answer includes the model's thinking: here it is part of the text."""
        return True

    @property
    def num_chars(self) -> int:
        """The characters of all prompts; a token id counts as one."""
        return sum(map(len, self.prompt))

    def field_of(self, param: str | None) -> str | None:
        """Return the field of this body that a refusal by the orchestrator is about."""
        return "prompt" if param == "messages" else param

    def as_generate_request(
        self, request_id: str, tenant: str, default_temperature: float | None = None
    ) -> GenerateRequest:
        """Convert the body to a `GenerateRequest`; without another default its temperature is 1."""
        sampling = self.as_sampling(1.0 if default_temperature is None else default_temperature)
        sampling.setdefault("max_tokens", max(_MAX_TOKENS, self.min_tokens or 0))
        rapid = self.rapid or CompletionOptions()
        return GenerateRequest(
            request_id=request_id,
            tenant=tenant,
            messages=(),
            prompts=self.prompt,
            adds_special_tokens=self.add_special_tokens is not False,
            echoes_prompt=bool(self.echo),
            num_choices=self.n or 1,
            num_logprobs=self.logprobs,
            is_streamed=bool(self.stream),
            speculation=rapid.as_method().as_speculation(),
            **rapid.as_method().as_explanation(),
            cache_salt=self.cache_salt or "",
            priority=self.priority or 0,
            model=self.model,
            **sampling,
        )
