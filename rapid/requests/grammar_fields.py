"""What an answer follows: ``response_format``, ``structured_outputs``, and their grammars."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from rapid.constraints.schemas.schema_checks import UnusableGrammar
from rapid.constraints.structured_outputs import (
    compile_choices,
    compile_lark,
    compile_regex,
    compile_schema,
)
from rapid.requests.request_fields import MAX_NAME, Fields, Text, refuse

_MAX_SCHEMA = 2**20  # characters of one given as JSON: read in 0.03 s, in which all else waits


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
