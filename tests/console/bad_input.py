"""Stories of files, texts and servers that are not as they should be."""

from __future__ import annotations

import urllib.request

from playwright.sync_api import expect

from tests.console.visit import QUESTION, WAIT_MS, Visit, file, story
from tests.library.parsing.small_pdf import write_pdf

PAGES = [[(72.0, 720.0, "Door 1 opens with 20001.")]]
LOCK = b"/Encrypt<</Filter/Standard/V 1/R 2/P -4/O<%s>/U<%s>>>/ID[<00><00>]" % (
    b"01" * 32,
    b"02" * 32,
)


def address_of_another_server(visit: Visit, *, ends: bool) -> str:
    """Return the address of a server that can end, and `ends` in a moment or stays."""
    asked = urllib.request.Request(f"{visit.url}/restart", data=b"now" if ends else b"")
    with urllib.request.urlopen(asked) as answer:
        url: str = answer.read().decode()
        return url


@story
def files_that_nobody_can_read_say_why_and_the_others_are_asked_about(visit: Visit) -> None:
    page = visit.open()
    whole = write_pdf(PAGES)
    files = {
        "locked.pdf": (whole.replace(b"/Root 1 0 R", b"/Root 1 0 R" + LOCK), "password"),
        "broken.pdf": (whole[: len(whole) // 2], "damaged"),
        "half.docx": (b"PK\3\4" + b"\0" * 400, "damaged"),
        "empty.txt": (b"", "empty"),
        "program.txt": (b"\x7fELF\2\1\1" + bytes(range(256)) * 40, "Files of this kind"),
    }
    page.set_input_files("#files", [file(name, content) for name, (content, _) in files.items()])
    visit.add("good.txt", "The code of door 3 is 21.")
    for name in files:
        expect(visit.row(name)).to_have_attribute("data-state", "failed", timeout=WAIT_MS)
        expect(visit.row(name)).to_contain_text("Not read: ")
        expect(visit.row(name).get_by_role("checkbox")).to_be_disabled()
        print(f"    {visit.row(name).locator('.detail').inner_text()}")
    expect(page.locator("#asked-about")).to_have_text("About good.txt.")
    visit.check_access("files that cannot be read")
    expect(visit.ask("Door 3?").locator(".text")).to_contain_text("is 21", timeout=WAIT_MS)


@story
def texts_that_turn_the_writing_around_or_have_no_spaces_stay_in_their_place(visit: Visit) -> None:
    page = visit.open()
    evil = "\u202egnp.exe \u2067 999 \u200f" + "y" * 100_000
    content = f"{evil}\nA line after it.\n"
    page.set_input_files("#files", [file("\u202efdp.exe", content.encode())])
    expect(visit.row("\ufffdfdp.exe")).to_contain_text("name must be", timeout=WAIT_MS)
    visit.add("evil.txt", content)
    turn = visit.ask("bidi 999")
    expect(turn.locator(".cost")).to_be_visible(timeout=WAIT_MS)
    ask = page.locator("#ask-button")
    assert ask.inner_text() == "Ask"
    # Text beside what turns the writing around is isolated from it.
    for where in (".answer .text", ".turn h3", "#document-list .name", ".block", "#reader-place"):
        style = page.locator(where).first.evaluate("each => getComputedStyle(each).unicodeBidi")
        assert style in ("isolate", "plaintext"), (where, style)
    expect(page.locator("#reader-text")).to_contain_text("A line after it.", timeout=WAIT_MS)
    visit.check_fits("a line of 100,000 characters")
    visit.check_access("hostile texts")


@story
def an_answer_goes_on_after_a_restart_of_the_server(visit: Visit) -> None:
    url = address_of_another_server(visit, ends=False)
    other = Visit(visit.page.context.browser, url)
    page = other.open()
    other.add("restarted.txt", "The code of door 5 is 25, " + "and so on " * 60 + "to its end.")
    turn = other.ask("Door 5?")
    expect(turn.locator(".text")).to_contain_text("and so on", timeout=WAIT_MS)
    address_of_another_server(visit, ends=True)
    expect(turn.locator(".busy")).to_contain_text("The connection to the server was lost.")
    other.check_access("restart")
    expect(turn.locator(".text")).to_contain_text("to its end.", timeout=WAIT_MS)
    assert turn.locator(".text").inner_text().count("The code of door 5") == 1
    expect(page.locator("#ask-button")).to_be_enabled()
    other.close()


@story
def without_a_drafter_the_answer_says_so(visit: Visit) -> None:
    visit.open()
    visit.add()
    turn = visit.ask(f"alone: {QUESTION}")
    expect(turn.locator(".note")).to_have_text(
        "Answered with less than the mode asks for: no drafter could be had.", timeout=WAIT_MS
    )
    expect(turn.locator(".cost")).to_contain_text("plain · ")
