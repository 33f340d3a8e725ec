"""What a prefill asks the model for, on a ledger without a model."""

from __future__ import annotations

import pytest
import torch

from rapid.engines.kv.cache import KVCache, KVLayout, PagePool
from rapid.engines.kv.leases.lease_ledger import LeaseLedger
from rapid.engines.kv.rings import KeptWindows, RingPool
from rapid.engines.work.prefill import Prefill
from rapid.errors import OutOfStep
from tests.rapid.engines.kv.leases.test_lease_ledger import Ledger
from tests.rapid.engines.kv.test_rings import PLAN, cache_of
from tests.rapid.tiny_models import lease_request, random_prompt

PAGE_TOKENS = 8
NO_LAYERS = KVCache(KVLayout(1, 1, torch.float32, ()), 20, PAGE_TOKENS)


def test_only_the_pages_that_are_missing_are_computed() -> None:
    """A page in the middle is missing, as after half a prompt came back from host memory."""
    ledger = Ledger()
    prompt = random_prompt(4 * PAGE_TOKENS + 1)
    ledger.request(lease_request("a", prompt))
    lease = ledger.get("a")
    ledger.prefixes.note_computed(lease.prompt_pages[[0, 2, 3]])
    prefill = Prefill(lease, NO_LAYERS, ledger.prefixes, PAGE_TOKENS)
    prefill.begin()
    prefill.advance()
    (fed,) = prefill.feeds(64)
    assert (fed.position, list(fed.token_ids)) == (PAGE_TOKENS, prompt[8:16].tolist())
    assert lease.read_so_far == (PAGE_TOKENS, PAGE_TOKENS)
    prefill.take(torch.empty(0))
    prefill.advance()
    assert prefill.is_done
    assert prefill.result.num_cached_tokens == 3 * PAGE_TOKENS
    assert lease.read_so_far == (4 * PAGE_TOKENS, 3 * PAGE_TOKENS)


def test_a_prefill_that_was_dropped_amid_a_page_begins_the_page_again() -> None:
    """Another lease may have begun to write it meanwhile."""
    ledger = Ledger()
    ledger.request(lease_request("a", random_prompt(4 * PAGE_TOKENS + 1)))
    lease = ledger.get("a")
    lease.sequences[0].num_computed = PAGE_TOKENS + 3
    Prefill(lease, NO_LAYERS, ledger.prefixes, PAGE_TOKENS).begin()
    assert lease.sequences[0].num_computed == PAGE_TOKENS


def test_a_window_that_the_first_choice_has_written_over_is_not_forked() -> None:
    rings = RingPool(PLAN)
    ledger = LeaseLedger(PagePool(99), PAGE_TOKENS, 4, 400, 60.0, lambda: 0.0, rings=rings)
    request = lease_request("a", random_prompt(4 * PAGE_TOKENS + 1), num_choices=2)
    ledger.submit(ledger.prepare(request, lambda _: None))
    lease = ledger.get("a")
    first = lease.sequences[0]
    assert first.ring is not None
    first.num_computed = first.ring.stop = 4 * PAGE_TOKENS + PLAN.ring_tokens
    kept = KeptWindows(PLAN, cache_of())
    with pytest.raises(OutOfStep, match="went on before the others had the prompt"):
        Prefill(lease, NO_LAYERS, ledger.prefixes, PAGE_TOKENS, kept).begin()
