"""The answers of the HTTP API, as JSON Schemas for its OpenAPI document.

A shape lists the fields that an object always has, each with its kind: a type of JSON; ``=value``
for that string alone; ``[kind]`` for an array; another shape; or several of these with ``|``
between. A ``?`` behind one means that it may be null. Objects may have more fields.
``tests/deployments/api/test_fuzz.py`` holds answers to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Json = dict[str, Any]

_PAGED = "object:=list first_id:string? last_id:string? has_more:boolean "
_SHAPES: Mapping[str, str] = {
    "Failure": "error:FailureDetails",
    "FailureDetails": "message:string type:string code:string?",
    "Deleted": "id:string object:string deleted:boolean",
    "Model": "id:string object:=model created:integer owned_by:string",
    "Models": "object:=list data:[Model]",
    "Usage": "prompt_tokens:integer completion_tokens:integer total_tokens:integer",
    "ChatChoice": "index:integer message:object finish_reason:string?",
    "ChatAnswer": (
        "id:string object:=chat.completion created:integer model:string choices:[ChatChoice] "
        "usage:Usage rapid:object metrics:object"
    ),
    "CompletionChoice": "index:integer text:string finish_reason:string?",
    "CompletionAnswer": (
        "id:string object:=text_completion created:integer model:string "
        "choices:[CompletionChoice] usage:Usage rapid:object"
    ),
    "MessageAnswer": (
        "id:string type:=message role:=assistant model:string content:[object] "
        "stop_reason:string? usage:object rapid:object"
    ),
    "ResponseAnswer": (
        "id:string object:=response created_at:integer status:string background:boolean "
        "model:string output:[MessageItem|ThoughtsItem|SearchItem|CallItem] "
        "error:ResponseError? usage:ResponseUsage? incomplete_details:CutDetails? "
        "metadata:object? tools:[object]"
    ),
    "ResponseError": "code:string message:string",
    "ResponseUsage": (
        "input_tokens:integer input_tokens_details:object output_tokens:integer "
        "output_tokens_details:object total_tokens:integer"
    ),
    "CutDetails": "reason:string",
    "MessageItem": "id:string type:=message role:string status:string content:[ItemPart]",
    "ItemPart": "OutputText|InputText|Part|RefusalPart|FilePart",
    "OutputText": "type:=output_text text:string annotations:[object]",
    "InputText": "type:=input_text text:string",
    "RefusalPart": "type:=refusal refusal:string",
    "FilePart": "type:=input_file file_id:string",
    "ThoughtsItem": (
        "id:string type:=reasoning status:string summary:[object] content:[ThoughtsPart]"
    ),
    "ThoughtsPart": "type:=reasoning_text text:string",
    "SearchItem": (
        "id:string type:=file_search_call status:string queries:[string] results:[SearchResult]?"
    ),
    "SearchResult": "file_id:string filename:string score:number text:string attributes:object",
    "CallItem": (
        "id:string type:=function_call call_id:string name:string arguments:string status:string"
    ),
    "CallResultItem": (
        "id:string type:=function_call_output call_id:string output:[ItemPart] status:string"
    ),
    "CompactionItem": "id:string type:=compaction encrypted_content:string",
    # A caller's own of these two kinds are kept as they came.
    "GivenThoughts": "id:string type:=reasoning",
    "GivenSearch": "id:string type:=file_search_call",
    "Item": "MessageItem|CallItem|CallResultItem|CompactionItem|GivenThoughts|GivenSearch",
    "Compaction": (
        "id:string object:=response.compaction created_at:integer output:[Item] usage:object "
        "rapid:object metrics:object"
    ),
    "Items": _PAGED + "data:[Item]",
    "Conversation": "id:string object:=conversation created_at:integer metadata:object",
    "File": (
        "id:string object:=file bytes:integer filename:string created_at:integer "
        "expires_at:integer? purpose:string status:string status_details:string? rapid:object"
    ),
    "Files": _PAGED + "data:[File]",
    "FileCounts": (
        "in_progress:integer completed:integer failed:integer cancelled:integer total:integer"
    ),
    "Store": (
        "id:string object:=vector_store created_at:integer name:string? usage_bytes:integer "
        "file_counts:FileCounts status:string expires_after:object? expires_at:integer? "
        "metadata:object"
    ),
    "Stores": _PAGED + "data:[Store]",
    "StoreFile": (
        "id:string object:=vector_store.file created_at:integer vector_store_id:string "
        "status:string last_error:object? usage_bytes:integer attributes:object "
        "chunking_strategy:object"
    ),
    "StoreFiles": _PAGED + "data:[StoreFile]",
    "Batch": (
        "id:string object:=vector_store.files_batch created_at:integer vector_store_id:string "
        "status:string file_counts:FileCounts"
    ),
    "Part": "type:=text text:string",
    "StoredText": "object:string data:[Part] has_more:boolean rapid:object",
    "StoredChunk": (
        "id:string object:string file_id:string tokens:integer content:[Part] rapid:object"
    ),
    "StoredChunks": _PAGED + "data:[StoredChunk]",
    "FoundPassage": "file_id:string filename:string score:number attributes:object content:[Part]",
    "FoundPassages": "object:string search_query:[string] data:[FoundPassage]",
    "InputUsage": "prompt_tokens:integer total_tokens:integer",
    "Vector": "object:=embedding index:integer",
    "Vectors": "object:=list model:string data:[Vector] usage:InputUsage",
    "Ranked": "index:integer relevance_score:number",
    "RankedDocuments": "id:string model:string results:[Ranked] usage:InputUsage",
    "TokenIds": "count:integer max_model_len:integer tokens:[integer]",
    "Prompt": "prompt:string",
    "MessageTokens": "input_tokens:integer",
    "ResponseTokens": "object:=response.input_tokens input_tokens:integer",
    "Version": "version:string",
    "Health": "status:string",
    "Readiness": "ready:boolean",
    "ServerState": (
        "object:=server_state ready:boolean reason:string? models:object "
        "pools:object engines:[object] passages:[object] metrics:[string] requests:RequestCounts"
    ),
    "RequestCounts": (
        "waiting:integer answering:integer ok:integer refused:integer failed:integer "
        "left:integer drafted:integer accepted:integer"
    ),
    "OpenApiDocument": "openapi:string info:object paths:object components:object",
    "Key": (
        "id:string object:=api_key tenant:string name:string scopes:[string] created_at:integer "
        "expires_at:integer? revoked_at:integer?"
    ),
    "Keys": _PAGED + "data:[Key]",
    "TenantLimits": (
        "id:string object:string tenant:string weight:number? requests_per_minute:integer? "
        "tokens_per_minute:integer? concurrent_answers:integer? long_prefills:integer? "
        "files:integer? bytes:integer?"
    ),
    "AllLimits": _PAGED + "data:[TenantLimits]",
    "Act": "id:string object:string at:number actor:string",
    "Acts": _PAGED + "data:[Act]",
    "UsageRow": (
        "object:string num_requests:integer prompt_tokens:integer completion_tokens:integer "
        "target_s:number drafter_s:number"
    ),
    "UsageRows": "object:=list data:[UsageRow]",
}
_NULL = {"type": "null"}
_STORE = "/v1/vector_stores/{store_id}"
_STORE_FILE = f"{_STORE}/files/{{file_id}}"
_BATCH = f"{_STORE}/file_batches/{{batch_id}}"
_CONVERSATION = "/v1/conversations/{conversation_id}"
_RESPONSE = "/v1/responses/{response_id}"
_ANSWERS = {
    "GET /health": "Health",
    "GET /ready": "Readiness",
    "GET /version": "Version",
    "GET /openapi.json": "OpenApiDocument",
    "GET /v1/models": "Models",
    "GET /v1/models/{model}": "Model",
    "POST /v1/chat/completions": "ChatAnswer",
    "POST /v1/completions": "CompletionAnswer",
    "POST /v1/messages": "MessageAnswer",
    "POST /v1/responses": "ResponseAnswer",
    "POST /v1/messages/count_tokens": "MessageTokens",
    "POST /v1/responses/input_tokens": "ResponseTokens",
    "POST /v1/responses/compact": "Compaction",
    f"GET {_RESPONSE}": "ResponseAnswer",
    f"DELETE {_RESPONSE}": "Deleted",
    f"POST {_RESPONSE}/cancel": "ResponseAnswer",
    f"GET {_RESPONSE}/input_items": "Items",
    "POST /v1/conversations": "Conversation",
    f"GET {_CONVERSATION}": "Conversation",
    f"POST {_CONVERSATION}": "Conversation",
    f"DELETE {_CONVERSATION}": "Deleted",
    f"GET {_CONVERSATION}/items": "Items",
    f"POST {_CONVERSATION}/items": "Items",
    f"GET {_CONVERSATION}/items/{{item_id}}": "Item",
    f"DELETE {_CONVERSATION}/items/{{item_id}}": "Conversation",
    "POST /tokenize": "TokenIds",
    "POST /detokenize": "Prompt",
    "POST /v1/embeddings": "Vectors",
    "POST /v1/rerank": "RankedDocuments",
    "POST /rerank": "RankedDocuments",
    "POST /v1/files": "File",
    "GET /v1/files": "Files",
    "GET /v1/files/{file_id}": "File",
    "DELETE /v1/files/{file_id}": "Deleted",
    "POST /v1/vector_stores": "Store",
    "GET /v1/vector_stores": "Stores",
    f"GET {_STORE}": "Store",
    f"POST {_STORE}": "Store",
    f"DELETE {_STORE}": "Deleted",
    f"POST {_STORE}/search": "FoundPassages",
    f"POST {_STORE}/files": "StoreFile",
    f"GET {_STORE}/files": "StoreFiles",
    f"GET {_STORE_FILE}": "StoreFile",
    f"POST {_STORE_FILE}": "StoreFile",
    f"DELETE {_STORE_FILE}": "Deleted",
    f"GET {_STORE_FILE}/content": "StoredText",
    f"GET {_STORE_FILE}/chunks": "StoredChunks",
    f"POST {_STORE}/file_batches": "Batch",
    f"GET {_BATCH}": "Batch",
    f"POST {_BATCH}/cancel": "Batch",
    f"GET {_BATCH}/files": "StoreFiles",
    "POST /v1/admin/keys": "Key",
    "GET /v1/admin/keys": "Keys",
    "DELETE /v1/admin/keys/{key_id}": "Key",
    "POST /v1/admin/keys/{key_id}/rotate": "Key",
    "GET /v1/admin/limits": "AllLimits",
    "POST /v1/admin/limits/{tenant}": "TenantLimits",
    "GET /v1/admin/audit": "Acts",
    "GET /v1/admin/state": "ServerState",
    "GET /v1/usage": "UsageRows",
}
_MEDIA_TYPES = {  # of answers that are not JSON, or not always
    **dict.fromkeys(
        (
            "POST /v1/chat/completions",
            "POST /v1/completions",
            "POST /v1/messages",
            "POST /v1/responses",
            f"GET {_RESPONSE}",
        ),
        "text/event-stream",
    ),
    "GET /": "text/html",
    "GET /console/{name}": "*/*",
    "GET /docs": "text/html",
    "GET /v1/files/{file_id}/content": "application/octet-stream",
}


def list_shapes() -> Json:
    """Return the schemas of all shapes, by name."""
    return {name: _expand(shape) for name, shape in _SHAPES.items()}


def describe_answers(operation: str) -> Json:
    """Return the responses of an operation, as method and path."""
    content: Json = {}
    if operation in _ANSWERS:
        content["application/json"] = {"schema": _schema(_ANSWERS[operation])}
    if operation in _MEDIA_TYPES:
        content[_MEDIA_TYPES[operation]] = {"schema": {"type": "string"}}
    failure = {"application/json": {"schema": _schema("Failure")}}
    return {
        "200": {"description": "What was asked for.", **({"content": content} if content else {})},
        "default": {"description": "Why not.", "content": failure},
    }


def _expand(shape: str) -> Json:
    if ":" not in shape:
        return _schema(shape)
    kinds = dict(field.split(":") for field in shape.split())
    properties = {field: _schema(kind) for field, kind in kinds.items()}
    return {"type": "object", "required": [*kinds], "properties": properties}


def _schema(kind: str) -> Json:
    if kind.startswith("="):
        return {"const": kind[1:]}
    if kind.startswith("[") and kind.endswith("]"):
        return {"type": "array", "items": _schema(kind[1:-1])}
    if kind.endswith("?"):
        given = _schema(kind[:-1])
        is_type = given.keys() == {"type"}
        return {"type": [given["type"], "null"]} if is_type else {"anyOf": [given, _NULL]}
    if "|" in kind:
        return {"anyOf": [_schema(each) for each in kind.split("|")]}
    if kind in _SHAPES:
        return {"$ref": f"#/components/schemas/{kind}"}
    return {"type": kind}
