"""Versions of deployments, on the way that they take through Serve."""

from __future__ import annotations

from pydantic import BaseModel, SecretStr
from ray import serve
from ray.serve._private.config import DeploymentConfig
from ray.serve._private.deploy_utils import get_deploy_args

from cluster.versions import pin_version, version_of


class Settings(BaseModel):
    model: str
    step_tokens: int = 512
    key: SecretStr | None = None


def test_serve_sends_the_deployments_version_and_not_the_applications() -> None:
    deployment = pin_version(
        serve.deployment(Settings).options(name="Target", max_ongoing_requests=7), "its own"
    )
    bound = deployment.options(name="Target", user_config={"live": 1})  # as Serve's builder does
    sent = get_deploy_args(
        "Target",
        bound._replica_config,
        deployment_config=bound._deployment_config,
        version="the application's",
    )
    config = DeploymentConfig.from_proto_bytes(sent["deployment_config_proto_bytes"])
    assert config.version == "its own"
    assert (config.max_ongoing_requests, config.user_config) == (7, {"live": 1})


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
