"""An ingress with accounts over a scripted orchestrator."""

from __future__ import annotations

from typing import Any

import httpx

from deployments.api.gate.quotas import Quotas
from deployments.api.ingress import Ingress
from deployments.config.api_config import ApiConfig
from library.accounts import api_keys
from library.accounts.books import Accounts
from library.library_access import LibraryAccess
from library.storage.database import Database
from tests.deployments.scripted import ScriptedOrchestrator

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


class AccountDoor:
    """An ingress, and what comes in by it; a request without a key comes from elsewhere."""

    def __init__(
        self,
        database: Database,
        *script: Any,
        quotas: Quotas | None = None,
        library: LibraryAccess | None = None,
        **config: Any,
    ) -> None:
        async def get() -> Database:
            return database

        self.database = database
        self.accounts = Accounts(get)
        self.orchestrator = ScriptedOrchestrator(*script)
        self.app = Ingress(
            self.orchestrator,
            ApiConfig(model="m", **config),
            accounts=self.accounts,
            quotas=quotas,
            library=library,
        )

    async def key(self, tenant: str = "acme", *scopes: str, **options: Any) -> str:
        """A new key; `admin` has all scopes."""
        _, key = await api_keys.create_key(
            self.database, tenant, "", scopes or ("ask",), options.get("expires_at"), actor="ops"
        )
        return key

    async def send(
        self, method: str, path: str, key: str | None = None, body: Any = None, **headers: str
    ) -> httpx.Response:
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        transport = httpx.ASGITransport(self.app, client=("10.0.0.7", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://10.0.0.1") as http:
            return await http.request(method, path, json=body, headers=headers)

    async def ask(self, key: str | None = None, **body: Any) -> httpx.Response:
        return await self.send("POST", CHAT, key, ASK | body)
