"""An engine's reports: its state, what a lease used of it, and what it has forgotten."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Erasure:
    """The deletion of documents in one place that may hold parts of them: a memory, a disk.

    Attributes:
        place: The place, as ``memory`` or ``disk``.
        num_bytes: Bytes of what was looked through there.
        num_found: Parts of the documents that were found and removed: pages, passages or texts.
        pending: Why parts may still be there, for somebody to look again; None if none is.
    """

    place: str
    num_bytes: int = 0
    num_found: int = 0
    pending: str | None = None


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """The occupancy of an engine and the work that waits for it.

    Attributes:
        kv_pages_in_use: Pages in use, without idle prefixes that are only kept for reuse.
        leases_kept: Places kept for second leases that open leases still expect.
        kv_pages_kept: Pages kept for them.
        leases_waiting: Requests in the queue for a lease.
        tokens_waiting: Prompt tokens that are still to be read. Pages that open leases share count
            once. Prompts of waiting leases count whole, but only once for one `affinity`.
        prefill_tokens_per_s: Prompt tokens read in a second of the steps that read any, beside
            whatever else those steps did; 0 before the first.
        step_s: Usual seconds of a step that reads no prompt; 0 before the first.
        ahead_hits: Calls for a block that found some of it drafted ahead.
        ahead_misses: Calls for a block that found the tokens drafted ahead to be wrong.
        steps: Steps since the engine started; `steps_s` are their seconds, `step_calls` the calls
            that had rows in them and `step_tokens` these rows, one for each token.
        tokens_drawn: Tokens drawn from the model's distribution or judged; of `tokens_specified` no
            fast form was sure, so the specification decided (``docs/algorithm.md``).
        host_tokens: Tokens whose KV is in host memory; `host_tokens_restored` came back from there.
        passage_tokens: Tokens of passages whose KV is kept; `passage_tokens_placed` were put into
            prompts from there.
        disk_tokens: Tokens whose KV is in files; `disk_tokens_read` came back from there.
    """

    leases_open: int
    max_leases: int
    kv_pages_in_use: int
    kv_pages_total: int
    page_tokens: int
    max_context: int
    leases_kept: int = 0
    kv_pages_kept: int = 0
    leases_waiting: int = 0
    tokens_waiting: int = 0
    prefill_tokens_per_s: float = 0.0
    step_s: float = 0.0
    ahead_hits: int = 0
    ahead_misses: int = 0
    steps: int = 0
    steps_s: float = 0.0
    step_calls: int = 0
    step_tokens: int = 0
    tokens_drawn: int = 0
    tokens_specified: int = 0
    host_tokens: int = 0
    host_tokens_restored: int = 0
    passage_tokens: int = 0
    passage_tokens_placed: int = 0
    disk_tokens: int = 0
    disk_tokens_read: int = 0


@dataclass(frozen=True, slots=True)
class LeaseUsage:
    """What leases used of an engine.

    Attributes:
        busy_s: Their part of the seconds of its steps, refused drafts included.
        kv_byte_s: Bytes of KV by the seconds for which they were held. Pages that several leases
            share count for each.
    """

    busy_s: float = 0.0
    kv_byte_s: float = 0.0

    def __add__(self, other: LeaseUsage) -> LeaseUsage:
        """Return the sum of both."""
        return LeaseUsage(self.busy_s + other.busy_s, self.kv_byte_s + other.kv_byte_s)
