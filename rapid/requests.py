"""The fields of a request, with their bounds, as the HTTP API and `rapid.open` take them.

They are validated strictly: `"1"` is not a number, and an unknown field is refused. Both ways to
ask refuse the same values in the same words. A message of a validator continues the name of its
field, which `bad_request` puts before it.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from rapid.chat_messages import Document, Message
from rapid.config import MAX_DRAFT, PAPER, Coupling, Finite, KnownTransfer, Mode, TooLong
from rapid.constraints.schemas.schema_checks import UnusableGrammar
from rapid.constraints.structured_outputs import (
    compile_choices,
    compile_lark,
    compile_regex,
    compile_schema,
)
from rapid.errors import BadRequest
from rapid.messages import SpeculationRequest

MAX_STOPS = 4  # as in the API of OpenAI
MAX_STOP_LENGTH = 1000  # characters of a stop sequence
MAX_BAD_WORDS = 256  # texts of `bad_words`: each is looked for behind every token
MAX_NAME = 256  # characters of the names of a model, of a document and of a salt
_MAX_SCHEMA = 2**20  # characters of one given as JSON: read in 0.03 s, in which all else waits
MAX_QUERY = 2**14  # characters: about what the longest embedders read


def refuse(code: str, message: str) -> NoReturn:
    """Raise a validation error whose `message` continues the field's name."""
    raise PydanticCustomError(code, "{what}", {"what": message})


def encodable(text: str) -> str:
    """Return a text that has an encoding, and refuse others."""
    try:
        text.encode()
    except UnicodeEncodeError:
        refuse("unicode", "has a lone surrogate (half of an escaped character)")
    return text


Text = Annotated[str, AfterValidator(encodable)]


class Fields(BaseModel):
    """Base of the models of a request."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", hide_input_in_errors=True)


class Turn(Fields):
    """A message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text

    def as_message(self) -> Message:
        """Return the message in a role that chat templates know: `developer` becomes `system`."""
        return Message("system" if self.role == "developer" else self.role, self.content)


AnyTurn = TypeVar("AnyTurn", bound=Turn)


def someone_asks(turns: list[AnyTurn]) -> list[AnyTurn]:
    """Return the messages of a conversation in which there is a question, and refuse others."""
    if all(turn.role != "user" for turn in turns):
        refuse("messages", "has no message with role 'user': there is no question")
    last = next(turn.content for turn in reversed(turns) if turn.role == "user")
    if not last.strip():
        refuse("messages", "has an empty last message with role 'user': there is no question")
    return turns


class AttachedDocument(Fields):
    """A document attached to the request.

    Attributes:
        message: Number of the user's message with which it came; None for the first one.
    """

    name: Text = Field(min_length=1, max_length=MAX_NAME)
    text: Text
    message: int | None = Field(None, ge=0)

    @field_validator("name")
    @classmethod
    def _name_is_one_line(cls, name: str) -> str:
        if not name.isprintable():
            refuse("name", "must be one line of printable characters")
        return name

    @field_validator("text")
    @classmethod
    def _text_is_not_blank(cls, text: str) -> str:
        if not text.strip():
            refuse("text", "is empty")
        return text

    def as_document(self) -> Document:
        """Return the document as the orchestrator gets it."""
        return Document(self.name, self.text)


def _names_are_distinct(documents: list[AttachedDocument]) -> list[AttachedDocument]:
    names: set[str] = set()
    for document in documents:
        if document.name in names:
            refuse("documents", f"has two documents named {document.name!r}: rename one")
        names.add(document.name)
    return documents


Documents = Annotated[list[AttachedDocument], AfterValidator(_names_are_distinct)]


def _as_stops(stop: object) -> object:
    if isinstance(stop, str):
        return (stop,)
    if stop is not None and not isinstance(stop, list | tuple):
        refuse("stop", "must be a string or a list of strings")
    return stop if stop is None else tuple(stop)


Stop = Annotated[Text, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Stops = Annotated[
    tuple[Stop, ...] | None,
    BeforeValidator(_as_stops, json_schema_input_type=Stop | list[Stop] | None),
]


def _as_biases(given: object) -> object:
    """Return pairs of a token id and its bias, by id; keys of JSON are strings."""
    if given is None or given == []:
        return None
    if not isinstance(given, Mapping):
        refuse("logit_bias", "must be an object of token ids and numbers")
    # Every lease of a request carries them, so that their number is bounded: as OpenAI's, 300.
    if len(given) > 300:
        refuse("logit_bias", "is too long: at most 300 tokens")
    biases: dict[int, float] = {}
    for token, bias in given.items():
        is_id = isinstance(token, int | str) and re.fullmatch("[0-9]{1,9}", str(token), re.ASCII)
        if not is_id:
            refuse("logit_bias", "must have ids of tokens as its keys, such as '50256'")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            refuse("logit_bias", "must have numbers from -100 to 100 as its values")
        if int(token) in biases:
            refuse("logit_bias", f"names token {int(token)} twice")
        biases[int(token)] = float(bias)
    return tuple(sorted(biases.items()))


def _compile(compiler: Callable[[object], str], given_as: Any) -> BeforeValidator:
    def validate(given: object) -> str | None:
        try:
            return None if given is None else compiler(given)
        except UnusableGrammar as error:
            refuse("grammar", str(error))

    return BeforeValidator(validate, json_schema_input_type=given_as | None)


def _compile_object_or_text(given: object) -> str:
    """Return the grammar of a schema that may be given as JSON, as vLLM has it."""
    if isinstance(given, str):
        if len(given) > _MAX_SCHEMA:
            raise UnusableGrammar(f"is too long: {_MAX_SCHEMA} characters at most")
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            raise UnusableGrammar("must be a JSON schema: an object, or one as JSON") from None
    return compile_schema(given)


# As given, and from then on as a grammar.
Schema = Annotated[str | None, _compile(compile_schema, dict[str, Any])]
SchemaOrText = Annotated[str | None, _compile(_compile_object_or_text, dict[str, Any] | str)]
Pattern = Annotated[str | None, _compile(compile_regex, str)]
Choices = Annotated[str | None, _compile(compile_choices, list[str])]
Rules = Annotated[str | None, _compile(compile_lark, str)]


class NamedSchema(Fields):
    """The ``json_schema`` of a ``response_format``; `strict` changes nothing: all are enforced."""

    name: Text = Field("", max_length=MAX_NAME)
    description: Text | None = None
    schema_: Schema = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Fields):
    """OpenAI's ``response_format``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _has_a_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            refuse("json_schema", "must have a json_schema with type 'json_schema', and only then")
        return self

    @property
    def grammar(self) -> str | None:
        """The grammar of the answer; None for any text."""
        if self.type == "text":
            return None
        given = self.json_schema.schema_ if self.json_schema is not None else None
        return given or compile_schema({"type": "object"})


class StructuredOutputs(Fields):
    """VLLM's ``structured_outputs``, of which exactly one form is given.

    What vLLM's has beside it changes nothing, as each grammar is followed in one way: JSON has no
    white space, and objects have the properties of their schema.
    """

    json_: SchemaOrText = Field(None, alias="json")
    regex: Pattern = None
    choice: Choices = None
    grammar: Rules = None
    json_object: Literal[True] | None = None
    disable_fallback: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: None = None
    structural_tag: None = None

    @model_validator(mode="after")
    def _is_one(self) -> StructuredOutputs:
        forms = self.json_, self.regex, self.choice, self.grammar, self.json_object
        if sum(each is not None for each in forms) != 1:
            names = "json, regex, choice, grammar or json_object"
            refuse("structured_outputs", f"must have one of {names}")
        return self

    def as_grammar(self) -> str:
        """Return the grammar of the answer."""
        given = self.json_ or self.regex or self.choice or self.grammar
        return given or compile_schema({"type": "object"})


Biases = Annotated[
    tuple[tuple[int, float], ...] | None,
    BeforeValidator(_as_biases, json_schema_input_type=dict[str, float] | None),
]


def _as_ids(given: object) -> object:
    return tuple(given) or None if isinstance(given, list | tuple) else given


# Every lease of a request carries them, so that their number is bounded.
_Ids = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(max_length=1024)]
AllowedIds = Annotated[_Ids | None, BeforeValidator(_as_ids)]
BadTexts = Annotated[
    Annotated[tuple[Stop, ...], Field(max_length=MAX_BAD_WORDS)] | None, BeforeValidator(_as_ids)
]


class SamplingFields(Fields):
    """How tokens are drawn, and where an answer ends; None leaves a field to its default."""

    temperature: Finite | None = Field(None, ge=0, le=2)
    top_p: Finite | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: Stops = Field(None, max_length=MAX_STOPS)
    max_tokens: int | None = Field(None, ge=1)
    logit_bias: Biases = None
    presence_penalty: Finite | None = Field(None, ge=-2, le=2)
    frequency_penalty: Finite | None = Field(None, ge=-2, le=2)
    min_tokens: int | None = Field(None, ge=0)
    allowed_token_ids: AllowedIds = None
    repetition_penalty: Finite | None = Field(None, gt=0, le=100)
    min_p: Finite | None = Field(None, ge=0, le=1)
    bad_words: BadTexts = None
    stop_token_ids: AllowedIds = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @field_validator("min_tokens")
    @classmethod
    def _is_no_more_than_the_most(cls, given: int | None, info: ValidationInfo) -> int | None:
        most = info.data.get("max_tokens")
        if given is not None and most is not None and given > most:
            refuse("min_tokens", f"is more than max_tokens, {most}")
        return given

    @field_validator("structured_outputs")
    @classmethod
    def _one_form(
        cls, given: StructuredOutputs | None, info: ValidationInfo
    ) -> StructuredOutputs | None:
        other = info.data.get("response_format")
        if given is not None and other is not None and other.grammar is not None:
            refuse("structured_outputs", "says the same as response_format: send one of them")
        return given

    @property
    def grammar(self) -> str | None:
        """The grammar of the answer; None for any text."""
        if self.structured_outputs is not None:
            return self.structured_outputs.as_grammar()
        return self.response_format.grammar if self.response_format is not None else None

    def as_sampling(self, default_temperature: float) -> dict[str, Any]:
        """Return the fields of a `GenerateRequest` that are given, and always a temperature."""
        names = SamplingFields.model_fields.keys() - {"response_format", "structured_outputs"}
        fields = {name: getattr(self, name) for name in (*names, "grammar")}
        given = {name: value for name, value in fields.items() if value is not None}
        if "grammar" in given:
            for name in ("min_tokens", "allowed_token_ids", "bad_words", "ignore_eos"):
                if given.get(name):
                    # Where the grammar must end and this must go on, no token would be left.
                    raise BadRequest(f"{name} contradicts a grammar: leave one out", name)
        return {"temperature": default_temperature} | given


Explained = Literal["tokens", "writers", "none"]
"""What a receipt explains; `writers` leaves the ids of the prompts out."""


class MethodFields(Fields):
    """The settings of retrieval and speculation; None leaves a field to the configuration."""

    mode: Mode | None = None
    transfer: KnownTransfer | None = None
    eta: Finite | None = Field(None, ge=0, le=1000)
    max_draft: int | None = Field(None, ge=1, le=MAX_DRAFT)
    coupling: Coupling | None = None
    plausibility: Finite | None = Field(None, ge=0, le=1)
    draft_top_k: int | None = Field(None, ge=1)
    retrieval_tokens: int | None = Field(None, ge=1)
    query: Text | None = Field(None, max_length=MAX_QUERY)
    refresh: bool | None = None
    too_long: TooLong | None = None
    truncation: Literal["auto", "disabled"] | None = None
    citations: bool | None = None
    explain: Explained | None = None
    penalize_documents: bool | None = None

    @field_validator(*PAPER)
    @classmethod
    def _paper_has_no_variants(cls, value: object, info: ValidationInfo) -> object:
        own = PAPER[info.field_name or ""]
        if info.data.get("mode") == "paper" and value not in (None, own):
            refuse("paper", f"must be left out with mode 'paper', whose own is {own!r}")
        return value

    @field_validator("query")
    @classmethod
    def _query_is_not_blank(cls, query: str | None) -> str | None:
        if query is not None and not query.strip():
            refuse("query", "is empty: leave it out to search for the last user message")
        return query

    def as_explanation(self) -> dict[str, Any]:
        """Return the fields of a request that say what its receipt explains."""
        return {
            "explain": self.explain in ("tokens", "writers"),
            "explains_prompts": self.explain != "writers",
        }

    def as_speculation(self) -> SpeculationRequest:
        """Return the fields that concern speculation."""
        cut_is_off = self.draft_top_k is None and "draft_top_k" in self.model_fields_set
        return SpeculationRequest(
            mode=self.mode or "auto",
            transfer=self.transfer,
            eta=self.eta,
            max_draft=self.max_draft,
            coupling=self.coupling,
            plausibility=self.plausibility,
            draft_top_k=self.draft_top_k,
            all_draft_tokens=cut_is_off,
            refresh=bool(self.refresh),
            too_long=self.too_long or "refuse",
            truncates=self.truncation == "auto",
        )


_MESSAGES = {
    "too_short": "must not be empty",
    "string_too_short": "must not be empty",
    "too_long": "is too long: at most {max_length}",
    "string_too_long": "is too long: at most {max_length}",
    "model_type": "must be an object",
    "dict_type": "must be an object",
    "list_type": "must be a list",
    "none_required": "is not supported yet: leave it out",
}


def bad_request(error: ValidationError, options: type[Fields]) -> BadRequest:
    """Return the refusal for the first finding of a validation, which it names.

    An unknown field may have been meant for one of `options`.
    """
    first = error.errors(include_url=False, include_input=False)[0]
    param, kind = _param(first["loc"]), first["type"]
    if kind == "extra_forbidden":
        known = AttachedDocument if "documents" in first["loc"] else options
        close = difflib.get_close_matches(str(first["loc"][-1]), list(known.model_fields), n=1)
        hint = f": did you mean {close[0]!r}?" if close else ""
        return BadRequest(f"{param} is not known{hint}", param, "unknown_parameter")
    if kind == "missing":
        return BadRequest(f"{param} is missing", param, "missing_required_parameter")
    message = first["msg"].replace("Input should be", "must be")
    if kind in _MESSAGES:
        message = _MESSAGES[kind].format(**first.get("ctx", {}))
    return BadRequest(f"{param} {message}", param, "invalid_value")


def _param(loc: Sequence[int | str]) -> str:
    """Format a location such as ``("messages", 0, "content")`` as ``messages[0].content``."""
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
    return param.removeprefix(".")
