"""The tools of a request: functions, the search of stored documents, and the choice of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from deployments.api.dialects.responses.body.input_items import Json
from deployments.api.files.bodies_of_files import RankingOptions
from deployments.api.http.field_table import FieldTable
from library.files.attribute_filters import AttributeFilter
from rapid.errors import BadRequest
from rapid.requests.refusing import validate_fields
from rapid.requests.request_fields import OpenFields, Text

_TOOL_CHOICES = ("none", "auto", "required")


class FileSearch(OpenFields):
    """The tool that searches stored documents; the answer's model reads all of them.

    Attributes:
        max_num_results: The most passages that the answer lists.
        ranking_options: The least score of these.
    """

    type: Literal["file_search"]
    vector_store_ids: list[Text] = Field(min_length=1)
    filters: AttributeFilter | None = None
    max_num_results: int | None = Field(None, ge=1, le=50)
    ranking_options: RankingOptions | None = None


_SEARCH_FIELDS = FieldTable(RankingOptions.model_fields, {"hybrid_search": ()})
TOOLS = FieldTable(  # of both kinds
    {*FileSearch.model_fields, "type", "name", "description", "parameters", "strict"},
    {"allowed_callers": (["direct"],), "async": (False,)},
    {"defer_loading", "output_schema"},
    nested={"ranking_options": _SEARCH_FIELDS},
)


def read_tools(tools: Sequence[Json], choice: Any) -> tuple[FileSearch | None, dict[int, Json]]:
    """Return the search of stored documents, and the functions as a chat has them, by place.

    Args:
        tools: The tools of a request.
        choice: Its ``tool_choice``.

    Raises:
        BadRequest: A tool or the choice is invalid or not supported; it is named.
    """
    search, functions = None, dict[int, Json]()
    for index, tool in enumerate(tools):
        kind, where = tool.get("type"), f"tools[{index}]"
        if kind == "function":
            names = ("name", "description", "parameters", "strict")
            given = {name: tool[name] for name in names if tool.get(name) is not None}
            functions[index] = {"type": "function", "function": given}
        elif kind == "file_search":
            if search is not None:
                raise BadRequest(f"{where} is a second file_search: name all stores in one.", where)
            try:
                search = validate_fields(FileSearch, tool)
            except BadRequest as refused:
                param = f"{where}.{refused.param}"
                raise BadRequest(f"{where}.{refused}", param, refused.code) from None
        else:
            message = f"{where}.type {kind!r} is not supported: a tool is a function or file_search"
            raise BadRequest(message, f"{where}.type", "unsupported")
    if isinstance(choice, str) and choice not in _TOOL_CHOICES:
        known = ", ".join(map(repr, _TOOL_CHOICES))
        raise BadRequest(f"tool_choice must be one of {known}, or an object.", "tool_choice")
    return None if choice == "none" else search, functions


def allow(
    choice: Json, search: FileSearch | None, functions: dict[int, Json]
) -> tuple[FileSearch | None, dict[int, Json], str]:
    """Return the tools that a choice allows, of which alone the model is told, and its mode."""
    allowed, mode = choice.get("tools"), choice.get("mode", "auto")
    if mode not in ("auto", "required"):
        raise BadRequest("tool_choice.mode must be 'auto' or 'required'.", "tool_choice.mode")
    is_list = isinstance(allowed, list) and all(isinstance(each, dict) for each in allowed)
    if not is_list or not allowed:
        raise BadRequest("tool_choice.tools must be a list of tools.", "tool_choice.tools")
    kinds = [each.get("type") for each in allowed]
    names = [each.get("name") for each in allowed if each.get("type") == "function"]
    known = [each["function"].get("name") for each in functions.values()]
    for index, kind in enumerate(kinds):
        is_known = search is not None if kind == "file_search" else kind == "function"
        if not is_known or (kind == "function" and allowed[index].get("name") not in known):
            param = f"tool_choice.tools[{index}]"
            raise BadRequest(f"{param} is none of the tools.", param)
    kept = {at: each for at, each in functions.items() if each["function"].get("name") in names}
    return search if "file_search" in kinds else None, kept, mode


def choose(choice: str | Json | None) -> str | Json | None:
    """Return a choice among functions as a chat has it; a search is made in any case."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return "auto" if choice.get("type") == "file_search" else choice
