"""What all models of a request are made of."""

from __future__ import annotations

from typing import Annotated, NoReturn

from pydantic import AfterValidator, BaseModel, ConfigDict
from pydantic_core import PydanticCustomError

MAX_NAME = 256  # characters of the names of a model, of a document and of a salt
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


class OpenFields(Fields):
    """Base of models whose other fields are ignored, or left to other checks."""

    model_config = ConfigDict(extra="ignore")
