"""A visit of the console by a headless Chromium, and what all stories do in one."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import axe_playwright_python
from playwright.sync_api import Browser, Page, expect

AXE = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text()
RULES = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]}
DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 375, "height": 667}
DOORS = "\n".join(f"🚪 The code of door {number} is {20000 + number}." for number in range(9000))
QUESTION = "What is the code of door 4321?"
ANSWER = "🚪 The code of door 4321 is 24321."
WAIT_MS = 30_000  # for what comes by itself; the machine may be slow

Story = Callable[["Visit"], None]
STORIES: list[Story] = []


class Visit:
    """A page of a browser, which notes what it loads, and what it complains of."""

    def __init__(self, browser: Browser, url: str, **options: Any) -> None:
        self.url = url
        context = browser.new_context(**{"viewport": DESKTOP, **options})
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        self.page = context.new_page()
        self.page.set_default_timeout(WAIT_MS)
        self.complaints: list[str] = []
        self.elsewhere: list[str] = []
        self.page.on("console", lambda each: each.type == "error" and self._note(each.text))
        self.page.on("pageerror", lambda error: self._note(f"uncaught: {error}"))
        self.page.on("dialog", lambda dialog: (self._note("a dialog"), dialog.dismiss()))
        self.page.on(
            "request", lambda each: each.url.startswith(url) or self.elsewhere.append(each.url)
        )

    def _note(self, text: str) -> None:
        # A browser says so of every answer that is no 200; the page itself says the rest.
        if not text.startswith("Failed to load resource"):
            self.complaints.append(text)

    def open(self, path: str = "/") -> Page:
        """Open the page and wait until it can be asked."""
        self.page.goto(self.url + path)
        expect(self.page.locator("#ask-button")).to_be_enabled(timeout=WAIT_MS)
        return self.page

    def add(self, name: str = "doors.txt", text: str = DOORS) -> None:
        """Choose a file, and wait until it is read."""
        self.page.set_input_files("#files", [file(name, text.encode())])
        expect(self.row(name)).to_have_attribute("data-state", "ready", timeout=WAIT_MS)

    def row(self, name: str) -> Any:
        """Return the part of the list that is about a file: the newest of that name."""
        return self.page.locator("#document-list li").filter(has_text=name).first

    def ask(self, question: str = QUESTION) -> Any:
        """Ask by the keyboard, and return where the answer will be."""
        self.page.fill("#question", question)
        self.page.press("#question", "Enter")
        return self.page.locator(".turn").last

    def check_access(self, where: str) -> None:
        """Have axe-core find what people with other senses or tools could not use."""
        self.page.evaluate(AXE)
        found = self.page.evaluate("rules => axe.run(document, rules)", RULES)["violations"]
        told = [(each["id"], [node["target"] for node in each["nodes"]]) for each in found]
        assert not told, f"{where}: {told}"

    def close(self) -> None:
        """Leave, and check that the page had no errors and loaded nothing from elsewhere."""
        self.page.context.close()
        assert not self.complaints, self.complaints
        assert not self.elsewhere, self.elsewhere

    def check_fits(self, where: str) -> None:
        """Check that nothing is wider than the screen."""
        width = self.page.evaluate("document.documentElement.scrollWidth")
        assert width <= self.page.viewport_size["width"], f"{where} is {width} pixels wide"


def file(name: str, content: bytes) -> Any:
    return {"name": name, "mimeType": "text/plain", "buffer": content}


def story(function: Story) -> Story:
    STORIES.append(function)
    return function


def drop(page: Page, name: str, text: str) -> None:
    page.evaluate(
        """([name, text]) => {
          const dataTransfer = new DataTransfer();
          dataTransfer.items.add(new File([text], name, { type: "text/plain" }));
          for (const type of ["dragover", "drop"])
            document.getElementById("drop").dispatchEvent(
              new DragEvent(type, { dataTransfer, bubbles: true, cancelable: true }));
        }""",
        [name, text],
    )


def switch(visit: Visit, state: str) -> None:
    urllib.request.urlopen(urllib.request.Request(f"{visit.url}/{state}", method="POST")).close()


def read_state(visit: Visit) -> dict[str, Any]:
    """Return what the server says of itself."""
    with urllib.request.urlopen(f"{visit.url}/v1/admin/state") as answer:
        state: dict[str, Any] = json.load(answer)
        return state


def say_state(visit: Visit, state: dict[str, Any]) -> None:
    """Have the server say this of itself from now on."""
    data = json.dumps(state).encode()
    urllib.request.urlopen(urllib.request.Request(f"{visit.url}/state", data=data)).close()
