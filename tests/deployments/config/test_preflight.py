"""What checkpoints and memory refuse before anything starts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from deployments.cli.serving import check_config
from deployments.config.plans import deployment_plans
from deployments.config.serve_config import ServeConfig
from deployments.config.serve_file import check
from rapid.embedded import DRAFTER, TARGET
from rapid.errors import ConfigurationError
from rapid.vllm_config import VllmConfig
from tests import fake_vllm
from tests.deployments.config.swapped import swap_tokens

CONFIG = Path(__file__).parents[3] / "serve_config.yaml"


def test_two_models_that_mean_different_things_are_refused(tmp_path: Path) -> None:
    """The drafter's tokens are the target's with two swapped."""
    swapped = swap_tokens(tmp_path, DRAFTER)
    file = yaml.safe_load(CONFIG.read_text())
    file["applications"][0]["args"]["drafter"]["engine"]["model"] = str(swapped)
    path = tmp_path / "mistaken.yaml"
    path.write_text(yaml.safe_dump(file))
    with pytest.raises(ConfigurationError, match="different vocabularies: token id"):
        check(path)


def test_a_checkpoint_without_weights_is_refused(tmp_path: Path) -> None:
    hollow = tmp_path / "target"
    shutil.copytree(TARGET, hollow, ignore=shutil.ignore_patterns("*.safetensors"))
    file = yaml.safe_load(CONFIG.read_text())
    file["applications"][0]["args"]["target"]["engine"]["model"] = str(hollow)
    path = tmp_path / "mistaken.yaml"
    path.write_text(yaml.safe_dump(file))
    with pytest.raises(ConfigurationError, match="holds no safetensors weights"):
        check(path)


@pytest.mark.parametrize(
    ("recommended", "configured", "taken"),
    [(None, None, 1.0), (0.6, None, 0.6), (0.6, 0, 0.0), ("hot", None, 1.0), (9, None, 1.0)],
)
def test_the_default_temperature_is_configured_or_the_checkpoint_s_own_or_one(
    tmp_path: Path, recommended: object, configured: float | None, taken: float
) -> None:
    target = tmp_path / "target"
    shutil.copytree(TARGET, target)
    if recommended is not None:
        (target / "generation_config.json").write_text(json.dumps({"temperature": recommended}))
    file = yaml.safe_load(CONFIG.read_text())
    args = file["applications"][0]["args"]
    args["target"]["engine"]["model"] = str(target)
    args["api"]["default_temperature"] = configured
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(file))
    config = check(path)
    assert config.filled_api.default_temperature == taken


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "supported are llama, mistral, qwen2, qwen3"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 0,
             "sliding_window": "wide"},
            "sliding windows",
        ),
    ],
)  # fmt: skip
def test_a_checkpoint_that_engines_cannot_run_is_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    other = tmp_path / "target"
    shutil.copytree(TARGET, other)
    settings = {k: v for k, v in json.loads((other / "config.json").read_text()).items()
                if k != "layer_types"}  # fmt: skip
    (other / "config.json").write_text(json.dumps(settings | changes))
    file = yaml.safe_load(CONFIG.read_text())
    file["applications"][0]["args"]["target"]["engine"]["model"] = str(other)
    path = tmp_path / "mistaken.yaml"
    path.write_text(yaml.safe_dump(file))
    with pytest.raises(ConfigurationError, match=f"target.engine: .*{message}"):
        check(path)


class TestVllm:
    """Pools of vLLM's: what is refused before one starts."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> Callable[..., Path]:
        def written(role: str = "drafter", more: object = None, **engine: object) -> Path:
            file = yaml.safe_load(CONFIG.read_text())
            args = file["applications"][0]["args"]
            model = args[role]["engine"]["model"]
            args[role]["engine"] = {
                "kind": "vllm",
                "model": model,
                "max_context": 1024,
                "tensor_parallel": 1,
            } | engine
            args |= more or {}
            path = tmp_path / "vllm.yaml"
            path.write_text(yaml.safe_dump(file))
            return path

        return written

    def test_one_that_drafts_is_accepted_and_its_vocabulary_compared(
        self, monkeypatch, tmp_path, path, capsys
    ) -> None:
        fake_vllm.install(monkeypatch, tmp_path)
        check_config(path())
        assert "embedded:drafter (vllm) drafts" in capsys.readouterr().out
        config = check(path(quantization="awq", gpu_memory_share=0.4))
        assert isinstance(config.drafter_pool.engine, VllmConfig)
        assert deployment_plans(config)["Drafter"].options["max_ongoing_requests"] >= 16
        assert ServeConfig.model_validate(config.model_dump(exclude_unset=True)) == config
        with pytest.raises(ConfigurationError, match="different vocabularies"):
            check(path(model=str(swap_tokens(tmp_path, DRAFTER))))

    @pytest.mark.parametrize("version", [None, "0.29.1"])
    def test_a_vllm_that_is_missing_or_old_is_refused(
        self, monkeypatch, tmp_path, path, version
    ) -> None:
        if version:
            fake_vllm.install(monkeypatch, tmp_path, version=version)
        with pytest.raises(ConfigurationError, match=r"drafter.engine: .* vllm 0\.30 or later"):
            check(path())

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"role": "target"}, "target.engine.kind: vllm drafts and does not judge"),
            ({"kind": "sglang"}, "drafter.engine.kind: Input should be 'vllm'"),
            ({"page_tokens": 8}, "drafter.engine.page_tokens: unknown key"),
            ({"more": {"speculation": {"coupling": "shared_noise"}}}, "coupling 'shared_noise'"),
            ({"more": {"speculation": {"draft_top_k": None}}}, "draft_top_k is at most 256"),
            ({"more": {"speculation": {"transfer_temperature": 0.5}}}, "transfer_temperature is 1"),
        ],
    )
    def test_what_it_cannot_do_is_refused_by_name(self, path, changes, message) -> None:
        with pytest.raises(ConfigurationError, match=message):
            check(path(**changes))

    def test_it_is_on_one_node(self) -> None:
        engine = {"kind": "vllm", "model": "m", "max_context": 64, "tensor_parallel": 2}
        drafter = {"engine": engine, "pool": {"num_gpus": 2, "nodes": 2}}
        with pytest.raises(ValidationError, match=r"drafter\.pool\.nodes"):
            ServeConfig.model_validate({"target": {"engine": {"model": "m"}}, "drafter": drafter})


class TestMemory:
    """What is known before anything starts: engines on this machine's CPU, all together."""

    @pytest.fixture
    def free(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
        monkeypatch.delenv("RAY_ADDRESS", raising=False)

        def say(num_bytes: int) -> None:
            monkeypatch.setattr("deployments.config.preflight.free_bytes", lambda device: num_bytes)

        return say

    def changed(self, tmp_path: Path, **engine: object) -> Path:
        file = yaml.safe_load(CONFIG.read_text())
        for role in ("target", "drafter"):
            file["applications"][0]["args"][role]["engine"].update(engine)
        path = tmp_path / "changed.yaml"
        path.write_text(yaml.safe_dump(file))
        return path

    def test_what_does_not_fit_together_is_refused_with_numbers(self, tmp_path, free) -> None:
        path = self.changed(tmp_path, device="cpu")
        free(2**30)
        check(path)
        free(100 * 2**20)
        with pytest.raises(ConfigurationError, match="100 MiB are free; lower kv_") as caught:
            check(path)
        for part in ("target 'embedded:target'", "drafter 'embedded:drafter'", "KV pool 128 MiB"):
            assert part in str(caught.value)

    def test_a_pool_without_room_for_the_second_lease_is_refused(self, tmp_path, free) -> None:
        free(2**30)
        room = {"max_context": 2048, "kv_cache_tokens": 2048 + 320 - 1}
        with pytest.raises(ConfigurationError, match=r"\(2367\) cannot hold .* raise it to 2368"):
            check(self.changed(tmp_path, **room))
        check(self.changed(tmp_path, **room | {"kv_cache_tokens": 2368}))

    def test_a_gpu_s_memory_is_not_known_here(self, tmp_path, free) -> None:
        free(0)
        check(self.changed(tmp_path, device="cuda"))

    def test_nor_that_of_a_cluster(self, tmp_path, free, monkeypatch) -> None:
        free(0)
        monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
        check(self.changed(tmp_path, device="cpu"))


def test_a_gpu_may_be_on_another_machine(tmp_path: Path) -> None:
    file = yaml.safe_load(CONFIG.read_text())
    file["applications"][0]["args"]["target"]["engine"]["device"] = "cuda"
    path = tmp_path / "elsewhere.yaml"
    path.write_text(yaml.safe_dump(file))
    assert check(path).target.engine.device == "cuda"


def test_a_model_that_the_hub_refuses_is_said_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def refuse(url: str, **_: object) -> None:
        asked.append(url)
        raise OSError("no route to host")

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", refuse)
    file = yaml.safe_load(CONFIG.read_text())
    file["applications"][0]["args"]["target"]["engine"]["model"] = "acme/not-cached"
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(file))
    with pytest.raises(ConfigurationError, match=r"the hub cannot be reached \(no route to host"):
        check(path)
    assert len(asked) == 1
