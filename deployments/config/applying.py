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

from deployments.config.plans import Effect, Plans, deployment_plans, effects
from deployments.config.preflight import preflight
from deployments.config.serve_config import ServeConfig
from deployments.config.serve_file import application_of

Json = dict[str, Any]


def update(
    file: Json, config: ServeConfig, running: Mapping[str, Any] | None
) -> tuple[Json, dict[str, Effect]]:
    """Return the content to send to Serve, and what it does to each deployment that it changes.

    Args:
        file: Content of the configuration file.
        config: The settings of its application, checked.
        running: The application's part of the configuration that Serve runs, as its API returns
            it; None if it does not run.

    Raises:
        ConfigurationError: If a checkpoint that the running application names is gone.
    """
    after = deployment_plans(config)
    if running is None:
        return file, effects({}, after)
    built = deployment_plans(preflight(ServeConfig.model_validate(running["args"])))
    blocks = {block["name"]: block for block in running.get("deployments", ())}
    before = {
        name: replace(plan, options=plan.options | _live(blocks.get(name, {})))
        for name, plan in built.items()
    }
    if _without_live(built) != _without_live(after):
        return file, effects(before, after)
    application = application_of(file)
    overrides = {each["name"]: each for each in application.get("deployments", ())}
    for name, plan in after.items():
        if live := _live(plan.options):
            overrides[name] = {"name": name} | overrides.get(name, {}) | live
    sent = application | {"args": running["args"], "deployments": list(overrides.values())}
    others = [sent if each is application else each for each in file["applications"]]
    return file | {"applications": others}, effects(before, after)


def _live(options: Mapping[str, Any]) -> Json:
    return {name: value for name, value in options.items() if name == "user_config"}


def _without_live(plans: Plans) -> Plans:
    return {
        name: replace(plan, options=plan.options | {"user_config": None})
        for name, plan in plans.items()
    }
