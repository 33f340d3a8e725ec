"""Stories of operators, who look after the server on the page's second tab."""

from __future__ import annotations

import copy
from typing import Any

from playwright.sync_api import expect

from tests.console.visit import PHONE, WAIT_MS, Visit, read_state, say_state, story


def engine(**fields: int) -> dict[str, Any]:
    usual = {"name": "drafter/b1", "pool": "drafter", "status": "ok", "page_tokens": 16}
    usual |= {"leases_open": 0, "max_leases": 4, "leases_waiting": 0, "tokens_waiting": 0}
    return usual | {"kv_pages_in_use": 0, "kv_pages_total": 100} | fields


def pool(**fields: Any) -> dict[str, Any]:
    return {"replicas": 1, "starting": 0, "stopping": 0, "status": "HEALTHY"} | fields


def card(visit: Visit, title: str) -> Any:
    return visit.page.get_by_role("region", name=title, exact=True)


@story
def an_operator_sees_pools_leases_tiers_queue_and_acceptance(visit: Visit) -> None:
    page = visit.open()
    visit.add()
    expect(visit.ask().locator(".cost")).to_be_visible(timeout=WAIT_MS)
    page.focus("#asking-tab")
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="Server")).to_be_focused()
    expect(page.get_by_role("tabpanel", name="Server")).to_be_visible()
    expect(page.locator("#asking")).to_be_hidden()
    target = card(visit, "Pool target")
    expect(target).to_contain_text("Takes requests.")
    expect(target).to_contain_text("3 of 16 open")
    expect(target).to_contain_text("41 % of 16,000 tokens in use")
    expect(target).to_contain_text("0 leases waiting, 0 tokens to read")
    expect(target).to_contain_text("12,000 tokens, 3,000 came back so far")
    expect(target).not_to_contain_text("KV on disk")
    expect(card(visit, "Questions")).to_contain_text("Nobody waits.")
    expect(card(visit, "Questions")).to_contain_text("tokens, 67 %")
    expect(card(visit, "Server")).to_contain_text("http://127.0.0.1:9100/metrics")
    expect(card(visit, "Used today")).to_be_visible()
    visit.check_access("operators")
    page.keyboard.press("Home")
    expect(page.locator("#question")).to_be_visible()


@story
def pools_that_start_are_full_or_gone_say_so_by_themselves(visit: Visit) -> None:
    page = visit.open()
    usual = read_state(visit)
    page.get_by_role("tab", name="Server").click()
    expect(card(visit, "Pool target")).to_contain_text("Takes requests.")
    state = copy.deepcopy(usual)
    state["pools"] |= {
        "target": pool(replicas=0, starting=1, status="UPDATING"),
        "drafter": pool(),
        "retriever": pool(replicas=0),
        "librarian": pool(replicas=0, status="UNHEALTHY"),
    }
    state["pools"]["big"] = pool(replicas=2)
    full = engine(leases_open=4, leases_waiting=2, tokens_waiting=9000, kv_pages_in_use=90)
    two = [engine() | {"name": f"big/{name}", "pool": "big"} for name in ("c1", "c2")]
    silent = {"name": "target/a", "pool": "target", "status": "unavailable"}
    state["engines"] = [full, silent, *two]
    state |= {"ready": False, "reason": "no target takes requests"}
    say_state(visit, state)
    expect(card(visit, "Pool target")).to_contain_text("Starting: its model is loading.")
    expect(card(visit, "Pool target")).to_contain_text("from 1 engine")
    expect(card(visit, "Pool drafter")).to_contain_text("Full: the next question waits.")
    expect(card(visit, "Pool drafter")).to_contain_text("2 leases waiting, 9,000 tokens to read")
    expect(card(visit, "Pool big")).to_contain_text("0 of 4 leases, 0 % of KV")
    expect(card(visit, "Pool retriever")).to_contain_text("At rest: a question starts it.")
    expect(card(visit, "Pool librarian")).to_contain_text("Down: nothing here takes requests.")
    expect(card(visit, "Server")).to_contain_text("Not ready: no target takes requests.")
    visit.check_access("pools in trouble")
    say_state(visit, usual)
    expect(card(visit, "Pool drafter")).to_have_count(0)
    expect(card(visit, "Pool target")).to_contain_text("Takes requests.")


@story
def a_key_sees_what_it_may(visit: Visit) -> None:
    page = visit.page
    page.goto(f"{visit.url}/keyed/")
    page.get_by_role("tab", name="Server").click()
    note = page.locator("#operators-note")
    expect(note).to_contain_text("You did not provide an API key")
    expect(page.locator(".card")).to_have_count(0)
    note.get_by_role("button", name="Enter a key").click()
    expect(page.locator("#key")).to_be_focused()
    page.keyboard.type("sk-a")
    page.keyboard.press("Enter")
    expect(note).to_contain_text("it needs the scope 'admin'")
    expect(card(visit, "Server")).to_contain_text("Ready: questions are answered.")
    expect(card(visit, "Server")).not_to_contain_text("metrics")
    expect(page.locator(".card", has_text="Pool")).to_have_count(0)
    visit.check_access("a key that is not for operators")
    page.get_by_role("button", name="Key", exact=True).click()
    page.fill("#key", "sk-op")
    page.keyboard.press("Enter")
    expect(card(visit, "Pool target")).to_contain_text("Takes requests.")
    expect(note).to_be_empty()


@story
def nothing_is_asked_while_nobody_looks_and_a_lost_connection_is_said(visit: Visit) -> None:
    page = visit.open()
    asked: list[str] = []
    page.on("request", lambda each: each.url.endswith("/state") and asked.append(each.url))
    page.get_by_role("tab", name="Server").click()
    expect(card(visit, "Pool target")).to_contain_text("Takes requests.")
    page.context.set_offline(True)
    note = page.locator("#operators-note")
    expect(note).to_contain_text("The connection to the server was lost. What stands here is")
    expect(card(visit, "Pool target")).to_be_visible()
    visit.check_access("connection lost")
    page.context.set_offline(False)
    expect(note).to_be_empty()
    page.get_by_role("tab", name="Ask").click()
    before = len(asked)
    page.wait_for_timeout(3000)  # longer than between two looks
    assert len(asked) == before


@story
def the_state_of_the_server_fits_a_phone(visit: Visit) -> None:
    phone = Visit(visit.page.context.browser, visit.url, viewport=PHONE, has_touch=True)
    page = phone.open()
    page.get_by_role("tab", name="Server").click()
    expect(card(phone, "Pool target")).to_be_visible()
    expect(page.get_by_role("button", name="Documents", exact=True)).to_be_hidden()
    phone.check_fits("operators")
    phone.check_access("phone, operators")
    phone.close()
