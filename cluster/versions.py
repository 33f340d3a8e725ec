"""Versions of deployments, which decide whose replicas an edit replaces.

Serve gives all deployments of an application one version: the hash of its import path, ``args`` and
runtime environment. So any edit of ``args`` would replace every replica of every deployment. Here a
deployment has a version of its own, the hash of what its replicas are started with, and an edit
replaces the replicas of those deployments alone whose version it changes. Resources are compared by
Serve itself; everything else about a deployment changes while its replicas run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256

from pydantic import BaseModel, SecretStr


def version_of(started_with: Sequence[object]) -> str:
    """Return the version of a deployment whose replicas are started with these settings.

    Args:
        started_with: Settings as pydantic models, or as plain values that JSON can express. Of a
            model those fields count that differ from their defaults, so that a new release with a
            new setting replaces nothing by it alone.
    """
    plain = [
        each.model_dump(exclude_defaults=True) if isinstance(each, BaseModel) else each
        for each in started_with
    ]
    return sha256(json.dumps(plain, sort_keys=True, default=_secret).encode()).hexdigest()[:16]


def _secret(value: object) -> str:
    """Return a secret's text for the hash; pydantic would write stars for all secrets alike."""
    assert isinstance(value, SecretStr), value
    return value.get_secret_value()
