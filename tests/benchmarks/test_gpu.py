"""The GPU benchmark runs where there is no GPU, at tiny shapes: all its parts, in their order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.on_gpu import losses
from rapid.config import SamplingConfig, SpeculationConfig
from rapid.engines.attention.survey import KernelCandidate
from rapid.planning.plan import LIKELY

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
PARTS = ["1. correctness", "1. agreement", "2. steps", "3. speedups", "4. attention"]
PARTS += ["5. prefill", "6. small operations", "6. calls of a round", "6. sums over GPUs"]
PARTS += ["7. Llama", "8. products", "9. keys and values"]
ASKED = {"<= 1.15", ">= 60 %", ">= 1.2x", "<= 1e-03"}
ASKED |= {"<= 1.35x (9 ms on an H200)", "int4 <= 1e-2 from its numbers"}


def bench_of(tmp_path: Path, candidates: list[KernelCandidate], seconds: float = 600):
    cpu = torch.device("cpu")
    deadline = gpu.time.monotonic() + seconds
    return gpu.Bench(gpu.SMOKE, cpu, torch.float32, deadline, candidates, tmp_path / "gpu.json")


def hide(folder: Path, *packages: str) -> Path:
    """A folder in which these cannot be imported."""
    for name in packages:
        (folder / name).mkdir()
        text = f"raise ModuleNotFoundError(\"No module named '{name}'\")"
        (folder / name / "__init__.py").write_text(text)
    return folder


def run(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(path or "")}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.slow
def test_a_smoke_run_ends_with_every_number_that_is_asked(tmp_path: Path) -> None:
    """Where pydantic is not, which neither torch nor transformers brings."""
    out = tmp_path / "gpu.json"
    bare = hide(tmp_path, "pydantic")
    without = ("--without", "blocks, ours in Triton")
    ran = run("--smoke", *without, "--out", str(out), path=bare)
    assert ran.returncode == 0, ran.stderr
    places = [ran.stdout.index(part) for part in PARTS]
    assert places == sorted(places)
    assert "failed" not in ran.stdout
    assert "skipped" not in ran.stdout
    report = json.loads(out.read_text())
    shares = {"kv_share", "weights_share", "four_bits_share", "attention_flops"}
    # Of what is lost on a GPU all but sums, for which there must be several.
    times = {"step_s", "sequence_s", "layer_s", "fp8_layer_s", "round_s"}
    times |= {"sampling_s", "judging_s", "drafting_s"}
    assert report["losses"].keys() == shares | times
    assert replace(LIKELY, **report["losses"]).kv_share > 0
    assert "sums over GPUs: not measured" in ran.stdout
    table = report["table"]
    assert {asked for _, _, asked, verdict in table if verdict in ("pass", "FAIL")} == ASKED
    assert table[-1][0] in ran.stdout.splitlines()[-1]  # the table comes last


def test_without_a_device_it_says_so_and_measures_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="no CUDA device is visible; --smoke runs tiny shapes"):
        gpu.main()
    assert capsys.readouterr().out == ""


def test_when_time_is_up_the_table_still_comes_last(tmp_path: Path) -> None:
    ran = run("--smoke", "--minutes", "0", "--out", str(tmp_path / "gpu.json"))
    assert ran.returncode == 0, ran.stderr
    assert "skipped (" in ran.stdout
    assert ran.stdout.splitlines()[-1].startswith("| ")


def test_a_package_that_is_missing_is_named(tmp_path: Path) -> None:
    ran = run("--smoke", path=hide(tmp_path, "transformers"))
    assert ran.returncode == 1
    assert ran.stderr.startswith("No module named 'transformers': this benchmark runs from a check")
    assert "Traceback" not in ran.stderr


def test_parts_that_fail_or_run_out_of_time_leave_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(bench: object) -> None:
        raise RuntimeError("CUDA error: out of memory\nmore")

    bench = bench_of(tmp_path, [])
    bench.part("a", 0, fails)
    bench.part("b", 1e6, fails)
    bench.part("c", 0, lambda bench: bench.say("c", "3 ms"))
    told = [line[1] for line in bench.lines]
    assert told[0] == "failed (RuntimeError: CUDA error: out of memory)"
    assert told[1].startswith("skipped (b: needs about 1000000 s")
    assert told[2] == "3 ms"
    assert json.loads((tmp_path / "gpu.json").read_text())["table"][2][0] == "c"


def test_a_candidate_that_fails_at_full_length_leaves_the_others(tmp_path: Path) -> None:
    def fails(*arguments: object) -> torch.Tensor:
        raise RuntimeError("out of memory")

    (plain,) = [one for one in gpu.all_candidates(16) if one.name == "runs, written out"]
    bench = bench_of(tmp_path, [KernelCandidate("large", lambda: fails), plain])
    bench.report["copy_bytes_per_s"] = 1e9
    gpu.kernels_against_bytes(bench)
    told = [line[1] for line in bench.lines]
    assert told.count("failed (RuntimeError: out of memory)") == 16
    assert sum("of the bytes" in line for line in told) == 16


def test_no_attention_is_timed_that_was_not_found_right(tmp_path: Path) -> None:
    def wrong(query: torch.Tensor, *rest: object) -> torch.Tensor:
        return query.transpose(1, 2)

    bench = bench_of(tmp_path, [KernelCandidate("wrong", lambda: wrong)])
    gpu.measure(bench)
    assert bench.lines[-1][1] == "skipped: no attention was found right here"
    assert not bench.models


def test_ranks_that_sum_tell_how_long_one_takes(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda rank: losses.time_sums(rank, 2, str(tmp_path), "cpu"), range(2)))
    assert float((tmp_path / "ms").read_text()) > 0


def test_it_samples_with_the_defaults_of_the_configuration() -> None:
    speedups = sys.modules[gpu.speedups.__module__]
    sampling = SamplingConfig()
    assert sampling.ends({1, 2}) == speedups.SAMPLING.ends({1, 2})
    assert vars(speedups.SAMPLING) == sampling.model_dump() | {"ends": frozenset}
    lossless = SpeculationConfig(eta=0)
    settings = lossless.model_dump() | {"is_witnessed": lossless.is_witnessed}
    assert vars(speedups.LOSSLESS) == settings
    fused = SpeculationConfig()
    settings = fused.model_dump() | {"is_witnessed": fused.is_witnessed}
    assert vars(speedups.FUSED) == settings
