"""`rapid hash-key`."""

from __future__ import annotations

from deployments.config.tenants import hash_key
from tests.deployments.cli.command import rapid


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
