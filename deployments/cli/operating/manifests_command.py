"""The command ``rapid manifests``, which writes a configuration's manifests for Kubernetes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deployments.cli.terminal import note

_FOLDER = Path("deploy/kuberay")


def manifests(
    config: Annotated[Path, typer.Argument(help="A Serve configuration file.")],
    name: Annotated[str, typer.Argument(help="The service's name, and its folder's.")],
    folder: Annotated[
        Path, typer.Option(help="Where base/ is; the service's folder is made beside it.")
    ] = _FOLDER,
) -> None:
    """Write a RayService for KubeRay, with nodes made for the configuration's pools.

    `kubectl apply -k FOLDER/NAME` applies it; docs/operations.md says what it needs.
    """
    from deployments.config.kubernetes import ray_service as making

    files = making.manifests(config, name)
    target = folder / name
    target.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        (target / file).write_text(content, encoding="utf-8")
    note(f"wrote {', '.join(files)} in {target}")
