"""Stories of people who use the console, told by a headless Chromium.

This runs in an environment of its own, which `tests/console/__main__.py` makes and which has no
package of ours: what the server does is in `tests/console/fake_application.py`.
"""

from __future__ import annotations

import argparse
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, expect, sync_playwright

from tests.console import bad_input, operator_stories, reading  # noqa: F401 (their stories)
from tests.console.measures import measure
from tests.console.visit import (
    ANSWER,
    DOORS,
    PHONE,
    QUESTION,
    STORIES,
    WAIT_MS,
    Visit,
    drop,
    file,
    story,
    switch,
)
from tests.library.parsing.small_pdf import write_pdf


@story
def a_dropped_file_is_asked_about_and_the_answer_names_its_source(visit: Visit) -> None:
    page = visit.open()
    visit.check_access("empty")
    drop(page, "dropped.txt", DOORS)
    expect(visit.row("dropped.txt")).to_have_attribute("data-state", "ready", timeout=WAIT_MS)
    expect(page.locator("#asked-about")).to_have_text("About dropped.txt.")
    turn = visit.ask()
    expect(turn.locator(".text")).to_have_text(f"{ANSWER}[1]", timeout=WAIT_MS)
    expect(turn.locator(".text")).to_have_attribute("aria-busy", "false")
    expect(turn.locator(".cost")).to_contain_text(
        "fused · read 8,120 tokens, 8,000 from before · 6 of 9 drafted tokens kept · "
    )
    turn.get_by_role("button", name="[1] dropped.txt, line 4322").click()
    expect(page.locator("mark")).to_have_text(ANSWER)
    expect(page.locator("mark")).to_be_in_viewport()
    expect(page.locator("mark")).to_be_focused()
    visit.check_access("answered")
    page.click("#back")
    expect(turn.locator("button.source")).to_be_focused()
    turn = visit.ask("And of door 17?")
    expect(turn.locator(".text")).to_contain_text("door 17 is 20017", timeout=WAIT_MS)


@story
def plain_rag_and_auto_stand_beside_each_other(visit: Visit) -> None:
    page = visit.open()
    visit.add()
    page.fill("#question", QUESTION)
    page.click("#compare")
    answers = page.locator(".compared .answer")
    expect(answers.locator("h4")).to_have_text(["plain", "rag", "auto"])
    expect(answers.locator(".cost")).to_have_count(3, timeout=WAIT_MS)
    expect(answers.locator(".cost").last).to_contain_text("fused · ")
    expect(answers.locator(".cost").first).not_to_contain_text("of plain's speed")
    for place in (1, 2):
        beside = re.compile(r" s · about \d\.\d of plain's speed$")
        expect(answers.locator(".cost").nth(place)).to_have_text(beside)
    boxes = [answers.nth(number).bounding_box() for number in range(3)]
    assert len({box["y"] for box in boxes}) == 1
    visit.check_access("compared")


@story
def a_person_sees_who_wrote_each_token(visit: Visit) -> None:
    page = visit.open()
    visit.add()
    turn = visit.ask()
    who = turn.get_by_role("button", name="Who wrote this")
    who.click(timeout=WAIT_MS)
    expect(who).to_have_attribute("aria-pressed", "true")
    expect(turn.locator(".text")).to_be_hidden()
    tokens = turn.get_by_role("option")
    expect(tokens).to_have_text(re.findall(r"\S+", ANSWER))
    expect(turn.locator(".legend")).to_have_text(
        "6 drafted, and kept by the target1 written in place of a draft1 the target's own"
    )
    drafted, corrected, *_, own = (
        tokens.nth(place).evaluate(
            "each => { const look = getComputedStyle(each); return [look.textDecorationLine,"
            " look.textDecorationStyle, look.fontWeight, look.fontStyle].join(); }"
        )
        for place in range(tokens.count())
    )
    assert len({drafted, corrected, own}) == 3  # told apart without colour
    visit.check_access("who wrote this")
    details = turn.locator(".token-details")
    for _ in range(3):  # back past the source below, and that of the token: one token is reached,
        page.keyboard.press("Shift+Tab")
    expect(tokens.first).to_be_focused()
    page.keyboard.press("ArrowRight")  # and the others by arrows
    expect(tokens.nth(1)).to_be_focused()
    expect(tokens.nth(1)).to_have_attribute("aria-selected", "true")
    expect(details).to_contain_text("The written in place of a draft")
    expect(details.locator("dd")).to_have_text(["62.5 %", "3.13 %", "50.0 %"])
    page.keyboard.press("End")
    expect(details).to_contain_text("24321. the target's own")
    expect(details.locator("dd")).to_have_text(["75.0 %", "not computed", "75.0 %"])
    expect(details).to_contain_text("in no passage")
    tokens.first.click()
    details.get_by_role("button", name="doors.txt, line 4322").click()
    expect(page.locator("mark")).to_have_text(ANSWER)
    who.click()
    expect(turn.locator(".text")).to_have_text(f"{ANSWER}[1]")
    expect(turn.locator(".who-wrote")).to_be_hidden()
    turn = visit.ask("cut: what is the code of door 4321?")
    turn.get_by_role("button", name="Who wrote this").click(timeout=WAIT_MS)
    expect(turn.locator(".who-wrote")).to_contain_text(
        "Only 3 tokens are explained. of door 4321 is 24321."
    )


@story
def a_question_is_copied_as_programs_send_it(visit: Visit) -> None:
    page = visit.open()
    visit.add("it's mine.txt", "It's door 7, and its code is 49.\n" * 3)
    page.get_by_text("Mode and temperature").click()
    page.fill("#temperature", "0.5")
    page.select_option("#mode", "fused")
    turn = visit.ask("What's the code of door 7?")
    turn.get_by_role("button", name="Copy as code").click(timeout=WAIT_MS)
    visit.check_access("dialog")
    page.get_by_role("button", name="Copy Python").click()
    expect(page.locator("#code-note")).to_have_text("Copied.")
    code = page.evaluate("navigator.clipboard.readText()")
    compile(code, "copied", "exec")
    assert "temperature=0.5" in code
    assert '"mode": "fused"' in code
    assert f'"{visit.url}/v1"' in code
    curl = page.input_value("#code-curl")
    assert r"What'\''s the code" in curl
    page.keyboard.press("Escape")
    expect(page.locator("#code")).to_be_hidden()


@story
def a_busy_server_is_asked_again_until_a_person_stops_it(visit: Visit) -> None:
    page = visit.open()
    visit.add()
    turn = visit.ask("busy: what is the code of door 12?")
    expect(turn.locator(".busy")).to_contain_text("as many requests as it may. Trying again in")
    visit.check_access("busy")
    expect(turn.locator(".text")).to_contain_text("door 12 is 20012", timeout=WAIT_MS)
    turn = visit.ask("full: what is the code of door 13?")
    expect(turn.locator(".busy")).to_contain_text("No engine has room. Trying again in")
    expect(page.locator("#ask-button")).to_be_disabled()
    page.press("#question", "Escape")
    expect(turn.locator(".note")).to_have_text("Stopped.")
    expect(page.locator("#ask-button")).to_be_enabled()


@story
def what_is_too_long_is_refused_with_ways_out(visit: Visit) -> None:
    visit.open()
    visit.add()
    turn = visit.ask("long: what is the code of door 14?")
    expect(turn.locator(".trouble")).to_contain_text("maximum context length is 4096 tokens")
    visit.check_access("refused")
    turn.get_by_role("button", name="Answer from retrieval alone").click()
    last = visit.page.locator(".turn").last
    expect(last.locator(".text")).to_contain_text("door 14 is 20014", timeout=WAIT_MS)
    expect(last.locator(".cost")).to_contain_text("rag · ")


@story
def nothing_in_the_documents_is_about_the_question(visit: Visit) -> None:
    visit.open()
    visit.add()
    turn = visit.ask("How is the weather?")
    expect(turn.locator(".note")).to_have_text(
        "Nothing in the documents is about this question: check the answer.", timeout=WAIT_MS
    )


@story
def a_broken_connection_is_taken_up_where_it_broke(visit: Visit) -> None:
    visit.open()
    visit.add()
    turn = visit.ask("once: what is the code of door 4321?")
    expect(turn.locator(".text")).to_have_text(f"{ANSWER}[1]", timeout=WAIT_MS)


@story
def a_connection_that_stays_broken_leaves_what_came(visit: Visit) -> None:
    visit.open()
    visit.add()
    turn = visit.ask("always: what is the code of door 4321?")
    for _ in range(5):
        turn.get_by_role("button", name="Try now").click()
    expect(turn.locator(".trouble")).to_contain_text(
        "What came before stands above", timeout=WAIT_MS
    )
    assert turn.locator(".text").inner_text().startswith("🚪 The")
    visit.check_access("lost")


@story
def a_key_is_asked_for_and_a_wrong_one_is_told(visit: Visit) -> None:
    page = visit.page
    page.goto(f"{visit.url}/keyed/")
    expect(page.locator("#notice")).to_contain_text("You did not provide an API key")
    expect(page.locator("#key")).to_be_focused()
    visit.check_access("key form")
    page.keyboard.type("sk-wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#notice")).to_contain_text("This key is not taken: Incorrect API key")
    page.fill("#key", "sk-a")
    page.keyboard.press("Enter")
    expect(page.locator("#ask-button")).to_be_enabled()
    visit.add()
    turn = visit.ask()
    expect(turn.locator(".text")).to_contain_text("door 4321 is 24321", timeout=WAIT_MS)
    turn.get_by_role("button", name="Copy as code").click()
    assert "sk-a" not in page.input_value("#code-curl") + page.input_value("#code-python")
    assert (
        page.evaluate("localStorage.length + sessionStorage.length + document.cookie.length") == 0
    )


@story
def a_file_that_is_too_large_or_cannot_be_read_says_so(visit: Visit) -> None:
    page = visit.open()
    files = [
        file("huge.txt", b"x" * 2_500_000),
        file("picture.txt", b"\x89PNG\r\n\x1a\n" + b"\0" * 99),
    ]
    page.set_input_files("#files", files)
    for name, why in {
        "huge.txt": "limit",
        "picture.txt": "Files of this kind are not read",
    }.items():
        expect(visit.row(name)).to_have_attribute("data-state", "failed", timeout=WAIT_MS)
        expect(visit.row(name)).to_contain_text("Not read: ")
        expect(visit.row(name)).to_contain_text(why)
    visit.check_access("unreadable")


@story
def the_page_waits_for_the_models_and_goes_on_by_itself(visit: Visit) -> None:
    switch(visit, "loading")
    visit.page.goto(f"{visit.url}/")
    expect(visit.page.locator("#notice")).to_contain_text("the target's weights are loading")
    expect(visit.page.locator("#ask-button")).to_be_disabled()
    visit.check_access("loading")
    switch(visit, "loaded")
    expect(visit.page.locator("#ask-button")).to_be_enabled(timeout=WAIT_MS)
    expect(visit.page.locator("#notice")).to_be_empty()


@story
def reading_shows_percent_and_seconds_and_can_be_stopped(visit: Visit) -> None:
    visit.open()
    visit.add()
    turn = visit.ask("slow: what is the code of door 15?")
    expect(turn.locator(".state")).to_contain_text("waiting for 1 s")
    expect(turn.locator(".progress")).to_contain_text("Reading the documents: ")
    expect(turn.locator(".progress")).to_contain_text(" s left")
    visit.page.click("#stop")
    expect(turn.locator(".note")).to_have_text("Stopped.")


@story
def hostile_texts_are_shown_and_never_interpreted(visit: Visit) -> None:
    page = visit.open()
    evil = '<img src=x onerror="alert(1)"><script>alert(2)</script> 666'
    visit.add("<img src=x onerror=alert(3)>.txt", f"{evil}\n" * 5)
    turn = visit.ask("script 666")
    expect(turn.locator(".text")).to_contain_text("<script>alert(2)</script>", timeout=WAIT_MS)
    turn.locator("button.source").click()
    expect(page.locator("mark")).to_have_text(evil)
    assert page.locator("img, main script").count() == 0
    refused = "document.body.innerHTML = '<b>x</b>'"
    assert page.evaluate(f"() => {{ try {{ {refused}; return false }} catch {{ return true }} }}")
    assert "TrustedHTML" in visit.complaints.pop()


@story
def a_server_without_a_library_is_sent_the_texts(visit: Visit) -> None:
    page = visit.open("/texts/")
    expect(page.locator("#documents-note")).to_contain_text("This server keeps no files")
    visit.add()
    turn = visit.ask()
    turn.locator("button.source").click(timeout=WAIT_MS)
    expect(page.locator("mark")).to_have_text(ANSWER)


@story
def a_document_is_deleted_after_a_question(visit: Visit) -> None:
    page = visit.open()
    visit.add("old.txt", "The code of door 3 is 21.")
    visit.row("old.txt").get_by_role("button", name="old.txt", exact=True).click()
    expect(page.locator("#reader-text")).to_have_text("The code of door 3 is 21.")
    for choice, count in (("Keep it", 1), ("Delete it on the server", 0)):
        visit.row("old.txt").get_by_role("button", name="Delete old.txt").click()
        page.get_by_role("button", name=choice).click()
        rows = page.locator("#document-list li").filter(has_text="old.txt")
        expect(rows).to_have_count(count, timeout=WAIT_MS)
    expect(page.locator("#reader-text")).to_have_text("This document is deleted.")
    page.reload()
    expect(page.locator("#ask-button")).to_be_enabled()
    expect(page.locator("#document-list")).not_to_contain_text("old.txt")


@story
def everything_is_reached_by_the_keyboard_and_shows_its_focus(visit: Visit) -> None:
    page = visit.open()
    visit.add()
    turn = visit.ask()
    expect(turn.locator(".cost")).to_be_visible(timeout=WAIT_MS)
    page.evaluate("document.activeElement.blur()")
    wanted = page.evaluate(
        """[...document.querySelectorAll("button, input, select, textarea, summary")]
        .filter((each) => each.checkVisibility() && !each.disabled && each.tabIndex >= 0).length"""
    )
    reached: set[str] = set()
    for _ in range(wanted + 12):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate(
                """() => { const each = document.activeElement;
                if (each === document.body) return "";
                if (getComputedStyle(each).outlineStyle === "none") throw new Error(each.outerHTML);
                window.seen ??= new Map();
                if (!seen.has(each)) seen.set(each, String(seen.size));
                return each.matches("button, input, select, textarea, summary")
                  ? seen.get(each) : ""; }"""
            )
        )
    assert len(reached - {""}) == wanted


@story
def a_phone_shows_one_part_at_a_time(visit: Visit) -> None:
    phone = Visit(visit.page.context.browser, visit.url, viewport=PHONE, has_touch=True)
    page = phone.open()
    phone.check_fits("conversation")
    page.get_by_role("button", name="Documents", exact=True).click()
    phone.add()
    phone.check_fits("documents")
    phone.check_access("phone, documents")
    page.get_by_role("button", name="Conversation", exact=True).click()
    turn = phone.ask()
    turn.locator("button.source").click(timeout=WAIT_MS)
    expect(page.locator("mark")).to_be_in_viewport()
    phone.check_fits("reader")
    phone.check_access("phone, reader")
    page.click("#back")
    expect(turn.locator("button.source")).to_be_focused()
    page.fill("#question", QUESTION)
    page.click("#compare")
    expect(page.locator(".compared .cost")).to_have_count(3, timeout=WAIT_MS)
    phone.check_fits("compared")
    page.get_by_role("button", name="Who wrote this").last.click()
    expect(page.locator(".tokens .token")).to_have_count(8)
    phone.check_fits("who wrote this")
    phone.check_access("phone, who wrote this")
    phone.close()


@story
def the_source_in_a_pdf_is_named_by_its_page(visit: Visit) -> None:
    page = visit.open()
    pages = [[(72.0, 720.0, f"Door {number} opens with {20000 + number}.")] for number in range(3)]
    page.set_input_files("#files", [file("doors.pdf", write_pdf(pages))])
    expect(visit.row("doors.pdf")).to_have_attribute("data-state", "ready", timeout=WAIT_MS)
    expect(visit.row("doors.pdf")).to_contain_text("3 pages")
    turn = visit.ask("How does 20001 come in?")
    turn.get_by_role("button", name="[1] doors.pdf, page 2").click(timeout=WAIT_MS)
    expect(page.locator("mark")).to_have_text("Door 1 opens with 20001.")


@story
def a_chosen_folder_is_added_file_by_file(visit: Visit) -> None:
    page = visit.open()
    folder = Path(__file__).parent
    page.set_input_files("#folder", folder)
    name = f"{folder.name} › requirements.txt"
    expect(visit.row(name)).to_have_attribute("data-state", "ready", timeout=WAIT_MS)
    page.reload()  # what was there before is listed, and chosen by a person alone
    expect(visit.row(name).get_by_role("checkbox")).not_to_be_checked(timeout=WAIT_MS)
    page.click("#choose-all")
    expect(visit.row(name).get_by_role("checkbox")).to_be_checked()


def take_pictures(browser: Browser, url: str, document: Path, question: str, folder: Path) -> None:
    """Take the pictures of the pages, of a server that answers by itself."""
    looks: dict[str, Any] = {
        "light": {"color_scheme": "light"},
        "dark": {"color_scheme": "dark"},
        "phone": {"viewport": PHONE, "device_scale_factor": 2},
    }
    for name, options in looks.items():
        visit = Visit(browser, url, **options)
        page = visit.open()
        if name == "phone":
            page.get_by_role("button", name="Documents", exact=True).click()
        if visit.row(document.name).count():
            visit.row(document.name).get_by_role("checkbox").check()
        else:
            visit.add(document.name, document.read_text())
        if name == "phone":
            page.get_by_role("button", name="Conversation", exact=True).click()
        turn = visit.ask(question)
        expect(turn.locator(".cost")).to_be_visible(timeout=3 * WAIT_MS)
        if name != "phone" and turn.locator("button.source").count():
            turn.locator("button.source").first.click()
            expect(page.locator("mark").first).to_be_in_viewport()
        page.screenshot(path=folder / f"console-{name}.png")
        visit.close()


@contextmanager
def browsing(executable: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # Chromium's own sandbox does not start for root; it opens our page alone.
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield browser
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("url")
    parser.add_argument("--browser", required=True)
    parser.add_argument("--only", default="", help="stories whose names have this")
    parser.add_argument("--pictures", nargs=3, metavar=("DOCUMENT", "QUESTION", "FOLDER"))
    options = parser.parse_args()
    failed = passed = 0
    with browsing(options.browser) as browser:
        if options.pictures:
            document, question, folder = options.pictures
            take_pictures(browser, options.url, Path(document), question, Path(folder))
            return
        told = [(each, theme) for each in STORIES for theme in ("light", "dark")]
        for each, theme in [*told, (measure, "light")]:
            if options.only in each.__name__:
                visit = Visit(browser, options.url, color_scheme=theme)
                try:
                    each(visit)
                    visit.close()
                    passed += 1
                    print(f"{each.__name__}, {theme}", flush=True)
                except Exception:
                    failed += 1
                    print(f"FAILED: {each.__name__}, {theme}\n{traceback.format_exc()}", flush=True)
    print(f"{passed} passed, {failed} failed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
