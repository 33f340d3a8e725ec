"""What each tenant may have: by the configuration, or by its own limits in the database."""

from __future__ import annotations

from starlette.requests import Request

from deployments.api.gate.admission import Admission
from deployments.api.gate.quotas import Limits, Quotas, Reservation, check
from deployments.config.api_config import ApiConfig
from library.accounts.books import Accounts
from rapid.messages import Document, GenerateRequest

_MOST_BYTES = 4  # of a character in UTF-8


class Allowances:
    """The limits of tenants, as admission and quotas are told of them."""

    def __init__(self, admission: Admission, quotas: Quotas, accounts: Accounts | None) -> None:
        """Know no limits yet; `configure` gives them."""
        self._admission, self._quotas, self._accounts = admission, quotas, accounts
        self._config = ApiConfig()
        self._has_tenants = False

    def configure(self, config: ApiConfig, *, has_tenants: bool) -> None:
        """Take the limits of a configuration, under which there may be several tenants."""
        self._config = config
        self._has_tenants = has_tenants or self._accounts is not None
        self.refresh()

    def refresh(self) -> None:
        """Have admission go by the limits of the moment."""
        config, own = self._config, self._accounts.limits if self._accounts else {}
        weights = {name: each.weight for name, each in own.items() if each.weight}
        most = {name: each.concurrent_answers for name, each in own.items()}
        self._admission.limit(
            config.max_requests,
            config.max_requests_per_tenant or config.max_requests,
            config.shared_requests if self._has_tenants else None,
            config.tenant_weights | weights,
            {name: number for name, number in most.items() if number is not None},
        )

    async def reserve(
        self, request: Request, sent: GenerateRequest, num_bytes: int, answer_tokens: int
    ) -> Reservation | None:
        """Reserve what an answer may use at most, and note how far limits are used, for headers.

        Args:
            request: The HTTP request; ``state.rate_limits`` has the headers.
            sent: What it asks.
            num_bytes: Bytes of its body, of which a token of the prompt is one at the least.
            answer_tokens: The most tokens of the answer, over all choices.

        Raises:
            TooManyRequests: Its tenant may not use so much now.
        """
        limits = self._limits_of(sent.tenant)
        stored = sum(each.num_chars for each in sent.documents if not isinstance(each, Document))
        most = num_bytes + _MOST_BYTES * stored + answer_tokens
        reserved = await self._quotas.reserve(sent.tenant, limits, most)
        if reserved is None:
            return None
        grant, reservation = reserved
        request.state.rate_limits = grant.headers
        check(grant, limits, most)
        return reservation

    def _limits_of(self, tenant: str) -> Limits:
        usual = Limits(self._config.requests_per_minute, self._config.tokens_per_minute)
        if self._accounts is None or (own := self._accounts.limits.get(tenant)) is None:
            return usual
        requests, tokens = own.requests_per_minute, own.tokens_per_minute
        return Limits(requests or usual.requests, tokens or usual.tokens, own.long_prefills)
