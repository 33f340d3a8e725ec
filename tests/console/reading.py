"""Stories of what is read: the pages of a file, the sample, and the chosen model."""

from __future__ import annotations

from playwright.sync_api import expect

from tests.console.visit import WAIT_MS, Visit, file, story
from tests.library.parsing.small_pdf import write_pdf


@story
def pages_of_a_pdf_stand_apart_and_the_cited_one_is_named(visit: Visit) -> None:
    page = visit.open()
    lines = [[f"Door {number} opens with {20000 + number}."] for number in range(1, 13)]
    lines[6] = []  # a page without text
    pages = [[(72.0, 720.0, line) for line in each] for each in lines]
    page.set_input_files("#files", [file("twelve.pdf", write_pdf(pages))])
    expect(visit.row("twelve.pdf")).to_have_attribute("data-state", "ready", timeout=WAIT_MS)
    turn = visit.ask("How does 20003 come in?")
    # The first source is shown by itself, and the focus stays with the question.
    expect(page.locator("mark")).to_have_text("Door 3 opens with 20003.", timeout=WAIT_MS)
    expect(page.locator("#question")).to_be_focused()
    expect(page.locator("#reader-place")).to_have_text("twelve.pdf, page 3 of 12")
    titles = [f"Page {number} of 12" for number in range(1, 13)]
    expect(page.locator("#reader-text h3")).to_have_text(titles)
    shown = page.locator("#reader-text").inner_text()
    assert shown.index("Page 3 of 12") < shown.index("Door 3 opens") < shown.index("Page 4 of 12")
    assert shown.index("Page 7 of 12") < shown.index("Page 8 of 12") < shown.index("Door 8 opens")
    visit.check_access("pages")
    turn.locator("button.source").click()
    expect(page.locator("mark")).to_be_focused()


@story
def an_empty_page_offers_a_sample_that_is_asked_about_at_once(visit: Visit) -> None:
    page = visit.open("/two/")
    page.press("#question", "Enter")  # in the empty question
    expect(visit.row("Sample chronicle.txt")).to_have_attribute("data-state", "ready")
    expect(page.locator("#question")).to_have_value("List the three deposits of Lonadu.")
    expect(page.locator("#sample")).to_have_count(0)
    page.select_option("#model", "english")
    expect(page.locator(".hint")).not_to_contain_text("only generated")
    page.locator("#sample").click()
    expect(page.locator("#asked-about")).to_have_text("About Sample, objects in Python.txt.")
    visit.check_access("sample")
    with page.expect_request("**/chat/completions") as sent:
        page.click("#ask-button")
    body = sent.value.post_data_json
    assert body["model"] == "english"
    assert "reference-\ncounting scheme" in body["rapid"]["documents"][0]["text"]


@story
def the_sample_is_answered_right_and_its_passages_are_marked(visit: Visit) -> None:
    page = visit.open("/small/")
    page.click("#sample")
    expect(visit.row("Sample chronicle.txt")).to_have_attribute("data-state", "ready")
    page.keyboard.press("Enter")  # the question is there, and has the focus
    answer = page.locator(".turn .text")
    expect(answer).to_contain_text("Lonadu is 50 crates of taki lupa.[3]", timeout=3 * WAIT_MS)
    expect(page.locator("mark")).to_have_text(
        "The first deposit of Lonadu is 23 bags of mava kodo."
    )
    page.get_by_role("button", name="Source 3").click()
    expect(page.locator("mark")).to_have_text(
        "The third deposit of Lonadu is 50 crates of taki lupa."
    )
    expect(page.locator(".cost")).to_contain_text("fused · ")
    visit.check_access("sample answered")
