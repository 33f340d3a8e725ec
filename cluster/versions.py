"""Versions of deployments, which decide whose replicas an edit replaces.

Serve gives all deployments of an application one version, so that any edit of ``args`` would
replace every replica. Here a version is the hash of what a deployment's replicas start with.
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
    # pydantic would write stars for all secrets alike.
    assert isinstance(value, SecretStr), value
    return value.get_secret_value()
