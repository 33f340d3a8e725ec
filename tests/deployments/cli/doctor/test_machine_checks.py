"""What is wrong with a machine, and what mends it, beside one on which all is well."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from deployments.cli.doctor import machine_checks
from deployments.cli.doctor.machine import Accelerators, Machine, look_at_gpus, read_gpus
from deployments.cli.doctor.subject import Subject
from tests.deployments.cli.doctor.healthy import HEALTHY, ROOT, shipped, write_config

TWO_H100 = Accelerators(("NVIDIA H100 80GB HBM3",) * 2, (80e9, 80e9), "570.1", (12, 8))
SMI = """<?xml version="1.0" ?><nvidia_smi_log>
<driver_version>570.86.15</driver_version><cuda_version>12.8</cuda_version>
<gpu id="1"><product_name>NVIDIA H100</product_name>
<fb_memory_usage><total>81559 MiB</total><free>81000 MiB</free></fb_memory_usage></gpu>
</nvidia_smi_log>"""


@pytest.fixture(scope="module")
def subject() -> Subject:
    return shipped()


@pytest.fixture
def on_gpus(tmp_path):
    """A configuration whose target reserves two GPUs."""
    engine = {"device": "cuda", "tensor_parallel": 2, "model": "embedded:target"}
    engine |= {"max_context": 4096, "kv_cache_tokens": 65536, "max_leases": 16}
    pool = {"num_gpus": 2, "target_ongoing_requests": 8}
    return Subject.read(write_config(tmp_path, target={"engine": engine, "pool": pool}))


CASES = [
    ("check_python", {"python": (3, 10)}, "error", "too old"),
    ("check_python", {"platform": "Windows AMD64"}, "warning", "nothing was tried"),
    ("check_load", {"load": 30.0}, "warning", "30 s to start"),
    ("check_memory", {"free_memory": 2**26}, "error", "kv_cache_tokens"),
    ("check_memory", {"free_memory": 2**31}, "warning", "beside it"),
    ("check_shared_memory", {"shm_free": 2**26}, "warning", "slower"),
    ("check_open_files", {"open_files": 1024}, "warning", "1,024"),
    ("check_clock", {"now": 1e8}, "warning", "before this program"),
]


@pytest.mark.parametrize(("check", "seen", "mark", "told"), CASES)
def test_what_is_wrong_is_told(check, seen, mark, told, subject):
    look = getattr(machine_checks, check)
    assert look(HEALTHY, subject).mark == "ok"
    found = look(replace(HEALTHY, **seen), subject)
    assert found.mark == mark
    assert told in f"{found.fact} {found.mend}"


def test_no_shared_memory_is_no_fault(subject):
    assert machine_checks.check_shared_memory(replace(HEALTHY, shm_free=None), subject).mark == "ok"


def test_memory_that_is_needed_is_not_known_of_a_wrong_file():
    found = machine_checks.check_memory(HEALTHY, Subject(ROOT / "x.yaml", misreading="wrong"))
    assert (found.mark, "not known" in found.fact) == ("ok", True)


@pytest.mark.parametrize(
    ("seen", "mark", "told"),
    [
        ({}, "error", "the pools reserve 2 GPUs, and there are none"),
        ({"gpus": TWO_H100}, "ok", "2 x NVIDIA H100"),
        ({"gpus": Accelerators(("NVIDIA GPU",) * 2)}, "ok", "2 x NVIDIA GPU"),
        ({"gpus": replace(TWO_H100, memory=(1e6, 80e9))}, "error", "needs"),
    ],
)
def test_gpus_are_as_many_and_as_large_as_the_pools_need(seen, mark, told, on_gpus):
    found = machine_checks.check_gpus(replace(HEALTHY, **seen), on_gpus)
    assert (found.mark, told in found.fact) == (mark, True)


def test_gpus_of_a_cluster_are_not_looked_for_here(on_gpus, subject):
    assert machine_checks.check_gpus(HEALTHY, replace(on_gpus, joins_cluster=True)).mark == "ok"
    assert "no pool reserves one" in machine_checks.check_gpus(HEALTHY, subject).fact


@pytest.mark.parametrize(
    ("torch_cuda", "mark"), [(None, "error"), ((13, 0), "error"), ((12, 9), "ok")]
)
def test_driver_and_torch_agree_on_a_major_version_of_cuda(torch_cuda, mark, on_gpus, subject):
    machine = replace(HEALTHY, gpus=TWO_H100, torch_cuda=torch_cuda)
    assert machine_checks.check_cuda(machine, on_gpus).mark == mark
    assert machine_checks.check_cuda(machine, subject).mark == "ok"


def test_what_nvidia_s_tool_tells_is_read():
    assert read_gpus(SMI) == Accelerators(("NVIDIA H100",), (81559 * 2**20,), "570.86.15", (12, 8))


def test_without_a_tool_that_answers_gpus_are_counted(monkeypatch):
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: [folder / "nvidia0"])
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    assert look_at_gpus() == Accelerators(("NVIDIA GPU",))
    monkeypatch.setattr(shutil, "which", lambda tool: "/bin/false")
    assert look_at_gpus() == Accelerators(("NVIDIA GPU",))


def test_this_machine_can_be_looked_at():
    machine = Machine.look()
    assert machine.free_memory > 0
    assert machine.now > machine.newest_file
