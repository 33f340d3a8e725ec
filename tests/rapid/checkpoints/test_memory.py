"""What does not fit is refused with numbers, before weights are read; free memory is made up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rapid.checkpoints import memory
from rapid.checkpoints.facts import read_model_facts
from rapid.checkpoints.memory import (
    ALL_GPUS,
    STAGED_BYTES,
    check_fits,
    memory_needs,
    weight_bits,
)
from rapid.config import EngineConfig
from rapid.engines.attention.cases import chunk_checks, step_checks
from rapid.engines.engine import Engine
from rapid.engines.forward.graphs import cuda_graphs
from rapid.engines.forward.weights import loading
from rapid.engines.forward.weights.loading import check_memory, load_model
from rapid.engines.kv.cache import KVLayout
from rapid.errors import ConfigurationError
from rapid.planning import shapes
from rapid.planning.plan import MemoryNeed
from tests.rapid.tiny_models import checkpoint, engine_config, loaded
from tests.rapid.tiny_stored import publish

MIB = 2**20


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch):
    """Call it to say how many bytes are free."""

    def say(num_bytes: int) -> None:
        for module in (memory, loading):
            monkeypatch.setattr(module, "free_bytes", lambda device: num_bytes)

    return say


@pytest.fixture
def no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object, **__: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", read)


def config_only(tmp_path: Path, **changes: object) -> Path:
    """A checkpoint whose weights are not there."""
    settings = json.loads((checkpoint() / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | changes))
    return tmp_path


def needs(config: EngineConfig, *, on_gpu: bool = False, with_pools: bool = False):
    return memory_needs(config, read_model_facts(config), on_gpu=on_gpu, with_pools=with_pools)


def need(config: EngineConfig, **settings: bool):
    return needs(config, **settings)[0]


class TestNeed:
    def test_weights_are_what_the_loaded_model_holds(self):
        held = sum(p.numel() * p.element_size() for p in loaded().model.parameters())
        assert need(engine_config()).weights == held
        assert need(engine_config(dtype="bfloat16")).weights == held / 2

    def test_a_shape_alone_gives_the_same(self, tmp_path):
        path = config_only(tmp_path)
        held = sum(p.numel() * p.element_size() for p in loaded().model.parameters())
        assert need(EngineConfig(model=str(path), dtype="float32")).weights == held

    def test_the_pool_is_what_the_engine_allocates(self):
        planned = need(engine_config(kv_cache_tokens=512), with_pools=True)
        assert planned.kv_pool == 512 * loaded().kv_layout.bytes_per_token
        assert need(engine_config()).kv_pool == 0

    def test_a_pool_in_fp8_takes_a_byte_a_number(self):
        config = engine_config(kv_cache_tokens=512, host_cache_tokens=100)
        planned = need(config, with_pools=True)
        in_fp8 = need(config.model_copy(update={"kv_cache_dtype": "fp8"}), with_pools=True)
        assert in_fp8.kv_pool == planned.kv_pool / 4  # of float32
        assert in_fp8.host_cache == planned.host_cache / 4
        assert in_fp8.weights == planned.weights

    def test_the_host_cache_is_in_the_host_s_memory(self):
        config = engine_config(host_cache_tokens=100)
        num_bytes = 100 * loaded().kv_layout.bytes_per_token
        on_cpu, beside = needs(config, with_pools=True)
        assert (on_cpu.host_cache, beside.total) == (num_bytes, 0)
        on_gpu, beside = needs(config, on_gpu=True, with_pools=True)
        assert (on_gpu.host_cache, beside.total) == (0, num_bytes)
        without = need(engine_config(), on_gpu=True, with_pools=True)
        assert on_gpu.kv_pool - without.kv_pool == STAGED_BYTES

    def test_each_of_several_machines_has_its_part(self):
        config = engine_config(host_cache_tokens=128, kv_cache_tokens=512, tensor_parallel=2)
        facts = read_model_facts(config)
        for on_gpu in (False, True):
            whole = needs(config, on_gpu=on_gpu, with_pools=True)
            parts = memory_needs(config, facts, on_gpu=on_gpu, with_pools=True, num_machines=2)
            assert parts[1].total == whole[1].total / 2
            assert parts[0].host_cache == whole[0].host_cache / 2
            share = 1 if on_gpu else 2  # a GPU has the same part wherever it is
            assert parts[0].weights == whole[0].weights / share
            assert parts[0].kv_pool == whole[0].kv_pool / share

    def test_a_gpu_holds_captured_steps_too_and_checks_its_kernels_first(self):
        config = engine_config(kv_cache_tokens=512, max_context=256)
        on_cpu, on_gpu = need(config), need(config, on_gpu=True)
        assert (on_cpu.graphs, on_cpu.check) == (0, 0)
        assert on_gpu.work == max(on_gpu.workspace + on_gpu.graphs, on_gpu.check)
        assert on_gpu.total == on_gpu.weights + on_gpu.work
        longer = need(config.model_copy(update={"max_context": 1256}), on_gpu=True)
        layer = loaded().kv_layout.bytes_per_token / len(loaded().kv_layout.devices)  # float32
        assert longer.check - on_gpu.check == 1000 * layer
        more = need(config.model_copy(update={"max_leases": 2 * config.max_leases}), on_gpu=True)
        shape = read_model_facts(config).shape
        logits = 10 * config.max_leases * shape.vocabulary * 4
        assert more.graphs - on_gpu.graphs > cuda_graphs.MAX_SHAPES / 2 * logits

    def test_the_plan_knows_what_checks_and_graphs_take(self):
        assert shapes.GRAPHS == cuda_graphs.MAX_SHAPES
        assert shapes.CHUNK_ROWS == cuda_graphs.CHUNK_ROWS
        layout = KVLayout(1, 1, torch.float32, (torch.device("cpu"),))
        for make in (step_checks, chunk_checks):
            for page in (16, 256):
                (case, *_) = make(layout, 1, page)
                assert case.inputs.rows.cache.layers[0][0].shape[1] <= shapes.CHECK_SLOTS

    def test_auto_is_bfloat16_on_a_gpu_only(self):
        config = EngineConfig(model=str(checkpoint()))
        assert need(config).weights == 2 * need(config, on_gpu=True).weights

    def test_an_index_says_which_files_count(self, tmp_path):
        path = config_only(tmp_path)
        for name in ("a", "b", "consolidated"):
            save_file({name: torch.zeros(10, dtype=torch.bfloat16)}, path / f"{name}.safetensors")
        index = {"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
        assert need(EngineConfig(model=str(path), dtype="float32")).weights == 2 * 10 * 4

    def test_a_hub_checkpoint_is_known_by_its_index(self, monkeypatch):
        index = {"metadata": {"total_size": 1000}}
        settings = json.loads((checkpoint() / "config.json").read_text()) | {"dtype": "bfloat16"}
        files = {"config.json": settings, "model.safetensors.index.json": index}
        for module in ("rapid.checkpoints.memory", "rapid.checkpoints.facts"):
            monkeypatch.setattr(f"{module}.read_json", lambda _, name: files.get(name))
        assert need(EngineConfig(model="some/model", dtype="float32")).weights == 2000
        del files["model.safetensors.index.json"]
        held = sum(p.numel() * p.element_size() for p in loaded().model.parameters())
        assert need(EngineConfig(model="some/model", dtype="float32")).weights == held

    def test_stored_quantized_weights_keep_their_size(self, tmp_path):
        path = config_only(tmp_path, quantization_config={"quant_method": "fp8"})
        tensors = {
            "packed": torch.zeros(100, dtype=torch.float8_e4m3fn),
            "scale": torch.zeros(10, dtype=torch.bfloat16),
        }
        save_file(tensors, path / "model.safetensors")
        assert need(EngineConfig(model=str(path), dtype="float32")).weights == 100 + 4 * 10

    def test_quantizing_while_loading_shrinks_the_layers_alone(self):
        shape = read_model_facts(engine_config()).shape
        for setting in ({"load_in_8bit": True}, "int8", "fp8"):
            quantized = need(engine_config(quantization=setting))
            assert need(engine_config()).weights - quantized.weights == 3 * shape.layer_weights

    @pytest.mark.parametrize("role", ["target", "drafter"])
    def test_four_bits_are_counted_with_their_scales(self, role):
        config = EngineConfig(
            model=f"embedded:{role}", device="cpu", dtype="bfloat16", quantization="int4"
        )
        model = load_model(config).model
        held = [p for p in (*model.parameters(), *model.get_submodule("model.layers").buffers())]
        assert need(config).weights == sum(tensor.nbytes for tensor in held)
        others = need(config.model_copy(update={"quantization": "fp8"}), on_gpu=True)
        converted = need(config, on_gpu=True).workspace - others.workspace
        shape = read_model_facts(config).shape
        assert converted == 3 * 2 * shape.hidden * 2 * shape.intermediate  # for a prefill

    @pytest.mark.parametrize("name", ["awq", "gptq of rows", "w4a16 with zeros", "fp8"])
    def test_a_published_checkpoint_is_counted_as_it_is_packed(self, tmp_path, name):
        config, plain = publish(tmp_path, name)
        model = load_model(config).model
        held = [*model.parameters(), *model.get_submodule("model.layers").buffers()]
        assert need(config).weights == sum(tensor.nbytes for tensor in held)
        others = need(plain, on_gpu=True).workspace
        converted = need(config, on_gpu=True).workspace - others
        assert converted == (0 if name == "fp8" else 3 * 2 * 128 * 2 * 384)  # for a prefill

    @pytest.mark.parametrize(
        ("quantization", "bits"),
        [
            ({"load_in_4bit": True}, 4), ({"load_in_8bit": True}, 8), ({"quant_method": "fp8"}, 8),
            ({"quant_method": "gptq", "bits": 3}, 3), ({"quant_method": "unheard-of"}, 4),
            ("int8", 8), ("fp8", 8),
        ],
    )  # fmt: skip
    def test_bits_of_a_weight(self, quantization, bits):
        assert weight_bits(quantization) == bits


class TestRefusal:
    def test_weights_that_do_not_fit_are_not_read(self, free, no_reading):
        free(1000)
        with pytest.raises(ConfigurationError, match="take a smaller model or dtype") as caught:
            load_model(engine_config())
        assert "cpu cannot hold" in str(caught.value)
        assert "weights" in str(caught.value)
        assert "0 MiB are free" in str(caught.value)

    def test_a_pool_that_does_not_fit_beside_them_is_told_first(self, free, no_reading):
        room = 2**20
        pool = room * loaded().kv_layout.bytes_per_token
        free(pool)
        told = f"KV pool {pool // MIB} MiB.*lower kv_cache_tokens$"
        with pytest.raises(ConfigurationError, match=told):
            load_model(engine_config(kv_cache_tokens=room), with_pools=True)

    def test_parts_of_a_gpu_s_need_add_up_to_what_is_told(self):
        steps = MemoryNeed(weights=2**30, workspace=2**29, graphs=2**29, check=2**20)
        start = MemoryNeed(weights=2**30, workspace=2**29, graphs=2**29, check=2**31)
        with pytest.raises(ConfigurationError) as caught:
            check_fits([("a", steps), ("b", start)], "cuda:0", 2**30)
        assert "a (weights 1.0 GiB, workspace 512 MiB, captured steps 512 MiB)" in str(caught.value)
        assert "b (weights 1.0 GiB, check of the kernels 2.0 GiB)" in str(caught.value)
        assert "5.0 GiB are needed, 1.0 GiB are free" in str(caught.value)

    def test_layers_on_all_gpus_are_told_to_take_more_of_them(self):
        large = ("a", MemoryNeed(weights=2**31))
        with pytest.raises(ConfigurationError, match=r"device: balanced$"):
            check_fits([large], "cuda", 2**30)
        with pytest.raises(ConfigurationError, match=r"all GPUs together .* more GPUs$"):
            check_fits([large], ALL_GPUS, 2**30)

    def test_nor_a_host_cache(self, free, no_reading):
        room = 2**20
        free(room * loaded().kv_layout.bytes_per_token)
        with pytest.raises(ConfigurationError, match=r"host cache .* or host_cache_tokens"):
            load_model(engine_config(host_cache_tokens=room), with_pools=True)

    def test_what_is_cached_by_two_machines_is_not_asked_of_one(self, free):
        room = 2**20
        config = engine_config(host_cache_tokens=room, tensor_parallel=2)
        free(int(0.9 * room * loaded().kv_layout.bytes_per_token))
        with pytest.raises(ConfigurationError, match="host cache"):
            check_memory(config, with_pools=True)
        check_memory(config, with_pools=True, num_machines=2)

    def test_models_of_one_device_are_counted_together(self, free):
        one = need(engine_config()).total
        free(int(1.5 * one))
        check_memory(engine_config())
        with pytest.raises(ConfigurationError, match=r"tiny-llama.* and .*tiny-qwen2"):
            check_memory(engine_config(), engine_config("qwen2"))

    def test_what_fits_exactly_is_loaded(self, free):
        config = engine_config()
        free(int(need(config, with_pools=True).total))
        assert load_model(config, with_pools=True).vocab_size == loaded().vocab_size

    def test_an_engine_does_not_allocate_a_pool_that_does_not_fit(self, free):
        free(1024 * loaded().kv_layout.bytes_per_token - 1)
        with pytest.raises(ConfigurationError, match="a KV pool of 1,024 tokens takes"):
            Engine(loaded(), engine_config())

    def test_what_torch_keeps_of_freed_tensors_counts_as_free(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 50)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 30)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        assert memory.free_bytes("cuda:0") == 120
        assert memory.free_bytes("balanced") == 240  # the host's memory takes no layers

    def test_a_machine_s_memory_is_what_is_available(self):
        assert 0 < memory.free_bytes("cpu") < 2**60
