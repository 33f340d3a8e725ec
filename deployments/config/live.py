"""Settings that reach a replica while it runs."""

from __future__ import annotations

import logging
from typing import TypeVar

from pydantic import BaseModel

from rapid.config_errors import validate
from rapid.errors import ConfigurationError

logger = logging.getLogger(__name__)

Settings = TypeVar("Settings", bound=BaseModel)


def accept_settings(
    schema: type[Settings], given: object, current: Settings | None, *, of: str
) -> Settings:
    """Return the settings of a ``user_config``, or `current` if they break the schema.

    The builder and ``rapid check-config`` refuse bad settings before a replica sees them. What a
    hand-written ``user_config`` gets past both is refused here with a line in the log, and the
    replica goes on as it was: an error would have Serve replace it.

    Args:
        schema: The class of the settings.
        given: The ``user_config``.
        current: The settings in force; None for a replica that starts.
        of: The deployment's name, for the message.

    Raises:
        ConfigurationError: If they break the schema and there are none in force.
    """
    prefix = f"user_config of {of}: "
    try:
        return validate(schema, given, prefix=prefix, top="settings")
    except ConfigurationError as error:
        if current is None:
            raise
        logger.error("new settings are refused, those in force stay: %s", error)
        return current
