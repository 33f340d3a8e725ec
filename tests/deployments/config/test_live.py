"""Settings that reach a replica that runs, or one that starts."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from deployments.config.api_config import ApiConfig
from deployments.config.live import accept_settings
from rapid.errors import ConfigurationError

BAD: Any = {"keys": [{"tenant": "a", "sha256": "the key itself"}], "max_choice": 3}


def test_good_settings_are_taken() -> None:
    new = accept_settings(ApiConfig, {"max_choices": 3}, ApiConfig(), of="Ingress")
    assert new == ApiConfig(max_choices=3)


def test_bad_settings_leave_a_running_replica_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    current = ApiConfig(max_choices=2)
    with caplog.at_level(logging.ERROR):
        assert accept_settings(ApiConfig, BAD, current, of="Ingress") is current
    assert "user_config of Ingress: max_choice: unknown key; did you mean max_choices?" in (
        caplog.text
    )
    assert "the key itself" not in caplog.text


def test_a_replica_does_not_start_with_bad_settings() -> None:
    with pytest.raises(ConfigurationError, match=r"user_config of Ingress: keys\.0\.sha256"):
        accept_settings(ApiConfig, BAD, None, of="Ingress")
