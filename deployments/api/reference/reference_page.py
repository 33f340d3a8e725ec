"""The page of ``GET /docs``: the OpenAPI document as HTML, from which nothing else is loaded.

It has no scripts and links within itself only, so that it is the same under any path and for a
browser without the internet; its policy forbids the rest.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from hashlib import sha256
from html import escape
from typing import Any

Json = Mapping[str, Any]

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h2 { font: bold 1.1rem monospace; margin-top: 2.5rem } code { background: #8881 }
table { border-collapse: collapse } td, th { text-align: left; vertical-align: top;
padding: .2rem .8rem; border-bottom: 1px solid #8884; overflow-wrap: anywhere }
"""
_ALLOWED = base64.b64encode(sha256(_STYLE.encode()).digest()).decode()
PAGE_HEADERS = {
    "content-security-policy": f"default-src 'none'; style-src 'sha256-{_ALLOWED}'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
_BOUNDS = {  # by their keywords in JSON Schema
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "minLength": "characters, at least",
    "maxLength": "characters, at most",
    "minItems": "entries, at least",
    "maxItems": "entries, at most",
    "pattern": "like",
}
_CLASSES = {
    "as_in_chats": "As in chats",
    "renamed": "Called otherwise here",
    "refused": "Refused by name, but for values that ask for nothing",
    "ignored": "Ignored, and named in the receipt",
}


def render_page(document: Json) -> str:
    """Return the page of an OpenAPI document."""
    title = escape(document["info"]["title"])
    return "".join(
        (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>',
            f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>',
            f"<h1>{title}</h1><p>Made from <code>GET /openapi.json</code>, which says the same to "
            "programs. Keys go as <code>Authorization: Bearer KEY</code>.</p>",
            *_render_routes(document["paths"]),
            "<h1>Objects</h1>",
            *_render_objects(document["components"]["schemas"]),
        )
    )


def _render_routes(paths: Json) -> Iterator[str]:
    for path, operations in paths.items():
        for method, operation in operations.items():
            yield f"<h2>{escape(f'{method.upper()} {path}')}</h2>"
            if operation["parameters"]:
                yield _table(
                    (each["name"], _describe(each["schema"]), f"in the {each['in']}")
                    for each in operation["parameters"]
                )
            body = operation.get("requestBody", {})
            for media_type, content in body.get("content", {}).items():
                yield f"<p>Body, <code>{media_type}</code>: {_describe(content['schema'])}</p>"
                if "$ref" not in content["schema"]:
                    yield _table(_list_fields(content["schema"]))
            for name, fields in body.get("x-other-fields", {}).items():
                if fields:
                    yield f"<p>{_CLASSES[name]}: {', '.join(_tell(fields))}.</p>"
            for media_type, content in operation["responses"]["200"].get("content", {}).items():
                yield f"<p>Answer, <code>{media_type}</code>: {_describe(content['schema'])}</p>"


def _render_objects(schemas: Json) -> Iterator[str]:
    for name, schema in sorted(schemas.items()):
        yield f'<h2 id="{escape(name)}">{escape(name)}</h2>'
        yield f"<p>{escape(schema.get('description', '').partition('Attributes:')[0])}</p>"
        yield _table(_list_fields(schema))


def _list_fields(schema: Json) -> Iterator[tuple[str, str, str]]:
    for name, each in schema.get("properties", {}).items():
        need = "required" if name in schema.get("required", ()) else ""
        yield name, _describe(each), need


def _table(rows: Iterator[tuple[str, str, str]]) -> str:
    cells = (
        f"<tr><td><code>{escape(name)}</code><td>{kind}<td>{note}" for name, kind, note in rows
    )
    return f"<table>{''.join(cells)}</table>"


def _tell(fields: Any) -> Iterator[str]:
    """Yield the names of fields; behind each what else is known of it."""
    for name in fields:
        told = fields[name] if isinstance(fields, Mapping) else None
        values = [told] if isinstance(told, str) else map(json.dumps, told or ())
        note = escape(", ".join(values))
        yield f"<code>{escape(name)}</code>" + (f" ({note})" if note else "")


def _describe(schema: Json) -> str:
    """Return what a value may be."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema or "oneOf" in schema:
        return " or ".join(map(_describe, schema.get("anyOf") or schema["oneOf"]))
    if "const" in schema or "enum" in schema:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return " or ".join(f"<code>{escape(json.dumps(each))}</code>" for each in values)
    types = schema.get("format") or schema.get("type", "anything")
    kind = escape(types if isinstance(types, str) else " or ".join(types))
    inner = schema.get("items") or schema.get("additionalProperties")
    if isinstance(inner, Mapping):
        kind += f" of {_describe(inner)}"
    bounds = [f"{said} {schema[name]}" for name, said in _BOUNDS.items() if name in schema]
    return f"{kind} ({escape(', '.join(bounds))})" if bounds else kind
