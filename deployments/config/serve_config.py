"""The application's settings, the schema of ``args`` in a Serve configuration file.

They are composed of the packages' own settings; the validators here are the rules that span several
of them. Checks that read the checkpoints are in `deployments.config.preflight`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Discriminator, Field, Tag, TypeAdapter, ValidationError, model_validator

from cluster.placement import PoolConfig, RequestPoolConfig
from rapid.config import AnsweringConfig, EngineConfig, Finite, Frozen, SpeculationConfig
from rapid.errors import ConfigurationError
from retrieval.settings import LexicalEmbedderConfig, RetrievalConfig

_SHARE_OF_CHATS = 0.75  # of what an ingress replica takes at once
_SHARE_OF_SLOW_BODIES = 0.125  # of these chats, for one tenant
_ROUNDS_OF_A_TENANT = 2  # of what the target's pool answers at once: those and as many that wait
_SHARE_OF_A_TENANT = 0.75  # of the places of one ingress, however much can be answered
_LEAST_OF_A_TENANT = 4  # requests that even a small server takes of a tenant
_CHARACTERS_PER_TOKEN = 16  # of the target's context: four times those of usual text
_LEAST_CHARACTERS = 2**20  # however short the context is


class EnginePoolConfig(Frozen):
    """Settings of a model's engine and of the replicas that run it."""

    engine: EngineConfig
    pool: PoolConfig = PoolConfig()

    @model_validator(mode="after")
    def _every_process_has_a_gpu(self) -> Self:
        ranks, gpus = self.engine.tensor_parallel, self.pool.num_gpus
        if ranks > 1 and gpus not in (0, ranks):
            raise ValueError(
                f"tensor_parallel ({ranks}) gives every process a GPU, and num_gpus ({gpus:g}) "
                "reserves another number for the engine: make them equal"
            )
        if ranks % self.pool.nodes:
            raise ValueError(
                f"nodes ({self.pool.nodes}) have an equal part of an engine's processes each, and "
                f"do not divide tensor_parallel ({ranks}): change one of them"
            )
        return self

    @model_validator(mode="after")
    def _kv_pool_holds_one_sequence(self) -> Self:
        engine = self.engine
        if engine.max_context is not None and engine.kv_cache_tokens < engine.max_context:
            raise ValueError(
                f"kv_cache_tokens ({engine.kv_cache_tokens}) cannot hold one sequence of "
                f"max_context ({engine.max_context}): raise kv_cache_tokens or lower max_context"
            )
        return self


class RetrieverPoolConfig(Frozen):
    """Settings of retrieval and of the replicas that run it."""

    retrieval: RetrievalConfig = RetrievalConfig()
    pool: PoolConfig = PoolConfig()

    @property
    def placed(self) -> RetrievalConfig:
        """The settings of retrieval, with the device that the pool gives the embedder.

        Without a GPU of its own a replica may see those of other pools, and must not take one.
        """
        embedder = self.retrieval.embedder
        if isinstance(embedder, LexicalEmbedderConfig) or embedder.device != "auto":
            return self.retrieval
        device = "cuda" if self.pool.num_gpus else "cpu"
        placed = embedder.model_copy(update={"device": device})
        return self.retrieval.model_copy(update={"embedder": placed})

    @model_validator(mode="after")
    def _a_gpu_is_reserved_and_used(self) -> Self:
        embedder = self.placed.embedder
        device = "cpu" if isinstance(embedder, LexicalEmbedderConfig) else embedder.device
        if device.startswith("cuda") and not self.pool.num_gpus:
            raise ValueError(
                f"the embedder's device is {device}, and the retriever's pool reserves no GPU: set "
                "retriever.pool.num_gpus, a fraction will do"
            )
        if not device.startswith("cuda") and self.pool.num_gpus:
            raise ValueError(
                f"the retriever's pool reserves {self.pool.num_gpus:g} GPUs, and the embedder runs "
                f"on the {device}: set retriever.pool.num_gpus to 0, or embedder.device to auto"
            )
        return self

    @model_validator(mode="after")
    def _a_local_store_has_one_owner(self) -> Self:
        if not self.retrieval.store.is_shared and self.pool.max_replicas > 1:
            raise ValueError(
                "a local store lives in one retriever: set retriever.pool.max_replicas to 1, or "
                "retrieval.store to a Qdrant server"
            )
        return self


class OrchestratorPoolConfig(AnsweringConfig):
    """Settings of the orchestrator deployment, which include those of `AnsweringConfig`.

    Attributes:
        acceptance_site: Where blocks are judged: beside the target's logits, or in the orchestrator
            after moving them there (for audits; the tokens are the same).
        retrieval_wait_s: The longest wait for the retriever, in seconds; then the answer goes on
            without. What is embedded by then is there for a later question.
        pool: Settings of the orchestrator's replicas.
    """

    acceptance_site: Literal["target", "orchestrator"] = "target"
    retrieval_wait_s: Finite = Field(30.0, gt=0)
    pool: RequestPoolConfig = RequestPoolConfig()


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


class ApiConfig(Frozen):
    """Settings of the HTTP API.

    Attributes:
        model: The model name that requests must give.
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
        max_requests_per_tenant: The most chat requests that one tenant may have in progress, at all
            replicas of the ingress together. None is twice what the target's pool can answer at
            once with all its replicas, and at least four, but three quarters of one ingress; a
            server with one tenant has no such limit.
        shared_requests: The chat requests in progress that tenants share while several ask; each
            may have its fair share of them, and more for a moment (`deployments.api.gate.shares`).
            None is as many as keep the target's pool from being crowded with all its replicas, and
            at least four; a server with one tenant shares nothing.
        tenant_weights: How many shares of one tenant another has in `shared_requests`, by tenant;
            who is not named has one.
        max_model_len: The longest prompt and answer that ``GET /v1/models`` tells, in tokens. None
            is the target's `max_context`; where that is the model's own, nothing is told.
        default_temperature: The temperature of requests that name none. None is that of the
            target's generation config, or 1, which is OpenAI's.
        heartbeat_s: Seconds of silence after which a stream gets an empty line.
        silence_s: Seconds that may pass before the first byte of an answer's stream, for clients to
            wait; the model's card says it. None is the sum of the orchestrator's waits.
        canary: Another version of the application beside this one; None for this one alone.
        pool: Settings of the ingress's replicas.
    """

    model: str = Field("rapid", min_length=1)
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
    max_model_len: int | None = Field(None, ge=1)
    default_temperature: Finite | None = Field(None, ge=0, le=2)
    heartbeat_s: Finite = Field(5.0, gt=0)
    silence_s: Finite | None = Field(None, gt=0)
    canary: CanaryConfig | None = None
    pool: RequestPoolConfig = RequestPoolConfig()

    @property
    def max_requests(self) -> int:
        """The most chat requests at each replica of the ingress.

        The rest of what a replica takes at once answers the other routes and refuses requests.
        """
        return max(1, int(_SHARE_OF_CHATS * self.pool.max_ongoing_requests))

    @property
    def max_slow_bodies(self) -> int:
        """The most bodies of one tenant, at each replica, that may take longer than a second."""
        return max(1, int(_SHARE_OF_SLOW_BODIES * self.max_requests))

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
        """Whether `keys` are all there are."""
        return self.keys_env is None and self.keys_file is None

    @property
    def has_keys(self) -> bool:
        """Whether requests must bring a key."""
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


Drafters = Annotated[
    Annotated[EnginePoolConfig, Tag("pool of its own")]
    | Annotated[Literal["target", "prompt_lookup"], Tag("no pool")],
    Discriminator(lambda drafter: "no pool" if isinstance(drafter, str) else "pool of its own"),
]


class ServeConfig(Frozen):
    """Settings of the whole application.

    Attributes:
        target: The target's engine and pool.
        drafter: The drafter's engine and pool. With ``target``, the target's engines draft for
            themselves, with one copy of the weights and two of their leases a request. With
            ``prompt_lookup``, no model drafts and nothing is retrieved: the tokens that followed
            the same words in the prompt are proposed.
        retriever: Settings of retrieval and its pool.
        orchestrator: Settings of the orchestrator deployment.
        api: Settings of the HTTP API.
        speculation: Defaults for the settings that a request leaves out.
    """

    target: EnginePoolConfig
    drafter: Drafters
    retriever: RetrieverPoolConfig = RetrieverPoolConfig()
    orchestrator: OrchestratorPoolConfig = OrchestratorPoolConfig()
    api: ApiConfig = ApiConfig()
    speculation: SpeculationConfig = SpeculationConfig()

    @property
    def drafter_pool(self) -> EnginePoolConfig:
        """The engine and pool that draft: the target's, if the drafter has none of its own."""
        return self.target if isinstance(self.drafter, str) else self.drafter

    @property
    def drafts_with_model(self) -> bool:
        """Whether a model drafts, which reads what retrieval finds."""
        return self.drafter != "prompt_lookup"

    @property
    def is_embedded(self) -> bool:
        """Whether the target is an embedded model, which understands generated documents only."""
        return self.target.engine.model.startswith("embedded:")

    @property
    def filled_api(self) -> ApiConfig:
        """The settings of the HTTP API with the limits that follow from the target's pool."""
        api, engine = self.api, self.target.engine
        context = engine.max_context or engine.kv_cache_tokens
        most_characters = max(_LEAST_CHARACTERS, _CHARACTERS_PER_TOKEN * context)
        filled: dict[str, float] = {"max_characters": api.max_characters or most_characters}
        waits = self.orchestrator
        longest_s = waits.target_wait_s + waits.retrieval_wait_s + waits.drafter_wait_s
        filled["silence_s"] = api.silence_s or longest_s
        if api.max_model_len is None and engine.max_context is not None:
            filled["max_model_len"] = engine.max_context
        if api.lists_its_keys and len({key.tenant for key in api.keys}) < 2:
            return api.model_copy(update=filled)

        def num_answers(leases_of_one: float) -> int:
            num_leases = int(leases_of_one * self.target.pool.max_replicas)
            return max(_LEAST_OF_A_TENANT, num_leases // (1 + self.takes_two_leases))

        if api.max_requests_per_tenant is None:
            most = _ROUNDS_OF_A_TENANT * num_answers(engine.max_leases)
            room = max(_LEAST_OF_A_TENANT, int(_SHARE_OF_A_TENANT * api.max_requests))
            filled["max_requests_per_tenant"] = min(most, room)
        if api.shared_requests is None:
            calm = min(engine.max_leases, self.target.pool.target_ongoing_requests)
            filled["shared_requests"] = num_answers(calm)
        return api.model_copy(update=filled)

    @property
    def takes_two_leases(self) -> bool:
        """Whether a request takes a second lease of the target's pool.

        The second drafts on the retrieved text, or reads it beside the drafter.
        """
        is_witness = self.speculation.is_witnessed and not isinstance(self.drafter, str)
        return self.drafter == "target" or is_witness

    @property
    def pools(self) -> dict[str, PoolConfig]:
        """The pool settings of every deployment, by its name in lower case."""
        pools = {
            "target": self.target.pool,
            "orchestrator": self.orchestrator.pool,
            "ingress": self.api.pool,
        }
        if self.drafts_with_model:
            pools |= {"drafter": self.drafter_pool.pool, "retriever": self.retriever.pool}
        return pools

    @model_validator(mode="after")
    def _only_a_model_reads_what_is_retrieved(self) -> Self:
        if not self.drafts_with_model and "retriever" in self.model_fields_set:
            raise ValueError(
                f"drafter: {self.drafter} retrieves nothing: leave retriever out, or give drafter "
                "an engine"
            )
        if not self.drafts_with_model and self.orchestrator.answerable_log_odds is not None:
            raise ValueError(
                f"orchestrator.answerable_log_odds asks the drafter, and {self.drafter} cannot "
                "answer: leave it out, or give drafter an engine"
            )
        return self

    @model_validator(mode="after")
    def _engines_alone_have_several_nodes(self) -> Self:
        for name in ("retriever", "orchestrator", "api"):
            if getattr(self, name).pool.nodes > 1:
                raise ValueError(
                    f"{name}.pool.nodes: only an engine can be on several nodes: leave it out"
                )
        return self

    @model_validator(mode="after")
    def _both_engines_are_deterministic(self) -> Self:
        if self.target.engine.deterministic != self.drafter_pool.engine.deterministic:
            raise ValueError(
                "deterministic is set on one of target and drafter: a fused answer depends on the "
                "numbers of both, so set it on both engines or on none"
            )
        return self

    @model_validator(mode="after")
    def _a_request_chooses_the_rule(self) -> Self:
        if self.speculation.rule != "exact":
            raise ValueError(
                "speculation.rule is not for servers: requests ask for rapid.mode 'paper'"
            )
        return self

    @model_validator(mode="after")
    def _the_target_has_room_for_a_second_lease(self) -> Self:
        if self.takes_two_leases and self.target.engine.max_leases < 2:
            what = "drafter: target" if self.drafter == "target" else "transfer: adaptive"
            raise ValueError(f"{what} takes two leases a request: raise target.engine.max_leases")
        return self

    @model_validator(mode="after")
    def _drafter_has_room_for_the_retrieved_text(self) -> Self:
        context = self.drafter_pool.engine.max_context
        budget = self.retriever.retrieval.budget_tokens
        if context is not None and budget is not None and budget >= context:
            raise ValueError(
                f"retrieval.budget_tokens ({budget}) fills the drafter's max_context ({context}): "
                "raise drafter.engine.max_context or lower the budget"
            )
        return self
