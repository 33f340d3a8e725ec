from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.evaluation.tiny_task import SETTINGS


@pytest.fixture
def task(tmp_path: Path) -> str:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(SETTINGS | {"systems": ["plain", "rapid-boost"]}))
    return str(path)
