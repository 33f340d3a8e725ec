"""Settings of the HTTP API: models, keys, limits and another version beside this one."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, TypeAdapter, ValidationError, field_validator, model_validator

from cluster.placement import RequestPoolConfig
from rapid.config import Finite, Frozen
from rapid.errors import ConfigurationError, PromptTooLong, UnknownModel

_SHARE_OF_CHATS = 0.75  # of what an ingress replica takes at once
_SHARE_OF_SLOW_BODIES = 0.125  # of these chats, for one tenant


class ApiKey(Frozen):
    """An API key, stored as its hash.

    Attributes:
        tenant: The tenant that the key identifies.
        sha256: The SHA-256 of the key in hex.
        operator: Whether ``GET /ready`` shows the key's holder the state of every pool and engine.
    """

    tenant: str = Field(min_length=1, max_length=128)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    operator: bool = False


class CanaryConfig(Frozen):
    """Another version of the application that answers a share of the requests.

    Attributes:
        application: Name of the other application in the same file.
        share: Share of the requests, in [0, 1]. Requests about the same documents, or of one
            conversation with a long beginning, go to the same version.
    """

    application: str = Field(min_length=1)
    share: Finite = Field(ge=0, le=1)


class ModelCard(Frozen):
    """Facts about a model that the HTTP API tells and uses.

    Attributes:
        default_temperature: The temperature of requests that name none; None is 1.
        max_model_len: The longest prompt and answer, in tokens; None tells nothing.
        is_embedded: Whether it understands generated documents only.
        target: The pool of its target's engines, whose state readiness looks at.
        default_max_tokens: The longest answer where a request names no length, in tokens.
    """

    default_temperature: float | None = None
    max_model_len: int | None = None
    is_embedded: bool = False
    target: str = "target"
    default_max_tokens: int = 512


class ApiConfig(Frozen):
    """Settings of the HTTP API.

    Attributes:
        model: The model name that requests must give; `models` of the application name several.
        models: What is known of each model, in the order of the ingress's orchestrators. It follows
            from the other settings, and a file must not have it.
        keys: The accepted API keys. Without any, requests must come from this machine and belong to
            the tenant `local`.
        keys_env: The environment variable of the ingress that holds more keys: a JSON list in the
            form of `keys`. It must not be empty, and holds for as long as the process lives.
        keys_file: A file on the ingress's nodes that holds more keys in the same form, such as a
            mounted Kubernetes Secret. Edits of it are live: who is not in it any more is refused
            within seconds. An empty list lets nobody in.
        max_body_bytes: The longest request body, in bytes.
        max_choices: The most choices (`n`) of one request.
        max_messages: The most messages of one request.
        max_documents: The most documents of one request.
        max_characters: The most characters of the messages and documents of one request. None is
            four times the text that fills the target's context, which `rag` may search, and at
            least a million.
        max_requests_per_tenant: The most chat requests that one tenant may have in progress or, as
            long as nobody else waits, in a line, at all replicas of the ingress together. None is
            twice what the target's pool can answer at once with all its replicas, and at least
            four, but three quarters of one ingress; a server with one tenant has no such limit,
            unless its library may have keys of others.
        shared_requests: The chat requests in progress that tenants share; each may have its fair
            share of them, one that asks alone all, and more for a moment
            (`deployments.api.gate.shares`).
            None is as many as keep the target's pool from being crowded with all its replicas, and
            at least four; a server without keys, or with those of one tenant, shares nothing.
        tenant_weights: How many shares of one tenant another has in `shared_requests` and
            in the turns at engines, tokenizing and indexing, by tenant; who is not named has one.
        requests_per_minute: The most questions of one tenant within a minute, at all replicas of
            the ingress together; None for any number. A tenant's own limit in the library's
            database takes its place, as it does for the other limits of tenants.
        tokens_per_minute: The most tokens of prompts and answers of one tenant within a minute.
        max_model_len: The longest prompt and answer that ``GET /v1/models`` tells, in tokens. None
            is the target's `max_context`; where that is the model's own, nothing is told.
        default_temperature: The temperature of requests that name none. None is that of the
            target's generation config, or 1, which is OpenAI's.
        allowed_origins: The origins, such as ``https://chat.example.org``, whose web pages may call
            this server from their readers' browsers. They are named one by one: ``*`` is refused,
            as any page could then read what its reader's own machine serves without a key.
        console: Whether ``GET /`` shows the console, on which a person asks in the browser.
        heartbeat_s: Seconds of silence after which a stream gets an empty line.
        silence_s: Seconds that may pass before the first byte of an answer's stream, for clients to
            wait; the model's card says it. None is the sum of the orchestrator's waits.
        canary: Another version of the application beside this one; None for this one alone.
        pool: Settings of the ingress's replicas.
    """

    model: str = Field("rapid", min_length=1)
    models: dict[str, ModelCard] = Field(default_factory=dict)
    keys: tuple[ApiKey, ...] = ()
    keys_env: str | None = Field(None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    keys_file: Path | None = None
    max_body_bytes: int = Field(16 * 2**20, ge=1024)
    max_choices: int = Field(8, ge=1, le=128)
    max_messages: int = Field(2048, ge=1)
    max_documents: int = Field(1024, ge=1)
    max_characters: int | None = Field(None, ge=1)
    max_requests_per_tenant: int | None = Field(None, ge=1)
    shared_requests: int | None = Field(None, ge=1)
    tenant_weights: dict[str, Annotated[int, Field(ge=1, le=1000)]] = Field(default_factory=dict)
    requests_per_minute: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1)
    max_model_len: int | None = Field(None, ge=1)
    default_temperature: Finite | None = Field(None, ge=0, le=2)
    allowed_origins: tuple[str, ...] = ()
    console: bool = True
    heartbeat_s: Finite = Field(5.0, gt=0)
    silence_s: Finite | None = Field(None, gt=0)
    canary: CanaryConfig | None = None
    pool: RequestPoolConfig = RequestPoolConfig()

    @property
    def cards(self) -> Mapping[str, ModelCard]:
        """The card of each model that requests may name, by its name."""
        temperature, length = self.default_temperature, self.max_model_len
        only = ModelCard(default_temperature=temperature, max_model_len=length)
        return self.models or {self.model: only}

    def card_of(self, model: str) -> ModelCard:
        """Return the card of a model.

        Raises:
            UnknownModel: Requests may not name it.
        """
        if model in self.cards:
            return self.cards[model]
        known = ", ".join(map(repr, self.cards))
        raise UnknownModel(f"The model {model!r} does not exist: this server has {known}.")

    def check_characters(self, number: int, model: str, param: str) -> None:
        """Refuse more characters than one request may have.

        Raises:
            PromptTooLong: There are too many, for the field `param`.
        """
        if self.max_characters is not None and number > self.max_characters:
            why = f"the prompt has {number} characters, and {self.max_characters} are taken at most"
            most = self.cards[model].max_model_len if model in self.cards else None
            raise PromptTooLong.of(most, why, param) if most else PromptTooLong(why, param)

    @property
    def request_limits(self) -> Mapping[str, int]:
        """How large one request may be, by the names of these settings, as model cards tell it."""
        names = ("max_body_bytes", "max_characters", "max_documents")
        given = {name: getattr(self, name) for name in names}
        return {name: most for name, most in given.items() if most is not None}

    @property
    def max_requests(self) -> int:
        """The most chat requests at each replica of the ingress.

        The rest of what a replica takes at once answers the other routes and refuses requests.
        """
        return max(1, int(_SHARE_OF_CHATS * self.pool.max_ongoing_requests))

    @property
    def max_requests_of_each(self) -> int:
        """The most chat requests of one tenant, unless it has another number of its own."""
        return self.max_requests_per_tenant or self.max_requests

    @property
    def max_slow_bodies(self) -> int:
        """The most bodies of one tenant, at each replica, that may take longer than a second."""
        return max(1, int(_SHARE_OF_SLOW_BODIES * self.max_requests))

    @field_validator("allowed_origins")
    @classmethod
    def _origins_are_exact(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for each in origins:
            if not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s*A-Z]+", each):
                raise ValueError(
                    f"api.allowed_origins has {each!r}, which is no origin: write each as browsers "
                    "send it, scheme, host and port in lower case without a path, like "
                    "https://chat.example.org; '*' is not taken, as it would let in any page"
                )
        return origins

    @model_validator(mode="after")
    def _keys_are_distinct(self) -> Self:
        if len({key.sha256 for key in self.keys}) < len(self.keys):
            raise ValueError("api.keys lists the same key twice: give every tenant its own")
        return self

    @model_validator(mode="after")
    def _weights_are_of_tenants(self) -> Self:
        unknown = self.tenant_weights.keys() - {key.tenant for key in self.keys}
        if unknown and self.lists_its_keys:
            raise ValueError(
                f"api.tenant_weights names {min(unknown)!r}, which has no key: list one under "
                "api.keys, or mend the name"
            )
        return self

    @property
    def lists_its_keys(self) -> bool:
        """Whether `keys` lists every API key, so that none is in the environment or a file."""
        return self.keys_env is None and self.keys_file is None

    @property
    def has_keys(self) -> bool:
        """Whether a request needs an API key."""
        return bool(self.keys) or not self.lists_its_keys

    def all_keys(self) -> tuple[ApiKey, ...]:
        """Return `keys` and those that this process finds in its environment and in the file.

        Raises:
            ConfigurationError: The variable or the file, if there is one, holds no list of keys.
        """
        return (*self.keys, *self._keys_in_environment(), *self._keys_in_file())

    def _keys_in_environment(self) -> tuple[ApiKey, ...]:
        if self.keys_env is None:
            return ()
        if found := _parse_keys(os.environ.get(self.keys_env, "[]")):
            return found
        raise ConfigurationError(
            f"api.keys_env: the environment variable {self.keys_env} holds no keys: set it to "
            """a JSON list like [{"tenant": "acme", "sha256": "..."}] (`rapid hash-key`)"""
        )

    def _keys_in_file(self) -> tuple[ApiKey, ...]:
        if self.keys_file is None:
            return ()
        try:
            found = _parse_keys(self.keys_file.read_bytes())
        except OSError as error:
            raise ConfigurationError(
                f"api.keys_file: {self.keys_file} cannot be read: {error.strerror}"
            ) from None
        if found is None:
            raise ConfigurationError(
                f"api.keys_file: {self.keys_file} holds no list of keys: write a JSON list "
                """like [{"tenant": "acme", "sha256": "..."}] (`rapid hash-key`)"""
            )
        return found


_API_KEYS = TypeAdapter(tuple[ApiKey, ...])


def _parse_keys(text: str | bytes) -> tuple[ApiKey, ...] | None:
    try:
        return _API_KEYS.validate_json(text)
    except ValidationError:  # whose text has the values in it
        return None
