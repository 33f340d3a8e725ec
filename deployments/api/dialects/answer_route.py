"""The way of a question through the ingress, in any dialect: body, limits, answer, its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message

from deployments.api.backend.continuing import Cursor, continue_events
from deployments.api.backend.service import GenerationService
from deployments.api.dialects.chat.wire import Cards, Json
from deployments.api.dialects.fingerprint import fingerprint_of
from deployments.api.dialects.responses.background import BackgroundAnswers
from deployments.api.dialects.responses.responses_reply import ResponsesReply
from deployments.api.files.attaching import add_places, attach_stored
from deployments.api.gate.admission import Admission
from deployments.api.gate.allowances import Allowances
from deployments.api.gate.quotas import Reservation
from deployments.api.http.access_log import AccessLog, RequestRecord
from deployments.api.http.bodies import Bodies
from deployments.api.http.dialect import Dialect, Question
from deployments.api.http.event_feed import EventFeed, read_deadline
from deployments.api.http.event_stream import EventStream
from deployments.api.http.json_bodies import read_priority
from deployments.api.http.refusals import log_failure
from deployments.api.http.request_ids import read_request_id
from deployments.config.api_config import ApiConfig
from library.library_access import LibraryAccess
from rapid.errors import BadRequest, Overloaded, TooManyRequests
from rapid.ports import Clock

_log = logging.getLogger(__name__)


class AnswerRoute:
    """The endpoint of every dialect that takes questions."""

    def __init__(
        self,
        service: GenerationService,
        bodies: Bodies,
        admission: Admission,
        allowances: Allowances,
        access: AccessLog,
        settings: Callable[[], tuple[ApiConfig, Cards]],
        library: LibraryAccess | None,
        background: BackgroundAnswers,
        clock: Clock,
    ) -> None:
        """Create the endpoint.

        Args:
            service: Runs the requests.
            bodies: Reads their bodies.
            admission: Gives them their places.
            allowances: What tenants may still ask for.
            access: Notes each request's end.
            settings: Returns the present configuration, and the models' cards by name.
            library: Where files are kept; None for a server that keeps none.
            background: Keeps the answers that nobody waits for.
            clock: Monotonic seconds.
        """
        self._service, self._bodies, self._access = service, bodies, access
        self._admission, self._allowances = admission, allowances
        self._settings, self._library, self._background = settings, library, background
        self._clock = clock

    async def answer(self, dialect: Dialect, request: Request) -> Response:
        """Answer a request in its dialect."""
        request_id = read_request_id(request)
        config, cards = self._settings()
        tenant: str = request.state.caller
        async with AsyncExitStack() as stack:
            only = next(iter(cards)) if len(cards) == 1 else None
            record = stack.enter_context(self._access.request(request_id, request.state.key, only))
            of_body = request, dialect.media_types, record, stack, read_priority
            body = await self._bodies.admit(*of_body)
            config, _ = self._settings()  # which may have changed while the body came
            asked, sent = await dialect.parse(body, config, request_id, tenant)
            record.model = sent.model
            sent, files = await attach_stored(self._library, asked.stored, sent, config)
            event_id = request.headers.get("last-event-id")
            cursor = Cursor.of_event(event_id, sent) if event_id else Cursor.first(sent)
            sent = replace(sent, weight=self._admission.shares.weight(tenant))
            record.answer_id, record.resumes = cursor.answer_id, bool(event_id)
            longest = sent.max_tokens
            if longest is None:
                longest = config.card_of(sent.model).default_max_tokens
            record.most_tokens = longest * sent.num_answers
            reserved = self._allowances.reserve(sent, len(body), record.most_tokens)
            record.reservation = reserved
            if reserved is not None and not reserved.is_likely:
                await _confirm(reserved, request, record)
            answer = partial(continue_events, self._service, sent, cursor)
            deadline = request.headers.get("x-request-deadline")
            most_s = read_deadline(deadline, self._clock() - record.began)
            fingerprint = fingerprint_of(sent.model)
            reply = dialect.reply(asked, cursor, fingerprint, record.began, self._clock)
            explain = partial(self._explain, asked)
            later = reply if isinstance(reply, ResponsesReply) and reply.body.background else None
            receive = _stay if later else request.receive
            feed = EventFeed(answer, receive, record.note, explain, most_s)
            places = partial(add_places, access=self._library, files=files)

            def fail(error: Exception) -> Json:
                record.error = error
                return log_failure(error, request_id).body

            async def render_error(error: Exception) -> bytes:
                # A response that fails tells all that it has said, which may be megabytes.
                return await asyncio.to_thread(reply.render_error, fail(error))

            if later is not None:
                if reserved is not None:
                    await _confirm(reserved, request, record)
                _log.info("request %s is answered later as %s", request_id, later.id)
                return await self._background.answer(tenant, later, feed, places, stack, fail)
            await stack.enter_async_context(feed)
            if reserved is not None:  # meanwhile the answer begins
                await _confirm(reserved, request, record)
            events = places(await feed.begin(config.heartbeat_s))
            _log.info("request %s is answered as %s", request_id, reply.id)
            if not sent.is_streamed:
                return await asyncio.to_thread(JSONResponse, await reply.render_whole(events))
            return EventStream(
                reply.render(events),
                reply.media_type,
                stack.pop_all(),
                request_id,
                render_error,
            )

    def _explain(self, asked: Question, error: Exception) -> Exception:
        """Return a refusal with the caller's own field, and a time to retry where it has none."""
        if isinstance(error, BadRequest):
            error.param = asked.field_of(error.param)
        elif isinstance(error, Overloaded) and error.retry_after_s is None:
            return type(error)(str(error), self._admission.next_place_s())
        return error


async def _confirm(reserved: Reservation, request: Request, record: RequestRecord) -> None:
    """Have the response say what is left of the limits, or refuse the request."""
    try:
        grant = await reserved.grant()
        request.state.rate_limits = grant.headers
        reserved.check(grant)
    except TooManyRequests:
        record.mode = None  # what may have begun is taken back
        raise


async def _stay() -> Message:
    """Receive nothing, as of a caller who does not leave."""
    await asyncio.Event().wait()
    raise AssertionError
