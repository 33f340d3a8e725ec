"""A machine on which all is well, and the shipped configuration as a subject of the checks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

from deployments.cli.doctor.machine import Machine
from deployments.cli.doctor.subject import Subject

ROOT = Path(__file__).parents[4]
HEALTHY = Machine(
    python=(3, 11),
    platform="Linux x86_64",
    num_cores=2,
    load=1.0,
    free_memory=16 * 2**30,
    shm_free=8 * 2**30,
    open_files=20_000,
    now=2e9,
    newest_file=1e9,
    token_mode=0o600,
)
SHIPPED: dict[str, Any] = yaml.safe_load((ROOT / "serve_config.yaml").read_text(encoding="utf-8"))


def write_config(folder: Path, **sections: dict[str, Any]) -> Path:
    """Write the shipped configuration with other pools, by the section that they are of."""
    file = copy.deepcopy(SHIPPED)
    for section, settings in sections.items():
        for key, value in settings.items():
            file["applications"][0]["args"].setdefault(section, {})[key] = value
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(file), encoding="utf-8")
    return path


def shipped() -> Subject:
    """The shipped configuration."""
    return Subject.read(ROOT / "serve_config.yaml")
