"""What a prefill asks the model for, on a ledger without a model."""

from __future__ import annotations

import torch

from rapid.engines.kv.cache import KVCache, KVLayout
from rapid.engines.work.prefill import Prefill
from tests.rapid.engines.kv.test_leases import Ledger
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
    fed = prefill.feed(64)
    assert (fed.position, list(fed.token_ids)) == (PAGE_TOKENS, prompt[8:16].tolist())
    assert lease.num_read == PAGE_TOKENS
    prefill.take(torch.empty(0))
    prefill.advance()
    assert prefill.is_done
    assert prefill.result.num_cached_tokens == 3 * PAGE_TOKENS
    assert lease.num_read == 4 * PAGE_TOKENS
