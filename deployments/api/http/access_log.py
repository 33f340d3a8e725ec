"""One line of the log for each request for an answer, and what it is counted as.

The line has the tenant's name, numbers and words of closed sets: no key, and nothing of the request
or the answer. It is written at any `log_level`, as Serve's own line for each call is at ``INFO``,
and ``logging_config.enable_access_log: false`` turns both off (`deployments.logs`).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect

from deployments.api.gate.admission import Ticket, Usage
from deployments.api.gate.quotas import Reservation
from deployments.api.http.error_responses import http_error
from deployments.api.http.event_feed import ClientLeft
from library.accounts.books import Accounts
from library.accounts.callers import Caller
from library.accounts.usage_ledger import AGAIN, UsageEntry
from rapid import errors
from rapid.events import ChoiceDelta, Finished, GenerationEvent, Started
from rapid.messages import utc_day
from rapid.ports import Clock
from rapid.receipt import Receipt

if TYPE_CHECKING:  # which loads Ray
    from deployments.metrics import IngressMetrics

_log = logging.getLogger(__name__)

# The first listed class in an error's method resolution order decides.
_CAUSES: dict[type[BaseException], str] = {
    errors.BodyTooLarge: "body too large",
    errors.BodyTooSlow: "body too slow",
    errors.UnsupportedEncoding: "body compressed",
    errors.PromptTooLong: "prompt too long",
    errors.UnknownModel: "unknown model",
    errors.BadRequest: "bad request",
    errors.Unauthorized: "no valid key",
    errors.TooManyRequests: "tenant has its share",
    errors.Overloaded: "server full",
    errors.DrafterHangs: "no drafter",
    errors.DrafterUnavailable: "no drafter",
    errors.TargetUnavailable: "no target",
    errors.RetrievalPending: "no retrieval",
    errors.RetrievalUnavailable: "no retrieval",
    errors.LeaseNotFound: "lease lost",
    errors.OrchestratorLost: "orchestrator lost",
    errors.CannotContinue: "cannot continue",
    errors.DeadlinePassed: "deadline passed",
    errors.EngineFailed: "engine failed",
}
_OTHER = "other"
CAUSES = frozenset({*_CAUSES.values(), _OTHER})
_LEFT = (ClientLeft, ClientDisconnect, asyncio.CancelledError)
_TOTALS = ("ok", "refused", "failed", "left", "drafted", "accepted")  # counts since the start


class RequestRecord:
    """What becomes of one request, noted as it goes by.

    Attributes:
        answer_id: The id of the answer in the ledger; None until one is to be begun.
        resumes: Whether the answer was begun by an earlier request, whose stream broke.
    """

    def __init__(self, request_id: str, caller: Caller, model: str | None, clock: Clock) -> None:
        self._clock = clock
        self.request_id, self.model = request_id, model
        self.tenant, self.key_id = caller.tenant, caller.key_id
        self.answer_id: str | None = None
        self.resumes = False
        self.reservation: Reservation | None = None
        self.most_tokens = 0  # of the answer, over all choices
        self.told = Usage(0, 0)
        self.began = clock()
        self.waited_s: float | None = None
        self.first_text: float | None = None
        self.mode: str | None = None
        self.receipt: Receipt | None = None
        self.ticket: Ticket | None = None
        self.error: BaseException | None = None

    @contextmanager
    def admission(self) -> Iterator[None]:
        """Note how long the context lasts, in which the request waits for its place."""
        began = self._clock()
        try:
            yield
        finally:
            self.waited_s = self._clock() - began

    def note(self, event: GenerationEvent) -> None:
        """Note what an event of the answer says; the last one settles what was reserved."""
        if isinstance(event, Started):
            self.mode = event.mode
            self.told = Usage(event.prompt_tokens, 0)
            if self.reservation is not None and event.prompt_tokens:
                self.reservation.correct(event.prompt_tokens + self.most_tokens)
        elif isinstance(event, ChoiceDelta):
            so_far = self.told.completion_tokens + event.num_tokens
            self.told = self.told._replace(completion_tokens=so_far)
            if self.first_text is None:
                self.first_text = self._clock()
                if self.reservation is not None:
                    self.reservation.end_prefill()
        elif isinstance(event, Finished):
            assert self.ticket is not None
            self.receipt = event.receipt
            receipt = event.receipt
            self.ticket.settle(_usage(receipt), receipt.target_s + receipt.drafter_s)
            if self.reservation is not None:
                self.reservation.settle(sum(_usage(event.receipt)))

    def ending(self) -> tuple[str, str]:
        """Return the outcome, ``ok``, ``refused``, ``failed`` or ``left``, and its cause."""
        if self.receipt is not None and self.error is None:
            return "ok", ""
        if self.error is None or isinstance(self.error, _LEFT):
            return "left", ""
        began = self.mode is not None
        is_refused = not began and http_error(self.error).status != 500
        return "refused" if is_refused else "failed", cause_of(self.error)


class AccessLog:
    """The records of the requests of one ingress, each of which is written when it ends."""

    def __init__(
        self,
        clock: Clock,
        metrics: IngressMetrics | None = None,
        accounts: Accounts | None = None,
    ) -> None:
        """Create the log.

        Args:
            clock: Monotonic seconds.
            metrics: Where ends and waits are counted; None where nothing is.
            accounts: Where usage is written; None where it is not.
        """
        self._clock = clock
        self._metrics = metrics
        self._accounts = accounts
        self._open: set[RequestRecord] = set()
        self._totals = Counter(dict.fromkeys(_TOTALS, 0))

    def counts(self) -> dict[str, int]:
        """Return how many requests wait, are answered and have ended here, by outcome.

        A request waits until its answer begins: for a place, its documents and its leases. Beside
        them are the drafted tokens of complete answers, and how many of these were accepted.
        """
        answering = sum(each.mode is not None for each in self._open)
        return {"waiting": len(self._open) - answering, "answering": answering, **self._totals}

    @contextmanager
    def request(
        self, request_id: str, caller: Caller, model: str | None
    ) -> Iterator[RequestRecord]:
        """Record one request for the duration of the context; its model may be noted later."""
        record = RequestRecord(request_id, caller, model, self._clock)
        self._open.add(record)
        try:
            yield record
        except BaseException as error:
            record.error = error
            raise
        finally:
            self._close(record)

    def refuse(self, request_id: str, error: errors.Unauthorized) -> None:
        """Record a request, to any route, that brought no valid key."""
        fields = {"outcome": "refused", "cause": cause_of(error)}
        self._write(request_id, fields)
        if self._metrics is not None:
            self._metrics.count_end("refused", cause_of(error))

    def visit(self, request_id: str, caller: Caller, route: str, status: int, began: float) -> None:
        """Record a request to a route that gives no answers."""
        fields = {
            "tenant": caller.tenant,
            "key_id": caller.key_id,
            "route": route,
            "outcome": "ok" if status < 400 else "refused" if status < 500 else "failed",
            "status": status,
            "total_ms": _ms(self._clock() - began),
        }
        self._write(request_id, fields)

    def _close(self, record: RequestRecord) -> None:
        ended = self._clock()
        outcome, cause = record.ending()
        self._open.discard(record)
        self._totals[outcome] += 1
        for each in record.receipt.choices if record.receipt else ():
            self._totals.update(drafted=each.drafted, accepted=each.accepted)
        if record.reservation is not None:
            record.reservation.settle(sum(record.told) if outcome == "left" else None)
        if self._accounts is not None and record.answer_id and record.mode is not None:
            for entry in _entries(record, record.answer_id, outcome):
                self._accounts.note(entry)
        first_text_s = None if record.first_text is None else record.first_text - record.began
        fields = {
            "tenant": record.tenant,
            "key_id": record.key_id,
            "model": record.model,
            "outcome": outcome,
            "cause": cause or None,
            "mode": record.mode,
            **(record.ticket.usage._asdict() if record.ticket and record.ticket.usage else {}),
            **_stages(record.receipt),
            "admission_ms": _ms(record.waited_s),
            "first_text_ms": _ms(first_text_s),
            "total_ms": _ms(ended - record.began),
        }
        self._write(record.request_id, fields)
        if self._metrics is not None:
            self._metrics.count_end(outcome, cause, record.model)
            if record.waited_s is not None:
                self._metrics.observe_wait(record.waited_s, record.model)

    def _write(self, request_id: str, fields: dict[str, Any]) -> None:
        known = {name: value for name, value in fields.items() if value is not None}
        extra = {"request_id": request_id, "serve_access_log": True} | known
        _log.info("request %s: %s", request_id, fields["outcome"], extra=extra)


def cause_of(error: BaseException) -> str:
    """Return why a request was refused or failed, one of a closed set of phrases."""
    return next((_CAUSES[cls] for cls in type(error).__mro__ if cls in _CAUSES), _OTHER)


def _usage(receipt: Receipt) -> Usage:
    return Usage(receipt.prompt_tokens, sum(each.completion_tokens for each in receipt.choices))


def _entries(record: RequestRecord, answer_id: str, status: str) -> Iterator[UsageEntry]:
    """Yield the entries of the ledger.

    Of an answer whose caller left, it has what was told of it: its prompt, and its tokens up to the
    last delta. Of one at which the server failed, nothing. What resuming one took is apart.
    """
    receipt = record.receipt
    usage = record.told if status == "left" else Usage(0, 0)
    if receipt is not None:
        usage = _usage(receipt)
    entry = UsageEntry(
        request_id=answer_id,
        tenant=record.tenant,
        key_id=record.key_id,
        model=record.model or "",
        day=utc_day().isoformat(),
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=receipt.cached_tokens if receipt else 0,
        completion_tokens=usage.completion_tokens,
        target_s=receipt.target_s if receipt else 0.0,
        drafter_s=receipt.drafter_s if receipt else 0.0,
        kv_byte_s=receipt.kv_byte_s if receipt else 0.0,
        status=status,
    )
    if record.resumes:
        none: Any = {"prompt_tokens": 0, "cached_tokens": 0, "completion_tokens": 0}
        yield replace(entry, request_id=f"{answer_id}+{secrets.token_hex(8)}", status=AGAIN, **none)
        entry = replace(entry, target_s=0.0, drafter_s=0.0, kv_byte_s=0.0)
    yield entry


def _stages(receipt: Receipt | None) -> dict[str, float]:
    """Return the milliseconds of a complete answer by stage."""
    timings = receipt.timings_ms if receipt else {}
    return {f"{stage}_ms": round(ms, 1) for stage, ms in timings.items()}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 1)
