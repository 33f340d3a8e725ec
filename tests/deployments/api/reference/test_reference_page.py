"""The page of the API: whole, true, and made of nothing but itself."""

from __future__ import annotations

import base64
import re
from hashlib import sha256
from html.parser import HTMLParser

import httpx

from deployments.api.ingress import Ingress
from deployments.api.reference.openapi import _FIELDS, describe
from deployments.config.api_config import ApiConfig
from deployments.config.tenants import hash_key
from tests.deployments.scripted import ScriptedOrchestrator

KEY = {"tenant": "acme", "sha256": hash_key("sk-acme")}
APP = Ingress(ScriptedOrchestrator(), ApiConfig(model="m", keys=(KEY,)))


class Read(HTMLParser):
    """What a page has: its text by element, the targets of its links, and its names."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.names: set[str] = set()
        self.text, self.style = "", ""
        self._tag = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self._tag = tag
        given = dict(attrs)
        self.links += [given[name] or "" for name in ("href", "src") if name in given]
        self.names |= {given["id"] or ""} if "id" in given else set()

    def handle_data(self, data: str) -> None:
        if self._tag == "style":
            self.style += data
        else:
            self.text += f" {data} "

    def handle_endtag(self, tag: str) -> None:
        self._tag = ""


async def fetch(path: str, key: str = "sk-acme") -> httpx.Response:
    transport = httpx.ASGITransport(APP, client=("10.0.0.7", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://10.0.0.1") as http:
        return await http.get(path, headers={"authorization": f"Bearer {key}"})


async def test_the_page_has_every_route_and_field_with_its_class() -> None:
    text = Read((await fetch("/docs")).text).text
    document = describe(APP._app.routes)
    for path, operations in document["paths"].items():
        for method in operations:
            assert f" {method.upper()} {path} " in text
    objects = document["components"]["schemas"].values()
    fields = [name for each in objects for name in each.get("properties", ())]
    classed = [name for table in _FIELDS.values() for name in (*table.refused, *table.ignored)]
    assert len(classed) > 200
    words = {*re.split(r"[^\w]+", text)}
    assert {*fields, *classed} <= words
    assert "POST /v1/chat/completions" in text
    assert "Refused by name" in text
    assert "max_output_tokens" in text[text.index("Called otherwise here") :]


async def test_the_page_loads_nothing_else() -> None:
    reply = await fetch("/docs")
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    page = Read(reply.text)
    assert not page.tags & {"script", "link", "img", "iframe", "form", "base"}
    assert page.links
    assert {link.removeprefix("#") for link in page.links} <= page.names
    assert all(link.startswith("#") for link in page.links)  # so it is whole under any path
    policy = reply.headers["content-security-policy"]
    allowed = base64.b64encode(sha256(page.style.encode()).digest()).decode()
    assert policy.startswith(f"default-src 'none'; style-src 'sha256-{allowed}'")


async def test_the_document_says_the_classes_and_needs_a_key_as_the_page_does() -> None:
    for path in ("/openapi.json", "/docs"):
        assert (await fetch(path, "sk-unknown")).status_code == 401
    body = describe(APP._app.routes)["paths"]["/v1/responses"]["post"]["requestBody"]
    others = body["x-other-fields"]
    assert "temperature" in others["as_in_chats"]
    assert others["renamed"]["max_tokens"] == "max_output_tokens"
    assert others["refused"]["service_tier"] == ["auto", "default"]
    assert "prompt_cache_retention" in others["ignored"]
