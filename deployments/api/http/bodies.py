"""Reading of request bodies: how long, how slow and how many of them a tenant may send."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request

from deployments.api.gate.admission import Admission
from deployments.api.http.access_log import RequestRecord
from rapid.errors import BadRequest, BodyTooLarge, BodyTooSlow, TooManyRequests, UnsupportedEncoding
from rapid.ports import Clock

_WAITING_BODIES = 4  # body limits that one tenant's bodies may take at one ingress
_DRAINED_BODIES = 4  # body limits read of a refused body, in its second


@dataclass(frozen=True, slots=True)
class BodyPace:
    """How fast a client must send.

    Attributes:
        quick_s: Seconds after which a body counts as slow.
        patience_s: Seconds that every body may take.
        bytes_per_s: Least rate: each so many bytes that came give a body one second more.
        longest_s: Seconds that no body may exceed.
        drain_s: Seconds for which the rest of a refused body is read.
    """

    quick_s: float = 1.0
    patience_s: float = 10.0
    bytes_per_s: int = 64 * 1024
    longest_s: float = 60.0
    drain_s: float = 1.0


class Bodies:
    """The bodies of an ingress that are being read, and those whose requests wait for a place.

    A body is read before its request has a place, so that a slow client takes none from others.
    While it is read it takes up room in which requests could wait. After a second it needs one of
    its tenant's few places for slow bodies, and it must go on arriving at the least rate.
    """

    def __init__(
        self, admission: Admission, *, clock: Clock = time.monotonic, pace: BodyPace | None = None
    ) -> None:
        """Read nothing yet; `limit` gives the sizes.

        Args:
            admission: Where requests wait whose bodies were read.
            clock: Monotonic seconds.
            pace: How fast clients must send.
        """
        self._admission = admission
        self._clock = clock
        self._pace = pace or BodyPace()
        self._max_bytes = self._max_slow = 0
        self._num_bytes: Counter[str] = Counter()
        self._num_slow: Counter[str] = Counter()
        self._num_drained: Counter[object] = Counter()

    def limit(self, max_bytes: int, max_slow: int) -> None:
        """Set the limits.

        Args:
            max_bytes: The longest body; a tenant's bodies may have four times as many bytes while
                they are read and wait.
            max_slow: The most bodies of one tenant that may take longer than a second.
        """
        self._max_bytes, self._max_slow = max_bytes, max_slow

    async def admit(
        self,
        request: Request,
        media_types: Sequence[str],
        record: RequestRecord,
        stack: AsyncExitStack,
        read_priority: Callable[[bytes], Awaitable[tuple[int, bytes]]],
    ) -> bytes:
        """Return the body of a request that has a place, which is noted and held by `stack`.

        `read_priority` returns its place among the tenant's own that wait, the smallest first, and
        the body, which it may have parsed.
        Errors are those of `body` and of `Admission.place`.
        """
        async with self.body(request, record.tenant, media_types) as body:
            with record.admission():
                priority, body = await read_priority(body)
                place = self._admission.place(record.tenant, priority)
                record.ticket = await stack.enter_async_context(place)
            return body

    @asynccontextmanager
    async def body(
        self, request: Request, tenant: str, media_types: Sequence[str]
    ) -> AsyncIterator[bytes]:
        """Read a body; within the context it counts as one that waits.

        Raises:
            BadRequest: The body is of none of the media types.
            UnsupportedEncoding: The body is compressed.
            BodyTooLarge: The body is too long.
            BodyTooSlow: The body did not come in time.
            Overloaded: There is no room to read it.
            TooManyRequests: The same, because of other bodies of the tenant.
        """
        _check_type(request.headers, media_types)
        declared = request.headers.get("content-length", "")
        parts: list[bytes] = []
        num_bytes = 0
        try:
            self._check_size(tenant, 0, int(declared) if declared.isdecimal() else 0)
            async with aclosing(self._parts(request, tenant, self._pace)) as coming:
                async for part in coming:
                    self._check_size(tenant, num_bytes, len(part))
                    num_bytes += len(part)
                    self._num_bytes[tenant] += len(part)
                    parts.append(part)
            yield b"".join(parts)
        finally:
            self._num_bytes[tenant] -= num_bytes
            self._num_bytes += Counter()  # forgets tenants that have none

    async def upload(self, request: Request, tenant: str, max_bytes: int) -> AsyncGenerator[bytes]:
        """Yield the parts of a form with a file, which may take as long as it keeps its rate.

        Raises:
            BadRequest: The body is no form.
            BodyTooLarge: It has more than `max_bytes` bytes.
            BodyTooSlow: It came too slowly.
            Overloaded: There is no room to read it.
            TooManyRequests: The same, because of other bodies of the tenant.
        """
        _check_type(request.headers, ("multipart/form-data",))
        declared = request.headers.get("content-length", "")
        num_bytes = int(declared) if declared.isdecimal() else 0
        pace = replace(self._pace, longest_s=math.inf)
        async with aclosing(self._parts(request, tenant, pace)) as coming:
            if num_bytes <= max_bytes:
                num_bytes = 0
                async for part in coming:
                    num_bytes += len(part)
                    if num_bytes > max_bytes:
                        break
                    yield part
        if num_bytes > max_bytes:
            raise BodyTooLarge(
                f"The form is over the limit of {max_bytes} bytes: send a smaller file.", "file"
            )

    def _check_size(self, tenant: str, num_before: int, num_more: int) -> None:
        if num_before + num_more > self._max_bytes:
            raise BodyTooLarge(f"The request body is over the limit of {self._max_bytes} bytes.")
        if self._num_bytes[tenant] + num_more > _WAITING_BODIES * self._max_bytes:
            raise TooManyRequests(
                f"Your requests that wait have bodies of {self._num_bytes[tenant]} bytes, and no "
                "more are read now: wait for one of them.",
                self._admission.next_place_s(),
            )

    async def _parts(self, request: Request, tenant: str, pace: BodyPace) -> AsyncGenerator[bytes]:
        """Yield the parts of a body as long as it keeps its pace."""
        began, num_bytes, is_slow = self._clock(), 0, False
        with self._admission.room_to_read(tenant), ExitStack() as slowly:
            while not _has_ended(request):
                due_s = pace.patience_s + num_bytes / pace.bytes_per_s
                due_s = min(due_s, pace.longest_s) if is_slow else pace.quick_s
                part = await _next_part(request, began + due_s - self._clock())
                if part is not None:
                    num_bytes += len(part)
                    yield part
                elif is_slow:
                    raise BodyTooSlow(
                        f"The request body was not sent in time: {num_bytes} bytes came in "
                        f"{due_s:.0f} seconds."
                    )
                else:
                    self._slow_down(tenant, slowly)
                    is_slow = True

    def _slow_down(self, tenant: str, slowly: ExitStack) -> None:
        if self._num_slow[tenant] >= self._max_slow:
            raise TooManyRequests(
                f"You are sending {self._max_slow} request bodies slowly, which is the most that "
                "one tenant may: wait for one of them.",
                self._pace.patience_s,
            )
        self._num_slow[tenant] += 1
        slowly.callback(self._num_slow.subtract, [tenant])

    async def drain(self, request: Request, who: object) -> bool:
        """Read on for a second and drop what comes; return whether the body has ended.

        A client that is cut off while it sends would see a broken connection instead of the error.
        Of those that many send at once, `who` gets half of what is left.
        """
        num_left = 2 * self._max_slow - self._num_drained.total()
        if self._num_drained[who] >= num_left:
            return _has_ended(request)
        until = self._clock() + self._pace.drain_s
        num_bytes = 0
        self._num_drained[who] += 1
        try:
            while not _has_ended(request) and num_bytes <= _DRAINED_BODIES * self._max_bytes:
                part = await _next_part(request, until - self._clock())
                if part is None:
                    break
                num_bytes += len(part)
        except ClientDisconnect:
            pass
        finally:
            self._num_drained[who] -= 1
            self._num_drained += Counter()
        return _has_ended(request)


def _check_type(headers: Headers, media_types: Sequence[str]) -> None:
    if headers.get("content-type", "").partition(";")[0].strip().lower() not in media_types:
        wanted = " or ".join(f"'Content-Type: {each}'" for each in media_types)
        raise BadRequest(f"Send the body with {wanted}.")
    encoding = headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedEncoding(
            "Content-Encoding must be left out: compressed bodies are not read.", "Content-Encoding"
        )


async def _next_part(request: Request, seconds: float) -> bytes | None:
    """Return the next part of a body; None if it does not come within so many seconds.

    Raises:
        ClientDisconnect: The connection is closed.
    """
    if seconds <= 0:
        return None
    try:
        async with asyncio.timeout(seconds):
            message = await request.receive()
    except TimeoutError:
        return None
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    request.state.has_ended = not message.get("more_body", False)
    part: bytes = message.get("body", b"")
    return part


def _has_ended(request: Request) -> bool:
    return getattr(request.state, "has_ended", False)
