"""Requests and tokens a minute of a tenant, over all replicas of the ingress.

The most that a request may use is reserved before it is answered, and what it used is settled
afterwards. So a tenant has never more than its limit within any minute, however many ask at once.
A window that slides is kept instead of a bucket that refills: a full bucket would let twice the
limit through in its first minute.

All replicas ask one board, which is an actor. Only requests of tenants with limits ask it, several
in one call, and one that is likely to be granted is begun meanwhile: a call takes milliseconds, and
processor time of those who answer. While the board is away each replica goes by its own requests.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from rapid.errors import TooManyRequests
from rapid.ports import Clock

_log = logging.getLogger(__name__)

_SLOT_S = 0.1  # of a window: the resolution of its times
_SLOTS = 601  # a minute, and the slot in which it begins
_LONG_PROMPT = 131_072  # tokens at most, which are bytes: about 32,000 of English
_FORGET_S = 600.0  # after which a reservation is settled as it is: its ingress may have died
_SOONEST_S = 1.0  # the time to wait for a long prompt to be read, which is not known
_PATIENCE_S = 2.0  # for the board to answer
_GATHER_S = 0.02  # that calls wait for others, unless somebody waits for their answer

Call = Callable[..., Awaitable[Any]]
"""Function that calls a method of the board, by its name and with these arguments."""

BoardCall = tuple[str, tuple[Any, ...]]
"""A method of the board by its name, and its arguments."""


class Limits(NamedTuple):
    """What a tenant may use within a minute; None for as much as it likes.

    Attributes:
        long_prefills: Long prompts that are being read at once.
    """

    requests: int | None = None
    tokens: int | None = None
    long_prefills: int | None = None


class Level(NamedTuple):
    """How far a limit is used.

    Attributes:
        remaining: What may be used now.
        reset_s: Seconds until nothing of the limit is used, if nothing more is.
    """

    limit: int
    remaining: int
    reset_s: float


class Grant(NamedTuple):
    """The answer to a reservation.

    Attributes:
        lacking: What there is too little of; None where the reservation was made.
        retry_s: Seconds after which there is enough, if nobody else uses it.
    """

    lacking: Literal["requests", "tokens", "long prefills"] | None
    retry_s: float
    requests: Level | None
    tokens: Level | None

    @property
    def headers(self) -> dict[str, str]:
        """OpenAI's headers."""
        found: dict[str, str] = {}
        for name, level in (("requests", self.requests), ("tokens", self.tokens)):
            if level is not None:
                found[f"x-ratelimit-limit-{name}"] = str(level.limit)
                found[f"x-ratelimit-remaining-{name}"] = str(level.remaining)
                found[f"x-ratelimit-reset-{name}"] = f"{level.reset_s:.1f}s"
        return found


class Window:
    """What was used in the last minute, by tenths of seconds.

    What is more than the limit is booked in the minutes to come, so that it is worked off.
    """

    def __init__(self) -> None:
        self._used: dict[int, int] = {}
        self._sum = self._slot = 0

    def move_to(self, slot: int) -> None:
        """Forget what was used a minute before a slot."""
        if slot != self._slot:
            for past in [each for each in self._used if each <= slot - _SLOTS]:
                self._sum -= self._used.pop(past)
        self._slot = slot

    def has_room(self, amount: int, limit: int) -> bool:
        """Return whether so much more may be used."""
        return self._sum + amount <= limit

    def add(self, slot: int, amount: int, limit: int) -> None:
        """Add an amount in a slot, or take it back; what has left the window is past."""
        while slot > self._slot - _SLOTS:
            booked = self._used.get(slot, 0) + amount
            kept = max(0, min(booked, limit))
            self._sum += kept - self._used.get(slot, 0)
            self._used[slot] = kept
            slot, amount = slot + _SLOTS, booked - kept
            if amount <= 0:
                break

    def level(self, limit: int) -> Level:
        """Return how far a limit is used."""
        ends = [each + _SLOTS for each, amount in self._used.items() if amount]
        reset_s = (max(ends, default=self._slot) - self._slot) * _SLOT_S
        return Level(limit, max(0, limit - self._sum), reset_s)

    def seconds_until(self, amount: int, limit: int) -> float:
        """Return in how many seconds there is room for an amount, which is no more than `limit`."""
        left, slot = self._sum, self._slot
        for each in sorted(self._used):
            if left + amount <= limit:
                break
            left -= self._used[each]
            slot = each + _SLOTS
        return (slot - self._slot) * _SLOT_S


@dataclass
class _Reserved:
    tenant: str
    slot: int
    limits: Limits
    tokens: int
    is_long: bool


class QuotaBoard:
    """The windows of all tenants, and what is reserved in them."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._windows: dict[str, tuple[Window, Window]] = {}
        self._open: dict[str, _Reserved] = {}  # oldest first

    def reserve(self, name: str, tenant: str, limits: Limits, tokens: int) -> Grant:
        """Reserve a request and the tokens that it may use at most, or nothing.

        A request that may use more than all tokens of a minute is let in when none are used.
        """
        slot = self._slot()
        requests, used = self._windows_of(tenant, slot)
        most_requests, most_tokens, most_long = limits
        is_long = tokens >= _LONG_PROMPT
        cost = tokens if most_tokens is None else min(tokens, most_tokens)
        grant = Grant(None, 0.0, None, None)
        if most_requests is not None and not requests.has_room(1, most_requests):
            wait_s = requests.seconds_until(1, most_requests)
            grant = grant._replace(lacking="requests", retry_s=wait_s)
        elif most_tokens is not None and not used.has_room(cost, most_tokens):
            wait_s = used.seconds_until(cost, most_tokens)
            grant = grant._replace(lacking="tokens", retry_s=wait_s)
        elif is_long and most_long is not None and self._num_long(tenant) >= most_long:
            grant = grant._replace(lacking="long prefills", retry_s=_SOONEST_S)
        else:
            self._open[name] = _Reserved(tenant, slot, limits, cost, is_long)
            self._book(self._open[name], slot, 1, cost)
        return grant._replace(
            requests=None if most_requests is None else requests.level(most_requests),
            tokens=None if most_tokens is None else used.level(most_tokens),
        )

    def correct(self, name: str, tokens: int) -> None:
        """Reserve another number of tokens, as more is known of a request; it goes on."""
        if reserved := self._open.get(name):
            most = reserved.limits.tokens
            reserved.is_long = reserved.is_long or tokens >= _LONG_PROMPT
            self._change(reserved, tokens if most is None else min(tokens, most))

    def end_prefill(self, name: str) -> None:
        """Take note that the prompt of a request is read."""
        if reserved := self._open.get(name):
            reserved.is_long = False

    def apply(self, calls: Sequence[BoardCall]) -> list[Any]:
        """Call methods by their names, with these arguments; return their answers in order."""
        return [getattr(self, method)(*arguments) for method, arguments in calls]

    def settle(self, name: str, tokens: int | None) -> None:
        """End a reservation with the tokens that were used; None takes all of it back."""
        if reserved := self._open.pop(name, None):
            if tokens is not None:
                self._change(reserved, tokens)
            else:
                self._book(reserved, reserved.slot, -1, -reserved.tokens)

    def _change(self, reserved: _Reserved, tokens: int) -> None:
        more, now = tokens - reserved.tokens, self._slot()
        is_past = reserved.slot <= now - _SLOTS
        self._book(reserved, now if is_past and more > 0 else reserved.slot, 0, more)
        reserved.tokens = tokens

    def _slot(self) -> int:
        slot = int(self._clock() / _SLOT_S)
        while self._open:
            name = next(iter(self._open))
            if self._open[name].slot > slot - _FORGET_S / _SLOT_S:
                break
            del self._open[name]
        return slot

    def _windows_of(self, tenant: str, slot: int) -> tuple[Window, Window]:
        found = self._windows.setdefault(tenant, (Window(), Window()))
        for window in found:
            window.move_to(slot)
        return found

    def _book(self, reserved: _Reserved, slot: int, num_requests: int, num_tokens: int) -> None:
        requests, tokens = self._windows_of(reserved.tenant, self._slot())
        if reserved.limits.requests is not None:
            requests.add(slot, num_requests, reserved.limits.requests)
        if reserved.limits.tokens is not None:
            tokens.add(slot, num_tokens, reserved.limits.tokens)

    def _num_long(self, tenant: str) -> int:
        return sum(each.is_long and each.tenant == tenant for each in self._open.values())


class _Letters:
    """Calls of a board, in their order, those of a moment together: one call costs as many do."""

    def __init__(self, call: Call | None) -> None:
        self._own = QuotaBoard()
        self._call = call
        self._is_away = False
        self._waiting: list[tuple[BoardCall, asyncio.Future[Any]]] = []
        self._sending: asyncio.Task[None] | None = None
        self._urgent = asyncio.Event()

    def send(self, method: str, *arguments: Any) -> asyncio.Future[Any]:
        """Have the board called soon; return what will be its answer."""
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append(((method, arguments), answer))
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send_all())
        return answer

    def hurry(self) -> None:
        """Have what waits sent at once: somebody waits for its answer."""
        self._urgent.set()

    async def _send_all(self) -> None:
        while self._waiting:
            with suppress(TimeoutError):
                async with asyncio.timeout(_GATHER_S):
                    await self._urgent.wait()
            self._urgent.clear()
            sent, self._waiting = self._waiting, []
            found = await self._ask([call for call, _ in sent])
            for (_, answer), each in zip(sent, found, strict=True):
                if not answer.done():
                    answer.set_result(each)

    async def _ask(self, calls: list[BoardCall]) -> list[Any]:
        if self._call is not None:
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    found: list[Any] = await self._call("apply", calls)
            except Exception as error:  # its process died, with that of the replica that started it
                if not self._is_away:
                    _log.warning("quotas are counted here alone: %s", type(error).__name__)
                self._is_away = True
            else:
                self._is_away = False
                return found
        return self._own.apply(calls)


class Reservation:
    """The requests and tokens that one answer reserves of its tenant's limits, until it is settled.

    Attributes:
        is_likely: Whether there was room for it and as much again when the board was last heard.
    """

    def __init__(
        self,
        letters: _Letters,
        tenant: str,
        limits: Limits,
        tokens: int,
        told: dict[str, Grant],
        *,
        is_likely: bool,
    ) -> None:
        self._letters, self._name = letters, secrets.token_hex(8)
        self._limits, self._tokens = limits, tokens
        self._is_long = tokens >= _LONG_PROMPT
        self.is_likely = is_likely
        self._is_open = True
        self._granted = self._tell("reserve", tenant, limits, tokens)
        self._granted.add_done_callback(lambda granted: told.update({tenant: granted.result()}))

    async def grant(self) -> Grant:
        """Return what the board says; who is cancelled meanwhile may still settle."""
        if not self._granted.done():
            self._letters.hurry()
        grant: Grant = await asyncio.shield(self._granted)
        return grant

    def check(self, grant: Grant) -> None:
        """Refuse the request if there is no grant; errors are those of `check`."""
        check(grant, self._limits, self._tokens)

    def correct(self, tokens: int) -> None:
        """Reserve another number of tokens."""
        self._is_long = self._is_long or tokens >= _LONG_PROMPT
        self._tell("correct", tokens)

    def end_prefill(self) -> None:
        """Take note that the prompt is read."""
        if self._is_long:
            self._tell("end_prefill")

    def settle(self, tokens: int | None) -> None:
        """End the reservation with what was used; None where the server failed."""
        if self._is_open:
            self._is_open = False
            self._tell("settle", tokens)

    def _tell(self, method: str, *arguments: Any) -> asyncio.Future[Any]:
        return self._letters.send(method, self._name, *arguments)


class Quotas:
    """The way of one ingress to the board of all."""

    def __init__(self, call: Call | None = None) -> None:
        """Ask nothing yet.

        Args:
            call: Calls the board; None where there is but one ingress.
        """
        self._letters = _Letters(call)
        self._told: dict[str, Grant] = {}  # last, of each tenant

    async def reserve(
        self, tenant: str, limits: Limits, tokens: int
    ) -> tuple[Grant, Reservation] | None:
        """Reserve what a request may use at most; return None for a tenant without limits."""
        reservation = self.begin(tenant, limits, tokens)
        return None if reservation is None else (await reservation.grant(), reservation)

    def begin(self, tenant: str, limits: Limits, tokens: int) -> Reservation | None:
        """Begin to reserve what a request may use at most; see `reserve`."""
        if limits == Limits():
            return None
        is_likely = tokens < _LONG_PROMPT and self._has_room(tenant, tokens)
        return Reservation(self._letters, tenant, limits, tokens, self._told, is_likely=is_likely)

    def _has_room(self, tenant: str, tokens: int) -> bool:
        told = self._told.get(tenant)
        if told is None or told.lacking is not None:
            return False
        needs = ((told.requests, 2), (told.tokens, 2 * tokens))
        return all(level is None or level.remaining >= need for level, need in needs)


def check(grant: Grant, limits: Limits, tokens: int) -> None:
    """Refuse a request whose reservation was not made.

    Raises:
        TooManyRequests: It was not.
    """
    message = {
        None: "",
        "requests": f"You may send {limits.requests} requests a minute, and you have.",
        "tokens": f"You may use {limits.tokens} tokens a minute: this request may use {tokens}, "
        f"and {grant.tokens.remaining if grant.tokens else 0} are left.",
        "long prefills": f"You may have {limits.long_prefills} long prompts read at once, and you "
        "have: wait for one of them.",
    }[grant.lacking]
    if message:
        raise TooManyRequests(message, grant.retry_s)
