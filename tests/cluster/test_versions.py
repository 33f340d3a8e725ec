"""Versions of deployments, by their settings."""

from __future__ import annotations

from pydantic import BaseModel, SecretStr

from cluster.versions import version_of


class Settings(BaseModel):
    model: str
    step_tokens: int = 512
    key: SecretStr | None = None


def test_a_version_follows_the_settings() -> None:
    version = version_of([Settings(model="a"), {"num_cpus": 1}])
    assert version_of([Settings(model="a"), {"num_cpus": 1}]) == version
    assert version_of([Settings(model="b"), {"num_cpus": 1}]) != version
    assert version_of([Settings(model="a"), {"num_cpus": 2}]) != version


def test_writing_a_default_down_replaces_nothing() -> None:
    assert version_of([Settings(model="a", step_tokens=512)]) == version_of([Settings(model="a")])


def test_two_secrets_are_two_versions_and_neither_can_be_read() -> None:
    versions = {version_of([Settings(model="a", key=SecretStr(key))]) for key in ("x1", "x2")}
    assert len(versions) == 2
    assert not any("x1" in each for each in versions)
