"""What each tenant may have: by the configuration, or by its own limits in the database."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.requests import Request

from deployments.api.gate.admission import Admission
from deployments.api.gate.quotas import Limits, Quotas, Reservation
from deployments.config.api_config import ApiConfig
from library.accounts.books import Accounts
from rapid.chat_messages import Document
from rapid.messages import GenerateRequest, new_call_id

_MOST_BYTES = 4  # of a character in UTF-8


class Allowances:
    """The limits of tenants, as admission and quotas are told of them."""

    def __init__(self, admission: Admission, quotas: Quotas, accounts: Accounts | None) -> None:
        """Know no limits yet; `configure` gives them."""
        self._admission, self._quotas, self._accounts = admission, quotas, accounts
        self._config = ApiConfig()
        self._has_tenants = False

    def configure(self, config: ApiConfig, *, has_tenants: bool) -> None:
        """Take the limits of a configuration, whose keys may be of several tenants."""
        self._config = config
        self._has_tenants = has_tenants
        self.refresh()

    def refresh(self) -> None:
        """Have admission go by the limits of the moment."""
        config, own = self._config, self._accounts.limits if self._accounts else {}
        has_tenants = self._has_tenants or (
            self._accounts is not None and self._accounts.knows_keys
        )
        weights = {name: each.weight for name, each in own.items() if each.weight}
        most = {name: each.concurrent_answers for name, each in own.items()}
        self._admission.limit(
            config.max_requests,
            config.max_requests_of_each,
            config.shared_requests if has_tenants else None,
            config.tenant_weights | weights,
            {name: number for name, number in most.items() if number is not None},
        )

    @asynccontextmanager
    async def admit(self, request: Request, most: int = 0) -> AsyncIterator[Callable[[int], None]]:
        """Hold a place and count a request that generates nothing into its tenant's quotas.

        The block gives the tokens that it has used. If the server fails before, nothing counts; if
        the caller leaves, all does that was reserved, as the work may have been done.

        Args:
            request: The request, whose body is read.
            most: The most tokens that it may use.

        Raises:
            TooManyRequests: The tenant has used up its limits, or holds all its places.
            Overloaded: There is no place.
        """
        sent = GenerateRequest(new_call_id(), request.state.caller, ())
        async with self._admission.place(sent.tenant):
            reserved = self.reserve(sent, most, 0)
            used: int | None = most
            try:
                if reserved is not None:
                    grant = await reserved.grant()
                    request.state.rate_limits = grant.headers
                    reserved.check(grant)
                done: list[int] = []
                yield done.append
                used = sum(done)
            except Exception:
                used = None
                raise
            finally:
                if reserved is not None:
                    reserved.settle(used)

    def reserve(
        self, sent: GenerateRequest, num_bytes: int, answer_tokens: int
    ) -> Reservation | None:
        """Begin to reserve what an answer may use at most; None for a tenant without limits.

        Args:
            sent: What is asked.
            num_bytes: Bytes of its body, of which a token of the prompt is one at the least; what
                came before may be in the database, and then its messages have more.
            answer_tokens: The most tokens of the answer, over all choices.
        """
        limits = self._limits_of(sent.tenant)
        stored = sum(each.num_chars for each in sent.documents if not isinstance(each, Document))
        most = max(num_bytes, _count_bytes(sent)) + _MOST_BYTES * stored + answer_tokens
        return self._quotas.begin(sent.tenant, limits, most)

    def _limits_of(self, tenant: str) -> Limits:
        usual = Limits(self._config.requests_per_minute, self._config.tokens_per_minute)
        if self._accounts is None or (own := self._accounts.limits.get(tenant)) is None:
            return usual
        requests, tokens = own.requests_per_minute, own.tokens_per_minute
        return Limits(requests or usual.requests, tokens or usual.tokens, own.long_prefills)


def _count_bytes(sent: GenerateRequest) -> int:
    """Return the bytes of the messages of a request, of which its body may have the last only."""
    said = (each.text for each in sent.messages)
    called = (str(call) for each in sent.messages for call in each.tool_calls)
    return sum(len(text.encode(errors="replace")) for text in (*said, *called))
