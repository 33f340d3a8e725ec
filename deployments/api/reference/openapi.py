"""The OpenAPI document of the HTTP API: from its routes, and the models of their bodies.

What a path or a query may have is checked by its handler; here it is said once more, and
``tests/deployments/api/test_fuzz.py`` sends what this document allows and what it does not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.routing import BaseRoute, Route

from deployments.api.accounts.account_bodies import ChangedLimits, NewKey, Rotation
from deployments.api.dialects.chat.chat_request import ChatRequest
from deployments.api.dialects.chat.parsing import CHAT_FIELDS
from deployments.api.dialects.completions.completion_dialect import COMPLETION_FIELDS
from deployments.api.dialects.completions.completion_request import CompletionRequest
from deployments.api.dialects.messages.messages_request import MESSAGES_FIELDS, MessagesRequest
from deployments.api.dialects.responses.body.responses_request import (
    RESPONSES_FIELDS,
    ResponsesRequest,
)
from deployments.api.dialects.responses.compacting import CompactRequest
from deployments.api.dialects.responses.conversation_routes import (
    ChangedConversation,
    NewConversation,
    NewItems,
)
from deployments.api.files.bodies_of_files import (
    ChangedStore,
    ChangedStoreFile,
    NewBatch,
    NewStore,
    NewStoreFile,
    StoreSearch,
)
from deployments.api.http.field_table import FieldTable
from deployments.api.models.model_bodies import (
    Detokenization,
    EmbeddingQuestion,
    RerankQuestion,
    Tokenization,
)
from deployments.api.reference.answer_schemas import describe_answers, list_shapes
from rapid.requests.request_fields import Text

Json = dict[str, Any]


class CountedMessages(MessagesRequest):
    """The body of ``POST /v1/messages/count_tokens``: nothing is answered."""

    model: Text = ""
    max_tokens: int = 1


class CountedResponse(ResponsesRequest):
    """The body of ``POST /v1/responses/input_tokens``: nothing is answered."""

    model: Text = ""


_STORE = "/v1/vector_stores/{store_id}"
_CONVERSATION = "/v1/conversations/{conversation_id}"
_BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": Tokenization,
    "/detokenize": Detokenization,
    "/v1/embeddings": EmbeddingQuestion,
    "/v1/rerank": RerankQuestion,
    "/rerank": RerankQuestion,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountedMessages,
    "/v1/responses/input_tokens": CountedResponse,
    "/v1/responses": ResponsesRequest,
    "/v1/responses/compact": CompactRequest,
    "/v1/conversations": NewConversation,
    _CONVERSATION: ChangedConversation,
    f"{_CONVERSATION}/items": NewItems,
    "/v1/vector_stores": NewStore,
    _STORE: ChangedStore,
    f"{_STORE}/search": StoreSearch,
    f"{_STORE}/files": NewStoreFile,
    f"{_STORE}/files/{{file_id}}": ChangedStoreFile,
    f"{_STORE}/file_batches": NewBatch,
    "/v1/admin/keys": NewKey,
    "/v1/admin/keys/{key_id}/rotate": Rotation,
    "/v1/admin/limits/{tenant}": ChangedLimits,
}
_TEXT: Json = {"type": "string"}
_DAY: Json = {"type": "string", "format": "date"}
_UPLOAD: Json = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": _TEXT,
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": {"type": "integer"},
        "prefill": {"enum": ["true", "false"]},
    },
}
_PAGE: Json = {
    "limit": {"type": "integer", "minimum": 1},
    "order": {"enum": ["asc", "desc"]},
    "after": _TEXT,
    "before": _TEXT,
}
_LATER: Json = {name: _PAGE[name] for name in ("limit", "order", "after")}
_QUERIES: dict[str, Json] = {
    "/v1/responses/{response_id}": {
        "stream": {"type": "boolean"},
        "starting_after": {"type": "integer", "minimum": 0},
    },
    "/v1/responses/{response_id}/input_items": _LATER,
    f"{_CONVERSATION}/items": _PAGE,
    "/v1/files": {**_PAGE, "purpose": _TEXT},
    "/v1/vector_stores": _PAGE,
    f"{_STORE}/files": {**_PAGE, "filter": _TEXT},
    f"{_STORE}/file_batches/{{batch_id}}/files": {**_PAGE, "filter": _TEXT},
    "/v1/admin/keys": {"tenant": _TEXT, "limit": _PAGE["limit"], "after": _TEXT},
    "/v1/admin/audit": {"limit": _PAGE["limit"], "after": _TEXT},
    "/v1/usage": {"tenant": _TEXT, "group_by": _TEXT, "start_date": _DAY, "end_date": _DAY},
}
_FIELDS: dict[str, FieldTable] = {
    "/v1/chat/completions": CHAT_FIELDS,
    "/v1/completions": COMPLETION_FIELDS,
    "/v1/messages": MESSAGES_FIELDS,
    "/v1/messages/count_tokens": MESSAGES_FIELDS,
    "/v1/responses/input_tokens": RESPONSES_FIELDS,
    "/v1/responses": RESPONSES_FIELDS,
}


def describe(routes: Iterable[BaseRoute]) -> Json:
    """Return the OpenAPI document of an application with these routes."""
    references, schemas = models_json_schema(
        [(each, "validation") for each in _BODIES.values()],
        ref_template="#/components/schemas/{model}",
    )
    paths: dict[str, Json] = {}
    for route in routes:
        if isinstance(route, Route):
            path = route.path.replace(":path", "")
            for method in (route.methods or set()) - {"HEAD"}:
                operation: Json = {
                    "responses": describe_answers(f"{method} {path}"),
                    "parameters": _list_parameters(path),
                }
                if method == "GET":
                    operation["parameters"] += [
                        {"name": name, "in": "query", "schema": schema}
                        for name, schema in _QUERIES.get(path, {}).items()
                    ]
                if method == "POST" and path == "/v1/files":
                    operation["requestBody"] = _body("multipart/form-data", _UPLOAD)
                elif method == "POST" and path in _BODIES:
                    schema = references[_BODIES[path], "validation"]
                    operation["requestBody"] = _body("application/json", schema)
                    if path in _FIELDS:
                        others = _list_other_fields(_FIELDS[path], _BODIES[path])
                        operation["requestBody"]["x-other-fields"] = others
                paths.setdefault(path, {})[method.lower()] = operation
    key = {"type": "http", "scheme": "bearer"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "RAPID Serve", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": schemas.get("$defs", {}) | list_shapes(),
            "securitySchemes": {"key": key},
        },
        "security": [{"key": []}],
    }


def _list_other_fields(table: FieldTable, schema: type[BaseModel]) -> Json:
    """Return by their classes the fields that a body may have beside those of its schema."""
    return {
        "as_in_chats": sorted({*table.honoured} - {*schema.model_fields}),
        "renamed": dict(table.renamed),
        "refused": {name: list(usual) for name, usual in sorted(table.refused.items())},
        "ignored": sorted(table.ignored),
    }


def _list_parameters(path: str) -> list[Json]:
    names = re.findall(r"{(\w+)}", path)
    return [{"name": each, "in": "path", "required": True, "schema": _TEXT} for each in names]


def _body(media_type: str, schema: Json) -> Json:
    return {"required": True, "content": {media_type: {"schema": schema}}}
