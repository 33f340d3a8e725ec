"""`rapid hash-key` and `rapid keys`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import Result

from deployments.config.tenants import hash_key
from tests.deployments.cli.command import rapid

ROOT = Path(__file__).parents[4]


class TestHashKey:
    def test_a_key_from_standard_input(self):
        assert rapid("hash-key", input="sk-1\n").stdout.strip() == hash_key("sk-1")

    def test_a_new_key(self):
        result = rapid("hash-key", "--new")
        key = result.stderr.strip().rpartition(" ")[2]
        assert key.startswith("sk-")
        assert result.stdout.strip() == hash_key(key)

    def test_no_key(self):
        assert rapid("hash-key", input="\n").exit_code == 1


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A configuration with a library in a folder."""
    file = yaml.safe_load((ROOT / "serve_config.yaml").read_text(encoding="utf-8"))
    file["applications"][0]["args"]["library"] = {"folder": str(tmp_path / "library")}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(file), encoding="utf-8")
    return path


class TestKeys:
    def test_no_configuration(self):
        result = rapid("keys", "list", "--config", "no.yaml")
        assert (result.exit_code, "with --config" in result.stderr) == (2, True)

    def test_a_key_is_made_listed_rotated_and_revoked(self, config: Path, tmp_path: Path):
        def keys(*arguments: str) -> Result:
            return rapid("keys", *arguments, "--config", str(config), env={"COLUMNS": "200"})

        made = keys("create", "acme", "--name", "laptop", "--scope", "ask", "--days", "3")
        key = made.stdout.strip()
        assert made.exit_code == 0
        assert key.startswith("sk-")
        key_id = made.stderr.split()[0]
        listed = keys("list").stdout
        assert all(each in listed for each in (key_id, "acme", "laptop", "ask", "expires 20"))
        assert key not in listed
        (as_json,) = json.loads(keys("list", "--json").stdout)
        assert (as_json["id"], as_json["scopes"]) == (key_id, ["ask"])
        rotated = keys("rotate", key_id)
        new_id = rotated.stderr.split()[0]
        assert rotated.stdout.strip() != key
        assert keys("revoke", new_id).exit_code == 0
        assert keys("list", "--tenant", "acme").stdout.count("revoked 20") == 2
        none = keys("list", "--tenant", "guest")
        assert (none.stdout, "make one with 'rapid keys create" in none.stderr) == ("", True)
        assert (tmp_path / "library" / "library.sqlite").exists()

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (("create", "acme", "--scope", "root"), "give one of ask, documents, admin"),
            (("create", "a\nb"), "printable"),
            (("revoke", "key_1"), "There is no key 'key_1'"),
            (("rotate", "key_1"), "There is no key 'key_1'"),
        ],
    )
    def test_what_is_wrong_is_named(self, config: Path, arguments: tuple[str, ...], said: str):
        result = rapid("keys", *arguments, "--config", str(config), env={"COLUMNS": "200"})
        assert result.exit_code == (2 if arguments[0] == "create" else 1)
        assert said in " ".join(result.stderr.split())

    def test_a_configuration_without_a_library_keeps_no_keys(self, config: Path):
        file = yaml.safe_load(config.read_text(encoding="utf-8"))
        del file["applications"][0]["args"]["library"]
        config.write_text(yaml.safe_dump(file), encoding="utf-8")
        result = rapid("keys", "list", "--config", str(config))
        assert result.exit_code == 1
        assert "library: {}" in result.stderr
