"""The application's settings, the schema of ``args`` in a Serve configuration file.

They are composed of the packages' own settings; the validators here are the rules that span several
of them. Checks that read the checkpoints are in `deployments.config.preflight`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Generic, Literal, Self, TypeVar

from pydantic import Discriminator, Tag, model_validator

from cluster.placement import PoolConfig
from deployments.config.api_config import ApiConfig, ModelCard
from deployments.config.pools.library_pool import LibraryPoolConfig
from deployments.config.pools.pool_settings import (
    EnginePoolConfig,
    OrchestratorPoolConfig,
    RetrieverPoolConfig,
)
from rapid.config import (
    SERVED_DRAFTINGS,
    Frozen,
    OwnDrafting,
    ServedDrafting,
    SpeculationConfig,
)
from rapid.transfers import OWN_RULES
from rapid.vllm_config import VllmConfig, vllm_refusal

_ROUNDS_OF_A_TENANT = 2  # of what the targets' pools answer at once: those and as many that wait
_SHARE_OF_A_TENANT = 0.75  # of the places of one ingress, however much can be answered
_LEAST_OF_A_TENANT = 4  # requests that even a small server takes of a tenant
_CHARACTERS_PER_TOKEN = 16  # of the target's context: four times those of usual text
_LEAST_CHARACTERS = 2**20  # however short the context is


Drafters = Annotated[
    Annotated[EnginePoolConfig, Tag("pool of its own")]
    | Annotated[Literal["target", ServedDrafting], Tag("no pool")],
    Discriminator(lambda drafter: "no pool" if isinstance(drafter, str) else "pool of its own"),
]
AnySettings = (
    EnginePoolConfig | RetrieverPoolConfig | OrchestratorPoolConfig | LibraryPoolConfig | ApiConfig
)
Settings = TypeVar("Settings", bound=AnySettings, covariant=True)


@dataclass(frozen=True)
class AppPart(Generic[Settings]):
    """A deployment of an application.

    Attributes:
        name: The deployment's name; that of its pool is the same in lower case.
        section: Where its settings are under ``args``, as keys from the outermost to its own.
        settings: Its settings.
    """

    name: str
    section: tuple[str, ...]
    settings: Settings

    @property
    def pool_name(self) -> str:
        """The name of its pool."""
        return self.name.lower()

    @property
    def key(self) -> str:
        """The section as messages write it."""
        return ".".join(self.section)


@dataclass(frozen=True)
class ServedModel:
    """A model that requests may name, and the deployments that answer for it.

    Attributes:
        config: Its settings, as those of an application without other models.
        section: Where they are under ``args``, as keys; empty for the only model.
        target: The target's engines.
        drafter: The engines that draft, perhaps the target's; None if no model drafts.
        retriever: The retriever; None if no model drafts.
        orchestrator: The orchestrator, which no other model has.
    """

    config: ServeConfig
    section: tuple[str, ...]
    target: AppPart[EnginePoolConfig]
    drafter: AppPart[EnginePoolConfig] | None
    retriever: AppPart[RetrieverPoolConfig] | None
    orchestrator: AppPart[OrchestratorPoolConfig]

    @property
    def name(self) -> str:
        """The name that requests give."""
        return self.config.api.model

    @property
    def card(self) -> ModelCard:
        """The model's card for the HTTP API."""
        api, engine = self.config.api, self.target.settings.engine
        length = engine.max_context if api.max_model_len is None else api.max_model_len
        return ModelCard(
            default_temperature=api.default_temperature,
            max_model_len=length,
            is_embedded=self.config.is_embedded,
            target=self.target.pool_name,
            default_max_tokens=self.config.orchestrator.default_max_tokens,
        )

    def num_answers(self, *, is_calm: bool) -> int:
        """Return how many requests all replicas of the target's pool answer at once.

        Args:
            is_calm: Whether they are not to be crowded meanwhile.
        """
        engine, pool = self.target.settings.engine, self.target.settings.pool
        leases = min(engine.max_leases, pool.target_ongoing_requests if is_calm else math.inf)
        num_leases = int(leases * pool.max_replicas)
        return max(_LEAST_OF_A_TENANT, num_leases // (1 + self.config.takes_two_leases))


class ApplicationConfig(Frozen, ABC):
    """Settings of an application, whether it has one model or several.

    Attributes:
        retriever: Settings of retrieval and its pool.
        orchestrator: Settings of the orchestrator deployment of each model.
        api: Settings of the HTTP API.
        speculation: Defaults for the settings that a request leaves out.
        library: Where files and vector stores are kept; None for a server that keeps none.
    """

    retriever: RetrieverPoolConfig = RetrieverPoolConfig()
    orchestrator: OrchestratorPoolConfig = OrchestratorPoolConfig()
    api: ApiConfig = ApiConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    library: LibraryPoolConfig | None = None

    @property
    @abstractmethod
    def served(self) -> tuple[ServedModel, ...]:
        """The models and their deployments."""

    @property
    def parts(self) -> Mapping[str, AppPart[AnySettings]]:
        """Every deployment, by the name of its pool."""
        found: list[AppPart[AnySettings] | None] = []
        for model in self.served:
            found += (model.target, model.drafter, model.retriever, model.orchestrator)
        if self.library is not None:
            found.append(AppPart("Librarian", ("library",), self.library))
        found.append(AppPart("Ingress", ("api",), self.api))
        return {part.pool_name: part for part in found if part is not None}

    @property
    def engine_parts(self) -> Mapping[str, AppPart[EnginePoolConfig]]:
        """The deployments with engines, by the name of their pools."""
        found = [each for model in self.served for each in (model.target, model.drafter)]
        return {part.pool_name: part for part in found if part is not None}

    @property
    def pools(self) -> dict[str, PoolConfig]:
        """The pool settings of every deployment, by the name of its pool."""
        return {name: part.settings.pool for name, part in self.parts.items()}

    @property
    def filled_api(self) -> ApiConfig:
        """The settings of the HTTP API with those that follow from the models."""
        api, models, waits = self.api, self.served, self.orchestrator
        targets = {model.target.name: model for model in models}.values()
        engines = [model.target.settings.engine for model in targets]
        context = max(engine.max_context or engine.kv_cache_tokens for engine in engines)
        longest_s = waits.target_wait_s + waits.retrieval_wait_s + waits.drafter_wait_s
        filled = {
            "max_characters": api.max_characters
            or max(_LEAST_CHARACTERS, _CHARACTERS_PER_TOKEN * context),
            "silence_s": api.silence_s or longest_s,
            "models": {model.name: model.card for model in models},
        }
        tenants = len({key.tenant for key in api.keys})
        # With a library there may be keys of more tenants.
        if not api.lists_its_keys or tenants > 1 or (tenants and self.library is not None):
            if api.max_requests_per_tenant is None:
                at_once = sum(model.num_answers(is_calm=False) for model in targets)
                room = max(_LEAST_OF_A_TENANT, int(_SHARE_OF_A_TENANT * api.max_requests))
                filled["max_requests_per_tenant"] = min(_ROUNDS_OF_A_TENANT * at_once, room)
            if api.shared_requests is None:
                filled["shared_requests"] = sum(each.num_answers(is_calm=True) for each in targets)
        return api.model_copy(update=filled)

    @model_validator(mode="after")
    def _engines_alone_have_several_nodes(self) -> Self:
        for name in ("retriever", "orchestrator", "library", "api"):
            settings = getattr(self, name)
            if settings is not None and settings.pool.nodes > 1:
                raise ValueError(
                    f"{name}.pool.nodes: only an engine can be on several nodes: leave it out"
                )
        return self

    @model_validator(mode="after")
    def _cards_follow_from_the_models(self) -> Self:
        if self.api.models:
            raise ValueError("api.models follows from the other settings: leave it out")
        return self

    @model_validator(mode="after")
    def _a_request_chooses_the_rule(self) -> Self:
        if self.speculation.rule != "exact":
            raise ValueError(
                "speculation.rule is not for servers: requests ask for rapid.mode 'paper'"
            )
        if self.speculation.transfer in OWN_RULES:
            raise ValueError(
                f"speculation.transfer: {self.speculation.transfer!r} is a rule of this process "
                "alone, and a server's engines have others: name one of the method, or use "
                "rapid.open"
            )
        return self


class ServeConfig(ApplicationConfig):
    """Settings of an application with one model.

    Attributes:
        target: The target's engine and pool.
        drafter: The drafter's engine and pool. With ``target``, the target's engines draft for
            themselves, with one copy of the weights and two of their leases a request. With a name
            of `SERVED_DRAFTINGS`, no model drafts and nothing is retrieved.
    """

    target: EnginePoolConfig
    drafter: Drafters

    @property
    def served(self) -> tuple[ServedModel, ...]:
        """The one model and its deployments."""
        target = AppPart("Target", ("target",), self.target)
        drafter: AppPart[EnginePoolConfig] | None = None if self.own_drafting else target
        if not isinstance(self.drafter, str):
            drafter = AppPart("Drafter", ("drafter",), self.drafter)
        retriever = AppPart("Retriever", ("retriever",), self.retriever) if drafter else None
        orchestrator = AppPart("Orchestrator", ("orchestrator",), self.orchestrator)
        return (ServedModel(self, (), target, drafter, retriever, orchestrator),)

    @property
    def drafter_pool(self) -> EnginePoolConfig:
        """The engine and pool that draft: the target's, if the drafter has none of its own."""
        return self.target if isinstance(self.drafter, str) else self.drafter

    @property
    def own_drafting(self) -> OwnDrafting | None:
        """Settings of the drafter where no model drafts, which reads what retrieval finds."""
        if isinstance(self.drafter, EnginePoolConfig) or self.drafter == "target":
            return None
        return SERVED_DRAFTINGS[self.drafter]

    @property
    def is_embedded(self) -> bool:
        """Whether the target is an embedded model, which understands generated documents only."""
        return self.target.engine.model.startswith("embedded:")

    @property
    def takes_two_leases(self) -> bool:
        """Whether a request takes a second lease of the target's pool.

        The second drafts on the retrieved text, or reads it beside the drafter.
        """
        is_witness = self.speculation.is_witnessed and not isinstance(self.drafter, str)
        return self.drafter == "target" or is_witness

    @model_validator(mode="after")
    def _vllm_drafts_only(self) -> Self:
        if isinstance(self.target.engine, VllmConfig):
            raise ValueError(
                "target.engine.kind: vllm drafts and does not judge: leave kind out, or give it to "
                "drafter.engine"
            )
        if isinstance(self.drafter_pool.engine, VllmConfig):
            if self.drafter_pool.pool.nodes > 1:
                raise ValueError("drafter.pool.nodes: vllm runs on one node here: leave it out")
            if refused := vllm_refusal(self.speculation, is_greedy=False):
                raise ValueError("speculation.{} {}".format(*refused))
        return self

    @model_validator(mode="after")
    def _only_a_model_reads_what_is_retrieved(self) -> Self:
        if self.own_drafting and "retriever" in self.model_fields_set:
            raise ValueError(
                f"drafter: {self.drafter} retrieves nothing: leave retriever out, or give drafter "
                "an engine"
            )
        if self.own_drafting and self.orchestrator.answerable_log_odds is not None:
            raise ValueError(
                f"orchestrator.answerable_log_odds asks the drafter, and {self.drafter} cannot "
                "answer: leave it out, or give drafter an engine"
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
