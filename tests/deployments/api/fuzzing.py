"""Requests of three callers that mean no good, and what no answer may have.

`schemathesis` makes requests from our own OpenAPI document, valid ones and invalid ones. Here their
ids become ids of all tenants, some of their values become nasty ones, and they get any key. Every
text that a tenant sends has the tenant's mark, which no other tenant's answer may have. A third
tenant never asks anything; what it has must be the same at the end.
"""

from __future__ import annotations

import asyncio
import io
import json
import math
import random
import warnings
from collections.abc import AsyncGenerator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import PurePath
from typing import Any, BinaryIO
from urllib.parse import quote

import httpx
import jsonschema_rs
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable

from deployments.api.ingress import Ingress
from deployments.api.reference.answer_schemas import list_shapes
from deployments.api.reference.openapi import describe
from deployments.config.api_config import ApiConfig
from library.accounts import api_keys
from library.accounts.books import Accounts
from library.ingestion import Ingestion
from library.library_access import Library, LibraryAccess
from library.parsing import ParsedText, ParsingLimits
from library.parsing.reading import read_file
from library.upkeep import verify
from rapid.errors import BadRequest
from rapid.events import GenerationEvent, TextDelta
from rapid.messages import GenerateRequest
from tests.deployments.api.files.test_files_by_sdk import Searching
from tests.deployments.scripted import answer
from tests.library.libraries import FakeIndex

MARKS = {"acme": "quillwort", "guest": "merganser", "quiet": "tamarack"}
OPEN = {"/", "/console/{name}", "/health", "/ready"}
NEEDS = {
    **dict.fromkeys(("chat", "responses", "conversations", "messages"), "ask"),
    **dict.fromkeys(("completions", "embeddings", "rerank"), "ask"),
    **dict.fromkeys(("tokenize", "detokenize"), "ask"),
    **dict.fromkeys(("files", "vector_stores"), "documents"),
    "admin": "admin",
}
AT_ONCE = 8
TURN = 240  # requests between two looks of the worker that reads and indexes files
MOST_KNOWN = 80  # things of a tenant whose ids are sent: the latest
CONSOLE = "/console/{name}"
IDS = {
    **{name: name for name in ("file_id", "store_id", "batch_id", "key_id")},
    **{name: name for name in ("response_id", "conversation_id", "item_id")},
    "conversation": "conversation_id",
    "previous_response_id": "response_id",
    "file_ids": "file_id",
    "vector_store_ids": "store_id",
}
OBJECTS = {
    "file": "file_id",
    "vector_store": "store_id",
    "vector_store.file": "file_id",
    "vector_store.files_batch": "batch_id",
    "api_key": "key_id",
    "response": "response_id",
    "conversation": "conversation_id",
}
MARKED = ("name", "text", "content", "query", "metadata", "attributes")
NASTY: list[Any] = [
    *("", "\0", "\ud800", "9" * 5000, "٣", "../../etc/passwd", "'; DROP TABLE files;--"),
    *("x" * 9000, "*", "0001-01-01", "9999-12-31", "http://127.0.0.1/", "%00", "acme", "quiet"),
    *("a\r\nset-cookie: b", "\u202e"),
    *(None, True, -1, 2**63, 10**400, math.nan, math.inf, 1e308, [], [[]] * 50, {}, {"": {}}),
    {"type": "and", "filters": []},
]
NASTY_BODIES = [
    *(b"", b"null", b"[]", b'"', b"\xff\xfe", b"[" * 90_000, b'{"a":' * 90_000, b"{}{}"),
    b'{"name": "\\ud800"}',
    b'{"query": "\\u0000", "filters": {"type": "eq", "key": "\\u0000", "value": "\\ud800"}}',
    b'{"attributes": {"a": NaN}}',
    b'{"model": "\\ud800", "messages": [{"role": "user", "content": "\\ud800"}]}',
]
# What a request of a path has most of the time, one of the values of each field, and the fields
# that it keeps beside (all where it says none): requests made of a schema alone are seldom valid.
QUESTION = [{"role": "user", "content": "Which?"}]
USUAL: dict[str, tuple[dict[str, list[Any]], set[str] | None]] = {
    "/v1/conversations/{conversation_id}/items": ({"items": [QUESTION]}, {"items"}),
    "/v1/messages": (
        {"model": ["m"], "max_tokens": [9], "messages": [QUESTION]},
        {"model", "max_tokens", "messages"},
    ),
    "/v1/messages/count_tokens": ({"model": ["m"], "messages": [QUESTION]}, {"model", "messages"}),
    "/v1/responses/input_tokens": (
        {"model": ["m"], "input": ["Which?"]},
        {"model", "input", "previous_response_id", "tools"},
    ),
    "/v1/completions": (
        {"model": ["m"], "prompt": ["A door", [3], ["a", "b"]]},
        {"model", "prompt", "stream", "n", "echo", "logprobs", "max_tokens"},
    ),
    "/v1/responses": (
        {"model": ["m"], "input": ["Which?"], "background": [True, False]},
        {"model", "input", "previous_response_id", "stream", "background", "metadata", "tools"},
    ),
    "/v1/responses/compact": (
        {"model": ["m"], "input": ["Which?"]},
        {"model", "input", "previous_response_id", "instructions"},
    ),
    "/tokenize": ({"model": ["m"], "prompt": ["A door"]}, {"model", "prompt"}),
    "/detokenize": ({"model": ["m"], "tokens": [[3, 4]]}, {"model", "tokens"}),
    "/v1/embeddings": ({"model": ["lengths"], "input": ["A door"]}, None),
    **dict.fromkeys(
        ("/v1/rerank", "/rerank"),
        (
            {"model": ["lengths"], "query": ["Which?"], "documents": [["A door"]]},
            {"model", "query", "documents", "top_n"},
        ),
    ),
}
NASTY_TYPES = ["", "text/plain", "application/json; charset=utf-16", "multipart/form-data"]
FORM = "multipart/form-data; boundary=x; charset="


class Echo(Searching):
    """Answers with the texts of the documents, so that what should not be in them is seen."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerationEvent]:
        texts = await self._library.resolve(request.tenant, request.documents)
        said = "\n".join(each.text for each in texts)
        said += str(request.prompts) if request.prompts else request.messages[-1].text
        for event in answer(request):
            if isinstance(event, TextDelta) and event.finish_reason is None:
                yield TextDelta(event.choice, said, event.logprobs, None)
            else:
                yield event


class OpenLibrary(LibraryAccess):
    """An access to a library that is open."""

    def __init__(self, library: Library) -> None:
        super().__init__(library.config)
        self._library = library

    async def get(self) -> Library:
        return self._library


@dataclass(frozen=True)
class Sender:
    """Who sends: a tenant, or nobody; and what its key is for."""

    authorization: bytes | None
    tenant: str | None = None
    scopes: tuple[str, ...] = ()


@dataclass
class Fuzzed:
    """An ingress that is asked for anything, and what was found."""

    library: Library
    seed: int = 1
    findings: list[str] = field(default_factory=list)
    statuses: dict[str, set[int]] = field(default_factory=dict)
    known: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    senders: list[Sender] = field(default_factory=list)
    kept_keys: set[str] = field(default_factory=set)  # which the operator is not to revoke
    num_sent: int = 0

    def __post_init__(self) -> None:
        access = OpenLibrary(self.library)
        self.accounts = Accounts(access.database)
        config = ApiConfig(model="m", max_body_bytes=200_000)
        self.app = Ingress(Echo(access), config, accounts=self.accounts, library=access)
        self.document = json.loads(json.dumps(describe(self.app._app.routes)))
        components = self.document["components"]
        self.validators = {
            f"#/components/schemas/{name}": jsonschema_rs.validator_for(
                {"components": components, "$ref": f"#/components/schemas/{name}"}
            )
            for name in list_shapes()
        }
        self.chance = random.Random(self.seed)
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app, client=("10.0.0.7", 1)),
            base_url="http://10.0.0.1",
        )

    async def prepare(self) -> None:
        """Give every tenant keys, files and stores."""
        database = self.library.database
        self.senders = [
            Sender(None),
            Sender(b"Bearer sk-unknown"),
            Sender(b"Bearer \xff\xfe"),
            Sender(b"Basic YTpi"),
        ]
        for tenant in MARKS:
            for scopes in (("ask", "documents"), ("ask",), ("documents",)):
                row, key = await api_keys.create_key(database, tenant, "", scopes, None, actor="o")
                self.kept_keys.add(row.id)
                if tenant != "quiet":
                    self.senders.append(Sender(f"Bearer {key}".encode(), tenant, scopes))
        every = ("ask", "documents", "admin")
        row, key = await api_keys.create_key(database, "ops", "", every, None, actor="o")
        self.kept_keys.add(row.id)
        operator = Sender(f"Bearer {key}".encode(), "ops", every)
        self.senders.append(operator)
        row, old = await api_keys.create_key(database, "acme", "", every, None, actor="o")
        await api_keys.revoke_key(database, row.id, actor="o")
        self.known["ops"] = [{"key_id": row.id}]
        self.senders.append(Sender(f"Bearer {old}".encode()))
        for tenant in MARKS:
            await self.give(tenant)
        await self.work()

    async def give(self, tenant: str) -> None:
        """Give a tenant a store, a batch and files, unless it has as many as it may."""
        mark, ids, files = MARKS[tenant], [], self.library.files
        with suppress(BadRequest):
            for number in range(3):
                file = io.BytesIO(f"The {mark} of door {number} is {mark}.".encode())
                ids.append((await files.add(tenant, f"{mark} {number}.txt", "user_data", file)).id)
        store = await self.library.stores.create(tenant, mark, {mark: mark}, file_ids=ids[:1])
        batch = await self.library.stores.put_batch(tenant, store.id, ids[1:], {"mark": mark})
        named = {"type": "message", "role": "user", "id": f"msg_{self.chance.random()}"}
        items = [named | {"status": "completed", "content": [{"type": "input_text", "text": mark}]}]
        row = await self.library.conversations.create(tenant, {mark: mark}, items)
        self.known.setdefault(tenant, []).append(
            {"conversation_id": row.id, "item_id": named["id"]}
        )
        waiting: dict[str, Any] = {"id": f"resp_{self.chance.random()}", "object": "response"}
        waiting |= {"created_at": 0, "status": "queued", "background": True, "model": "m"}
        waiting |= dict.fromkeys(("error", "usage", "incomplete_details", "conversation"))
        waiting |= {"metadata": {mark: mark}, "output": [], "tools": [], "store": True}
        waiting |= {"previous_response_id": None}
        with suppress(BadRequest):
            await self.library.running.begin(tenant, waiting, [], {})
            self.known[tenant].append({"response_id": waiting["id"]})
        self.known[tenant].extend(
            {"file_id": each, "store_id": store.id, "batch_id": batch.id} for each in ids
        )

    async def work(self) -> None:
        """Read, index and delete what was asked for, and write the usage."""
        await Ingestion(self.library, FakeIndex()).drain()
        await self.accounts.write_usage()

    async def send(self, cases: list[Any], number: int) -> None:
        """Send so many requests, of which each is a case with other ids and another sender."""
        for begin in range(0, number, AT_ONCE):
            some = range(begin, min(begin + AT_ONCE, number))
            built = [self._build(cases[each % len(cases)]) for each in some]
            sent = await asyncio.gather(*(self._send(*each) for each in built))
            for (sender, *_), found in zip(built, sent, strict=True):
                if sender.tenant is not None:
                    new = [each for each in found if each.get("key_id") not in self.kept_keys]
                    self.known[sender.tenant] = (self.known[sender.tenant] + new)[-MOST_KNOWN:]
            if begin % TURN == 0:
                database = self.library.database
                row, _ = await api_keys.create_key(database, "other", "", ("ask",), None, actor="o")
                self.known["ops"].append({"key_id": row.id})
                await self.give("acme")
                await self.give("guest")
                await self.work()
            if len(self.findings) > 20:
                break
        await self.app._background.finish()
        await self.work()

    def _build(self, case: Any) -> tuple[Sender, str, httpx.Request]:
        chance, sender = self.chance, self.chance.choice(self.senders)
        path = case.path
        if "admin" in path and chance.random() < 0.5:  # where others are seldom let in
            sender = next(each for each in self.senders if "admin" in each.scopes)
        whose = sender.tenant if sender.tenant and chance.random() < 0.75 else None
        self.ids = {}
        things: dict[frozenset[str], list[dict[str, str]]] = {}
        for thing in self.known[whose or chance.choice([*self.known])]:
            things.setdefault(frozenset(thing), []).append(thing)
        for kind in chance.choices([*things], k=4):
            self.ids = chance.choice(things[kind]) | self.ids  # of one thing, as far as it has them
        for name, value in (case.path_parameters or {}).items():
            if path == CONSOLE and chance.random() < 0.5:
                value = "main.js"
            path = path.replace(f"{{{name}}}", _quote_value(self._value(name, value)))
        query = {name: self._value(name, each) for name, each in (case.query or {}).items()}
        method = case.method
        if chance.random() < 0.02:
            method = chance.choice(["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"])
        headers: dict[str, Any] = {}
        if sender.authorization is not None:
            headers["authorization"] = sender.authorization
        if chance.random() < 0.05:
            headers["last-event-id"] = chance.choice(["AA==", "x" * 400, "\xff"]).encode("latin-1")
        content, media_type = self._body(case, MARKS.get(sender.tenant or "", "nobody"))
        if media_type:
            headers["content-type"] = media_type
        words = [f"{_quote_value(name)}={_quote_value(each)}" for name, each in query.items()]
        target = path + ("?" + "&".join(words) if words else "")
        request = self.http.build_request(method, target, content=content, headers=headers)
        return sender, case.path, request

    def _value(self, name: str, value: Any) -> Any:
        number = self.chance.random()
        if number < 0.08:
            return self.chance.choice(NASTY)
        if number < 0.8 and name == "model":
            return "m"
        if number < 0.8 and name in ("after", "before"):
            return self.chance.choice([*self.ids.values()])
        found = self.ids.get(IDS.get(name, ""))
        return found if found is not None and number < 0.9 else value

    def _body(self, case: Any, mark: str) -> tuple[bytes | None, str]:
        body, media_type = case.body, case.media_type or ""
        if not media_type:
            return None, ""
        if self.chance.random() < 0.04:
            media_type = self.chance.choice([*NASTY_TYPES, FORM + "undefined", FORM + "punycode"])
        if self.chance.random() < 0.06:
            return self.chance.choice(NASTY_BODIES), media_type
        if case.media_type == "multipart/form-data":
            return self._form(body if isinstance(body, dict) else {}, mark), (
                FORM + "utf-8" if media_type == case.media_type else media_type
            )
        if not isinstance(body, dict | list):
            return (str(body).encode("utf-8", "replace")), media_type
        if isinstance(body, dict) and self.chance.random() < 0.7:
            usual, kept = USUAL.get(case.path, ({}, None))
            body = body | {name: self.chance.choice(each) for name, each in usual.items()}
            body = {name: each for name, each in body.items() if kept is None or name in kept}
        if "chat" in case.path and isinstance(body, dict) and self.chance.random() < 0.7:
            body = body | {"model": "m", "messages": [{"role": "user", "content": "Which?"}]}
            if self.chance.random() < 0.5:
                body["rapid"] = {"file_ids": [""], "vector_store_ids": [""]}
                del body["rapid"][self.chance.choice([*body["rapid"]])]
            guided = self.chance.choice([each for each in body if "ui" in each] or ["n"])
            kept = ("model", "messages", "rapid", "stream", "n", "response_format", guided)
            body = {name: each for name, each in body.items() if name in kept}
        return json.dumps(self._change("", body, mark)).encode(), media_type

    def _form(self, fields: dict[str, Any], mark: str) -> bytes:
        usual = {"purpose": "user_data", "file": "", **fields}
        lines = []
        for name, value in usual.items():
            value = self._value(name, value) if name != "file" else f"{mark} of door 7"
            file = f'; filename="{self._value(name, mark + ".txt")}"' if name == "file" else ""
            lines.append(
                f'--x\r\ncontent-disposition: form-data; name="{name}"{file}\r\n\r\n{value}'
            )
        if self.chance.random() < 0.7:
            lines[0] = '--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nuser_data'
        return "\r\n".join([*lines, "--x--\r\n"]).encode("utf-8", "replace")

    def _change(self, name: str, value: Any, mark: str) -> Any:
        if name and self.chance.random() < 0.03:
            return self.chance.choice(NASTY)
        if isinstance(value, dict):
            return {key: self._change(key, each, mark) for key, each in value.items()}
        if isinstance(value, list):
            return [self._change(name, each, mark) for each in value]
        if isinstance(value, str) and name in IDS:
            return self._value(name, value)
        if isinstance(value, str) and name in MARKED:
            return f"{value} {mark}"
        return value

    async def _send(
        self, sender: Sender, path: str, request: httpx.Request
    ) -> list[dict[str, str]]:
        """Send a request and look at its answer; return the ids of what is in it."""
        try:
            response = await self.http.send(request)
        except Exception as error:
            self._find(request, f"raised {error!r}")
            return []
        self.num_sent += 1
        self.statuses.setdefault(f"{request.method} {path}", set()).add(response.status_code)
        said = response.content + repr(response.headers.raw).encode()
        asked = request.content + str(request.url).encode()
        for tenant, mark in MARKS.items():
            is_theirs = tenant != sender.tenant and "admin" not in sender.scopes
            if is_theirs and mark.encode() in said and mark.encode() not in asked:
                self._find(request, f"of {sender.tenant} shows what is {tenant}'s: {said!r}")
        if response.status_code >= 500:
            self._find(request, f"{response.status_code} {response.text[:300]}")
        if response.status_code >= 400 and request.method != "HEAD":
            error = _json_of(response).get("error")
            if not isinstance(error, dict) or not {"message", "type", "code"} <= error.keys():
                self._find(request, f"is refused without an error: {response.text[:300]}")
        if response.is_success and request.method != "HEAD":
            self._compare(request, path, response)
        if response.is_success and not self._may(sender, path):
            self._find(request, f"is answered to {sender}")
        return list(_ids_in(_json_of(response))) if response.is_success else []

    def _compare(self, request: httpx.Request, path: str, response: httpx.Response) -> None:
        """Find fault with an answer that is not as the document describes it."""
        if any(not each for each in request.url.path.split("/")[1:]):
            return  # an empty id is a list's address
        operation = self.document["paths"][path].get(request.method.lower())
        described = (operation or {}).get("responses", {}).get(str(response.status_code), {})
        media_type = response.headers.get("content-type", "").partition(";")[0]
        content = described.get("content", {})
        if operation is not None and not {media_type, "*/*"} & content.keys():
            self._find(request, f"is {response.status_code} {media_type}, which is not described")
        elif media_type == "application/json" and "$ref" in content[media_type]["schema"]:
            try:
                self.validators[content[media_type]["schema"]["$ref"]].validate(response.json())
            except jsonschema_rs.ValidationError as error:
                self._find(request, f"is not as it is described: {error.message}")

    def _may(self, sender: Sender, path: str) -> bool:
        needed = NEEDS.get(path.removeprefix("/v1").split("/")[1])
        is_open = path in OPEN
        return is_open or (sender.tenant is not None and (needed in sender.scopes or not needed))

    def _find(self, request: httpx.Request, what: str) -> None:
        body = request.content[:300]
        self.findings.append(f"{request.method} {str(request.url)[:200]} {body!r}: {what[:600]}")

    async def state_of(self, tenant: str) -> list[Any]:
        """All that a tenant has."""
        from sqlalchemy import select

        from library.storage.schema import FileBatchRow, FileRow, StoreFileRow, VectorStoreRow

        found: list[Any] = []
        async with self.library.database.read() as session:
            for table in (FileRow, VectorStoreRow, StoreFileRow, FileBatchRow):
                rows = await session.scalars(select(table).where(table.tenant == tenant))
                found += sorted(
                    repr({each.name: getattr(row, each.name) for each in table.__table__.columns})
                    for row in rows
                )
        return found

    async def discrepancies(self) -> list[Any]:
        """What does not belong together in the library, however young it is."""
        return list(await verify(self.library, young_s=-1.0))


@cache
def make_cases(document: str, each: int) -> list[Any]:
    """Return valid and invalid requests for each operation, `each` of either at most."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import schemathesis

        schema = schemathesis.openapi.from_dict(json.loads(document))
        cases: list[Any] = []
        kept = settings(
            max_examples=each,
            database=None,
            derandomize=True,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        for found in schema.get_all_operations():
            for mode in schemathesis.GenerationMode:
                strategy = found.ok().as_strategy(generation_mode=mode)

                @kept
                @given(strategy)
                def collect(case: Any) -> None:
                    cases.append(case)

                with suppress(Unsatisfiable):
                    collect()
    random.Random(each).shuffle(cases)
    return cases


def read_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read files in this process, and wait for no certificate: others test these."""

    async def parse(
        _: object, file: BinaryIO, filename: str, limits: ParsingLimits, *__: Any
    ) -> ParsedText:
        return read_file(file, PurePath(filename).suffix, limits)

    monkeypatch.setattr("library.parsing.FileReaders.parse_file", parse)
    monkeypatch.setattr("deployments.api.files.file_routes._FORGETTING_S", 0.0)


def _quote_value(value: Any) -> str:
    return quote(str(value).encode("utf-8", "replace"), safe="")


def _json_of(response: httpx.Response) -> dict[str, Any]:
    try:
        found = response.json()
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _ids_in(body: dict[str, Any]) -> Iterator[dict[str, str]]:
    for each in [body, *(body.get("data") or [])]:
        if isinstance(each, dict) and (name := OBJECTS.get(str(each.get("object")))):
            store = {"store_id": each["vector_store_id"]} if "vector_store_id" in each else {}
            yield store | {name: each["id"]}
