"""An application with several models, which requests name.

A pool of engines that several models use is written once, under `engine_pools`, and named by each
of them: two pools with equal settings stay two, and an edit of a shared one is one edit. What is
written beside the models, `retriever`, `orchestrator`, `speculation` and `api`, holds for all of
them, and they share the one retriever. A model's own `retriever` or `speculation` takes its place.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Discriminator, Field, Tag, ValidationError, model_validator

from deployments.config.pools.pool_settings import EnginePoolConfig, RetrieverPoolConfig
from deployments.config.serve_config import ApplicationConfig, AppPart, ServeConfig, ServedModel
from rapid.config import SERVED_DRAFTINGS, Finite, Frozen, SpeculationConfig
from rapid.config_errors import validate

_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,38}[a-z0-9])?")
_NO_POOL = ("target", *SERVED_DRAFTINGS)


def _check_name(name: str) -> str:
    if not _NAME.fullmatch(name) or name in _NO_POOL:
        raise ValueError(
            f"{name!r} cannot name deployments: take at most 40 lower-case letters, digits, dots "
            f"and hyphens that begin and end with a letter or digit, and neither of {_NO_POOL}"
        )
    return name


Name = Annotated[str, AfterValidator(_check_name)]
EnginePool = Annotated[
    Annotated[EnginePoolConfig, Tag("pool of its own")] | Annotated[str, Tag("name")],
    Discriminator(lambda pool: "name" if isinstance(pool, str) else "pool of its own"),
]


class ModelConfig(Frozen):
    """Settings of one of several models.

    Attributes:
        target: The target's engine and pool, or the name of one of `engine_pools`.
        drafter: The same of the drafter, or a name without a pool as in `ServeConfig`.
        retriever: A retriever of its own; None for the one that the others share.
        speculation: Defaults for the settings that a request leaves out; None for those of all
            models.
        default_temperature: The temperature of requests that name none. None is that of the API's
            settings, or of the target's generation config.
    """

    target: EnginePool
    drafter: EnginePool
    retriever: RetrieverPoolConfig | None = None
    speculation: SpeculationConfig | None = None
    default_temperature: Finite | None = Field(None, ge=0, le=2)


class ModelsConfig(ApplicationConfig):
    """Settings of an application with several models.

    Attributes:
        models: The models, by the name that requests give.
        engine_pools: Pools of engines that models name, each by one or more.
    """

    models: dict[Name, ModelConfig] = Field(min_length=1)
    engine_pools: dict[Name, EnginePoolConfig] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _has_no_model_beside_the_named(cls, data: Any) -> Any:
        for name in ("target", "drafter"):
            if isinstance(data, dict) and name in data:
                raise ValueError(
                    f"{name} belongs to one model: write it under models.NAME, or leave models out"
                )
        return data

    @model_validator(mode="after")
    def _models_have_their_names_here(self) -> Self:
        if "model" in self.api.model_fields_set:
            raise ValueError("api.model names the only model: leave it out beside models")
        return self

    @model_validator(mode="after")
    def _every_pool_is_known_and_used(self) -> Self:
        unused = set(self.engine_pools)
        for name, model in self.models.items():
            drafter = None if model.drafter in _NO_POOL else model.drafter
            named = {each for each in (model.target, drafter) if isinstance(each, str)}
            if missing := named - self.engine_pools.keys():
                known = ", ".join(self.engine_pools) or "nothing"
                raise ValueError(
                    f"models.{name}: there is no pool {min(missing)!r}: engine_pools has {known}"
                )
            unused -= named
            if model.target == drafter in named:
                raise ValueError(
                    f"models.{name}: target and drafter are one pool: write drafter: target"
                )
        if unused:
            raise ValueError(f"engine_pools.{min(unused)}: no model names it: leave it out")
        return self

    @model_validator(mode="after")
    def _each_model_is_valid_alone(self) -> Self:
        for name, model in self.models.items():
            try:
                self._deploy(name, model)
            except ValidationError as error:
                what = error.errors()[0]["msg"].removeprefix("Value error, ")
                raise ValueError(f"models.{name}: {what}") from None
        if "retriever" in self.model_fields_set and "retriever" not in self.parts:
            raise ValueError("retriever: no model uses it: leave it out")
        return self

    @property
    def served(self) -> tuple[ServedModel, ...]:
        """The models and their deployments."""
        return tuple(map(self._deploy, self.models, self.models.values()))

    def _deploy(self, name: str, model: ModelConfig) -> ServedModel:
        own = ("models", name)

        def engines(role: str, pool: EnginePoolConfig | str) -> AppPart[EnginePoolConfig]:
            if isinstance(pool, str):
                return AppPart(f"Engines-{pool}", ("engine_pools", pool), self.engine_pools[pool])
            return AppPart(f"{role.capitalize()}-{name}", (*own, role), pool)

        target = engines("target", model.target)
        drafter = target if model.drafter == "target" else None
        if model.drafter not in _NO_POOL:
            drafter = engines("drafter", model.drafter)
        retriever = AppPart("Retriever", ("retriever",), self.retriever) if drafter else None
        if model.retriever is not None:
            retriever = AppPart(f"Retriever-{name}", (*own, "retriever"), model.retriever)
        orchestrator = AppPart(f"Orchestrator-{name}", ("orchestrator",), self.orchestrator)
        api: dict[str, object] = {"model": name}
        if model.default_temperature is not None:
            api["default_temperature"] = model.default_temperature
        settings: dict[str, object] = {
            "target": target.settings,
            "drafter": drafter.settings if drafter and drafter is not target else model.drafter,
            "orchestrator": orchestrator.settings,
            "api": self.api.model_copy(update=api),
            "speculation": model.speculation or self.speculation,
        }
        if retriever is not None:
            settings["retriever"] = retriever.settings
        if self.library is not None:
            settings["library"] = self.library
        config = ServeConfig.model_validate(settings)
        return ServedModel(config, own, target, drafter, retriever, orchestrator)


def read_application(args: object, prefix: str = "") -> ApplicationConfig:
    """Return the settings of an application, of one model or of several.

    Args:
        args: ``args`` of the application in a Serve configuration file.
        prefix: Start of every line of an error.

    Raises:
        ConfigurationError: They break the schema; one line for each finding.
    """
    has_several = isinstance(args, dict) and "models" in args
    schema = ModelsConfig if has_several else ServeConfig
    return validate(schema, args, prefix=prefix, top="args")
