"""A configuration's file, port, models and Qdrant, as the checks see them."""

from __future__ import annotations

import socket
from dataclasses import replace

import httpx
import pytest

from deployments.cli.doctor import configuration_checks as checks
from deployments.cli.doctor.subject import Subject
from rapid.checkpoints.downloads import hub
from rapid.embedded import DRAFTER
from tests.deployments.cli.doctor.healthy import HEALTHY, ROOT, shipped, write_config
from tests.deployments.config.swapped import swap_tokens


class TestFile:
    def test_the_shipped_one_is_served(self):
        found = checks.check_file(HEALTHY, shipped())
        assert found.mark == "ok"
        assert "'rapid-embedded'; the models of a pair have one vocabulary" in found.fact

    def test_a_mistake_is_an_error(self, tmp_path):
        subject = Subject.read(write_config(tmp_path, api={"max_choices": 0}))
        assert checks.check_file(HEALTHY, subject).mark == "error"
        assert "max_choices" in subject.problem

    def test_a_pair_of_two_vocabularies_is_an_error(self, tmp_path):
        engine = {"model": str(swap_tokens(tmp_path, DRAFTER)), "max_context": 2048}
        engine |= {"kv_cache_tokens": 32768, "max_leases": 16}
        subject = Subject.read(write_config(tmp_path, drafter={"engine": engine}))
        assert "different vocabularies" in checks.check_file(HEALTHY, subject).fact

    def test_several_nodes_are_for_a_cluster(self):
        subject = Subject.read(ROOT / "cluster/configs/two-processes.yaml")
        pool = subject.configs["rapid"].target.pool  # type: ignore[attr-defined]
        assert pool.nodes == 1
        target = subject.configs["rapid"].target.model_copy(  # type: ignore[attr-defined]
            update={"pool": pool.model_copy(update={"nodes": 2})}
        )
        config = subject.configs["rapid"].model_copy(update={"target": target})
        several = replace(subject, configs={"rapid": config})
        assert "needs a Ray of as many nodes" in checks.check_file(HEALTHY, several).fact
        joined = replace(several, joins_cluster=True)
        assert checks.check_file(HEALTHY, joined).mark == "ok"


class TestPort:
    def test_one_that_is_taken_is_an_error(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            subject = replace(shipped(), address=listener.getsockname())
            found = checks.check_port(HEALTHY, subject)
        assert (found.mark, found.mend) == ("error", "end it, or set http_options.port")
        assert checks.check_port(HEALTHY, subject).mark == "ok"
        assert checks.check_port(HEALTHY, replace(subject, address=None)).mark == "ok"

    def test_this_folder_s_own_server_may_have_it(self, monkeypatch):
        monkeypatch.setattr("deployments.cli.server.server_process.running_pid", lambda: 123)
        assert "process 123" in checks.check_port(HEALTHY, shipped()).fact


class TestModels:
    def test_those_in_the_package_are_here(self):
        assert checks.check_models(HEALTHY, shipped()).fact == "2 named, and all are here"

    def test_weights_that_will_be_fetched_are_a_warning(self, monkeypatch):
        subject = shipped()
        assert not subject.problem
        monkeypatch.setattr(hub, "find_hub_names", lambda models: ["acme/large"])
        monkeypatch.setattr(hub, "has_weights", lambda name: False)
        found = checks.check_models(HEALTHY, subject)
        assert (found.mark, found.mend) == ("warning", "hf download acme/large")
        monkeypatch.setattr(hub, "is_offline", lambda: True)
        found = checks.check_models(HEALTHY, subject)
        assert (found.mark, "the hub cannot be asked" in found.fact) == ("error", True)
        assert checks.check_models(HEALTHY, replace(subject, joins_cluster=True)).mark == "warning"
        found = checks.check_models(HEALTHY, replace(subject, misreading="a wrong key"))
        assert found.fact == "the weights of acme/large are not here"
        assert (found.mark, found.mend) == ("warning", "first mend the configuration")


class TestQdrant:
    @pytest.fixture
    def with_qdrant(self, tmp_path):
        store = {"kind": "server", "url": "http://127.0.0.1:6333"}
        retrieval = {"embedder": {"kind": "lexical"}, "store": store}
        retrieval |= {"budget_tokens": 320, "chunk_tokens": 64}
        return Subject.read(write_config(tmp_path, retriever={"retrieval": retrieval}))

    @pytest.mark.parametrize(("version", "mark"), [("1.19.2", "ok"), ("1.18.0", "error")])
    def test_its_version_is_looked_at(self, version, mark, with_qdrant, monkeypatch):
        def get(url, headers, timeout):
            return httpx.Response(200, json={"version": version}, request=httpx.Request("GET", url))

        monkeypatch.setattr(httpx, "get", get)
        found = checks.check_qdrant(HEALTHY, with_qdrant)
        assert (found.mark, f"is Qdrant {version}" in found.fact) == (mark, True)

    def test_without_one_nothing_is_retrieved(self, with_qdrant, monkeypatch):
        def get(url, headers, timeout):
            raise httpx.ConnectError("refused")

        monkeypatch.setattr(httpx, "get", get)
        assert "nothing is retrieved" in checks.check_qdrant(HEALTHY, with_qdrant).fact
        assert checks.check_qdrant(HEALTHY, shipped()).fact == "no server is used"
