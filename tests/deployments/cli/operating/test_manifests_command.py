"""`rapid manifests`, as it is typed."""

from __future__ import annotations

from pathlib import Path

import yaml

from tests.deployments.cli.command import rapid

CONFIG = str(Path(__file__).parents[4] / "serve_config.yaml")


def test_it_writes_the_service_s_folder(tmp_path: Path) -> None:
    done = rapid("manifests", CONFIG, "mine", "--folder", str(tmp_path))
    assert done.exit_code == 0, done.stderr
    assert {path.name for path in (tmp_path / "mine").iterdir()} == {
        "rayservice.yaml",
        "kustomization.yaml",
        "gateway.yaml",
    }
    service = yaml.safe_load((tmp_path / "mine/rayservice.yaml").read_text())
    assert service["metadata"]["name"] == "mine"


def test_what_cannot_be_used_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    done = rapid("manifests", CONFIG, "no.dots", "--folder", str(tmp_path))
    assert done.exit_code == 2
    assert "cannot name a service of Kubernetes" in done.stderr
    assert list(tmp_path.iterdir()) == []
