"""The configuration that brings a running application to the state of an edited file.

Serve builds an application anew for any edit of ``args``, which takes seconds though it replaces
only what it must (`cluster.versions`). Where an edit changes nothing but live settings, they are
sent as the ``user_config`` of ``deployments`` blocks beside the ``args`` of the last build, and
Serve hands them to the replicas at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from deployments.config.named_models import read_application
from deployments.config.plans import Effect, Plans, deployment_plans, effects
from deployments.config.pools.pool_settings import EnginePoolConfig
from deployments.config.preflight import preflight
from deployments.config.serve_config import ApplicationConfig, AppPart
from deployments.config.serve_file import applications_of, name_of
from rapid.checkpoints.text import ChatText
from rapid.checkpoints.vocabulary import check_same_vocabulary
from rapid.errors import ConfigurationError

Json = dict[str, Any]


def update(
    file: Json, configs: Mapping[str, ApplicationConfig], running: Mapping[str, Json]
) -> tuple[Json, dict[str, Effect]]:
    """Return the content to send to Serve, and what it does to each deployment that it changes.

    Args:
        file: Content of the configuration file.
        configs: The settings of its applications, checked, by application.
        running: The parts of the configuration that Serve runs, as its API returns them, by
            application.

    Raises:
        ConfigurationError: If a model would take the place of one with another vocabulary.
    """
    found: dict[str, Effect] = {}
    applications = list(file["applications"])
    for application in applications_of(file):
        name = name_of(application)
        sent, done = _update(application, configs[name], running.get(name))
        applications[applications.index(application)] = sent
        several = len(configs) > 1
        found |= {f"{name}/{each}" if several else each: how for each, how in done.items()}
    return file | {"applications": applications}, found


def _update(
    application: Json, config: ApplicationConfig, running: Json | None
) -> tuple[Json, dict[str, Effect]]:
    after = deployment_plans(config)
    if running is None:
        return application, effects({}, after)
    built_from = preflight(read_application(running["args"]))
    old = {model.orchestrator.name: model for model in built_from.served}
    for model in config.served:
        if model.orchestrator.name in old:
            _check_vocabulary_stays(old[model.orchestrator.name].target, model.target)
    built = deployment_plans(built_from)
    blocks = {block["name"]: block for block in running.get("deployments", ())}
    before = {
        name: replace(plan, options=plan.options | _live(blocks.get(name, {})))
        for name, plan in built.items()
    }
    if _without_live(built) != _without_live(after):
        return application, effects(before, after)
    overrides = {each["name"]: each for each in application.get("deployments", ())}
    for name, plan in after.items():
        if live := _live(plan.options):
            overrides[name] = {"name": name} | overrides.get(name, {}) | live
    sent = application | {"args": running["args"], "deployments": list(overrides.values())}
    return sent, effects(before, after)


def _check_vocabulary_stays(
    before: AppPart[EnginePoolConfig], after: AppPart[EnginePoolConfig]
) -> None:
    """Check that replicas with the old model and with the new may serve side by side."""
    old, new = before.settings.engine.model, after.settings.engine.model
    if old == new:
        return
    try:
        check_same_vocabulary(ChatText.load(old), ChatText.load(new))
    except ConfigurationError as error:
        raise ConfigurationError(
            f"{after.key}.engine.model: {old!r} and {new!r} would serve side by side while "
            "replicas are replaced, but do not share their tokens: run the new model as a second "
            "application (api.canary), or stop the server and start it"
        ) from error


def _live(options: Mapping[str, Any]) -> Json:
    return {name: value for name, value in options.items() if name == "user_config"}


def _without_live(plans: Plans) -> Plans:
    return {
        name: replace(plan, options=plan.options | {"user_config": None})
        for name, plan in plans.items()
    }
