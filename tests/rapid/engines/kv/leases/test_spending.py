"""What leases say that they used: all of it, once, whoever asks and whoever leaves."""

from __future__ import annotations

import asyncio

import pytest

from rapid.engine_status import LeaseUsage
from rapid.engines.engine import Engine
from rapid.engines.kv.cache import PagePool
from rapid.engines.kv.leases.lease_ledger import LeaseLedger
from rapid.errors import LeaseNotFound
from tests.rapid.tiny_models import lease_request, random_prompt

PAGE_BYTES = 4096


@pytest.fixture
def engine_settings() -> dict[str, object]:
    return {"step_tokens": 16, "draft_ahead": True}


async def answered(engine: Engine, lease_id: str, tenant: str, *, is_settled: bool) -> float:
    """Answer a question with drafts, of which many are refused; return the seconds told."""
    prompt = random_prompt(40, seed=hash(lease_id) % 97)
    await engine.open(lease_request(lease_id, prompt, max_tokens=12, tenant=tenant))
    await engine.prefill(lease_id)
    for _ in range(3):
        await engine.draft(lease_id, 0, None, 4)
        await engine.decode(lease_id, 0, 2)
    told = engine.settle(lease_id).busy_s if is_settled else 0.0
    engine.release(lease_id)
    return told


async def test_what_tenants_are_told_adds_up_to_the_engines_busy_seconds(engine: Engine) -> None:
    """Half of the answers are left untold; the next one of their tenant tells of them."""
    told = 0.0
    for part in range(4):
        asked = [
            answered(engine, f"{tenant}{part}", tenant, is_settled=part % 2 == 1)
            for tenant in "abc"
        ]
        told += sum(await asyncio.gather(*asked))
    for tenant in "abc":  # what was computed ahead while the last ones told
        await engine.open(lease_request(tenant, tenant=tenant))
        told += engine.settle(tenant).busy_s
        assert engine.settle(tenant).busy_s == 0.0
        engine.release(tenant)
    status = engine.status()
    assert status.steps > 50
    assert told == pytest.approx(status.steps_s, rel=1e-6)


def test_pages_are_told_by_the_seconds_for_which_they_were_held() -> None:
    now = 10.0
    ledger = LeaseLedger(PagePool(20), 8, 4, 400, 60.0, lambda: now, page_bytes=PAGE_BYTES)
    request = lease_request("a", random_prompt(40), max_tokens=8, num_choices=2)
    ledger.submit(ledger.prepare(request, lambda opened: None))
    num_held = ledger.status().kv_pages_in_use
    now = 12.0
    assert ledger.settle("a") == LeaseUsage(0.0, 2.0 * num_held * PAGE_BYTES)
    now = 15.0
    ledger.release("a")
    with pytest.raises(LeaseNotFound):
        ledger.settle("a")
    ledger.submit(ledger.prepare(lease_request("b"), lambda opened: None))
    assert ledger.settle("b") == LeaseUsage(0.0, 3.0 * num_held * PAGE_BYTES)


def test_a_lease_of_who_has_used_less_opens_first() -> None:
    ledger = LeaseLedger(PagePool(20), 8, 1, 400, 60.0, lambda: 0.0)
    opened: list[str] = []
    for lease_id in ("heavy-0", "heavy-1", "light-0", "light-1"):
        request = lease_request(lease_id, tenant=lease_id[:5])
        ledger.submit(ledger.prepare(request, lambda one: opened.append(one.lease_id)))  # type: ignore[union-attr]
    ledger.spending.charge(ledger.get("heavy-0"), 1.0)
    for _ in range(4):
        ledger.release(opened[-1])
    assert opened == ["heavy-0", "light-0", "light-1", "heavy-1"]
