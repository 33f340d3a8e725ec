"""The console's files: who gets them, under which path, and that they interpret nothing."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.api import console
from deployments.api.ingress import Ingress
from deployments.config.api_config import ApiConfig, ApiKey
from deployments.config.tenants import hash_key
from rapid.answering.mode.decisions import SAYS_NOTHING
from tests.deployments.scripted import ScriptedOrchestrator

FOLDER = Path(console.__file__).parent / "static"
FILES = {each.name: each.read_text() for each in FOLDER.iterdir()}
KEYS = (ApiKey(tenant="acme", sha256=hash_key("sk-acme")),)


def ingress(**config: Any) -> Ingress:
    return Ingress(ScriptedOrchestrator(), ApiConfig(model="m", **config))


async def fetch(
    app: Any, path: str, client: str = "127.0.0.1", host: str = "127.0.0.1", **headers: str
) -> httpx.Response:
    transport = httpx.ASGITransport(app, client=(client, 1))
    async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as http:
        return await http.get(path, headers=headers)


class Links(HTMLParser):
    """What a page loads, and what it has of inline scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.inline: list[str] = []
        self._tag = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._tag = tag
        for name, value in attrs:
            if name in ("src", "href") and not (value or "").startswith("#"):
                self.loaded.append(value or "")
            if name.startswith("on") or name == "style":
                self.inline.append(f"{tag} {name}")

    def handle_data(self, data: str) -> None:
        if self._tag in ("script", "style") and data.strip():
            self.inline.append(data)


async def test_the_page_and_all_that_it_loads_are_served_with_a_strict_policy() -> None:
    app = ingress()
    page = await fetch(app, "/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    links = Links(page.text)
    imported = {
        f"console/{name}" for text in FILES.values() for name in re.findall(r'"\./(.*?)"', text)
    }
    assert {*links.loaded, *imported} == {f"console/{name}" for name in FILES} - {
        "console/index.html"
    }
    for path in ("/", *(f"/console/{name}" for name in FILES)):
        reply = await fetch(app, path)
        assert (path, reply.status_code) == (path, 200)
        rules = dict(
            each.strip().split(" ", 1)
            for each in reply.headers["content-security-policy"].split(";")
        )
        assert rules["default-src"] == "'none'"
        assert {rules[f"{kind}-src"] for kind in ("script", "style", "img", "connect")} == {
            "'self'"
        }
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["referrer-policy"] == "no-referrer"
    assert "javascript" in (await fetch(app, "/console/main.js")).headers["content-type"]
    assert (await fetch(app, "/console/style.css")).headers["content-type"].startswith("text/css")


async def test_the_samples_are_texts_that_answer_the_page_s_questions_about_them() -> None:
    for name, answer in {
        "generated.txt": "The first deposit of Lonadu is ",
        "english.txt": "CPython currently uses a reference-\ncounting scheme",
    }.items():
        reply = await fetch(ingress(), f"/console/{name}")
        assert reply.headers["content-type"] == "text/plain; charset=utf-8"
        assert "content-security-policy" in reply.headers
        assert answer in reply.text
        assert f'file: "{name}"' in FILES["sample.js"]
    assert 'question: "List the three deposits of Lonadu."' in FILES["sample.js"]


async def test_what_a_browser_has_is_not_sent_again() -> None:
    app = ingress()
    tag = (await fetch(app, "/console/main.js")).headers["etag"]
    again = await fetch(app, "/console/main.js", **{"if-none-match": tag})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("name", ["../console_files.py", "..%2f__init__.py", ".", "no.js", "%00"])
async def test_nothing_beside_them_is_served(name: str) -> None:
    reply = await fetch(ingress(), f"/console/{name}")
    assert reply.status_code == 404
    assert reply.json()["error"]["message"].startswith("There is no GET ")


async def test_the_page_is_whole_under_a_path() -> None:
    transport = httpx.ASGITransport(ingress(), root_path="/eu/next")  # as Serve's proxy says it
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        assert (await http.get("/eu/next/")).text == FILES["index.html"]
        without_slash = await http.get("/eu/next")
        assert (without_slash.status_code, without_slash.headers["location"]) == (307, "next/")
        assert (await http.get("/eu/next/console/main.js")).text == FILES["main.js"]
        assert (await http.get("/eu/next/health/")).status_code == 200


async def test_an_operator_turns_it_off_and_on_while_the_server_runs() -> None:
    app = ingress(console=False)
    for path in ("/", "/console/main.js"):
        assert (await fetch(app, path)).status_code == 404
    app.configure(ApiConfig(model="m"))
    assert (await fetch(app, "/")).status_code == 200


async def test_with_keys_anybody_sees_the_page_and_without_keys_this_machine_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    public = {"client": "10.0.0.7", "host": "10.0.0.1"}
    assert (await fetch(ingress(keys=KEYS), "/", **public)).status_code == 200
    without = ingress()
    refused = [await fetch(without, path, **public) for path in ("/", "/console/main.js")]
    assert [each.status_code for each in refused] == [401, 401]
    assert "answers on this machine only" in refused[0].json()["error"]["message"]
    (line,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert line == "no console for other machines: the server has no keys (api.keys)"
    assert (await fetch(ingress(), "/", **{"x-forwarded-for": "10.0.0.7"})).status_code == 401


def test_no_text_becomes_markup_or_code() -> None:
    ways = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|srcdoc|DOMParser|setHTML"
        r"|createContextualFragment|\beval\b|new Function|javascript:|import\("
    )
    for name, text in FILES.items():
        assert not re.findall(ways, text), name
    assert not Links(FILES["index.html"]).inline


def test_nothing_is_loaded_from_elsewhere() -> None:
    for name, text in FILES.items():
        addresses = re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", text)
        assert set(addresses) <= {"http://www.w3.org/2000/svg"}, name
        assert not re.findall(r"@import|localStorage|sessionStorage|document\.cookie", text), name
    assert "url(" not in FILES["style.css"]


def test_the_files_are_small() -> None:
    assert sum(map(len, map(str.encode, FILES.values()))) <= 200_000
    assert max(text.count("\n") for text in FILES.values()) <= 400


def test_the_page_knows_the_reasons_that_say_that_documents_are_about_other_things() -> None:
    (told,) = re.findall(r"SAYS_NOTHING = \[(.*?)\]", FILES["answer.js"], flags=re.DOTALL)
    assert re.findall(r'"(.*?)"', told) == list(SAYS_NOTHING)
