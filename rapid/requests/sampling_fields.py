"""How tokens are drawn, and where an answer ends."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from rapid.config import Finite
from rapid.errors import BadRequest
from rapid.requests.grammar_fields import ResponseFormat, StructuredOutputs
from rapid.requests.request_fields import Fields, Text, refuse

MAX_STOPS = 4  # as in the API of OpenAI
MAX_STOP_LENGTH = 1000  # characters of a stop sequence
MAX_BAD_WORDS = 256  # texts of `bad_words`: each is looked for behind every token


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
