"""`rapid plan`, as it is typed and as it is shown."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rapid.checkpoints.files import checkpoint_source, load_tokenizer
from rapid.planning.known_models import KNOWN_SHAPES, KNOWN_VOCABULARIES
from tests.deployments.cli.command import rapid
from tests.rapid.tiny_stored import publish

ROOT = Path(__file__).parents[4]


def columns(shown: str, name: str) -> list[list[str]]:
    """The cells of a row of the speeds, as limited and as likely, in words."""
    (line,) = [line for line in shown.splitlines() if line.startswith(name)]
    words = line.removeprefix(name).split()
    return [words[: len(words) // 2], words[len(words) // 2 :]]


def limit_of(shown: str, name: str) -> str:
    return columns(shown, name)[0][0]


def likely_of(shown: str, name: str) -> str:
    return columns(shown, name)[1][0]


def memory_of(shown: str) -> list[str]:
    """The numbers of each column of the memory table."""
    lines = shown.splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("GPUs"))
    rows = [re.split(r"  +", line.strip()) for line in lines[first : first + 9]]
    return [" ".join(cells) for cells in zip(*(row[1:] for row in rows), strict=True)]


STEP, DRAFTED = "plain: ms a step", "drafted token on {} GPUs, ms"


class TestPlan:
    """Numbers are checked in `tests/rapid/planning/test_plan.py`; here is what becomes of them."""

    EIGHT = ("--target", "llama-3.1-8b", "--gpu", "h200", "--context", "131072")

    def test_the_issue_s_command_without_torch(self):
        options = [*self.EIGHT, "--drafter", "llama-3.1-70b", "--batch", "6"]
        code = (
            "import sys; from typer.testing import CliRunner; from deployments.cli import app;"
            f"done = CliRunner().invoke(app, ['plan', *{options}]);"
            "sys.exit(str(done.exit_code or [m for m in ('torch', 'ray') if m in sys.modules]))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stderr.strip() == "[]"

    def test_it_says_what_fits_how_fast_and_for_how_much(self):
        shown = rapid("plan", *self.EIGHT, "--drafter", "llama-3.2-1b", "--batch", "6").stdout
        assert columns(shown, STEP) == [["24.9"], ["35.8"]]
        assert columns(shown, "plain: tokens/s") == [["241"], ["167"]]
        assert columns(shown, "plain: GPU-s/1M") == [["4,155"], ["5,974"]]
        assert columns(shown, "prefill of one context, s") == [["12.8"], ["16.6"]]
        assert memory_of(shown)[0] == "1 16.00 15.0 96.0 3.1 114.1 118.2 yes 6"
        assert columns(shown, "draft ahead: speedup") == [["2.93", "at", "8"], ["2.57", "at", "7"]]
        told = "At batch 6 this drafter likely makes decoding 2.57 times as fast as plain."
        assert shown.splitlines()[-1] == told

    def test_a_narrow_terminal_holds_the_tables(self, monkeypatch):
        monkeypatch.setenv("COLUMNS", "60")
        shown = rapid("plan", *self.EIGHT, "--drafter", "llama-3.1-70b", "--batch", "6").stdout
        assert "…" not in shown

    def test_programs_get_the_same_numbers_as_json(self):
        options = (*self.EIGHT, "--drafter", "llama-3.2-1b", "--batch", "6", "--json")
        told = json.loads(rapid("plan", *options).stdout)
        assert round(1e3 * told["limit"]["plain_step_s"], 1) == 24.9
        assert round(told["likely"]["plain_tokens_per_s"]) == 167
        target = told["memory_bytes"]["target"]
        assert (round(target["needed"] / 2**30, 1), target["fits"]) == (114.1, True)
        assert {"sequential", "draft_ahead"} <= told["likely"].keys()
        itself = (*self.EIGHT, "--drafter", "llama-3.1-8b", "--drafter-gpus", "0", "--json")
        shared = json.loads(rapid("plan", *itself).stdout)
        assert shared["memory_bytes"].keys() == {"both"}
        assert "draft_ahead" not in shared["likely"]

    def test_a_drafter_gets_the_fewest_gpus_that_hold_it_and_is_faster_on_more(self):
        options = ("plan", *self.EIGHT, "--drafter", "llama-3.1-70b")
        fewest, eight = rapid(*options).stdout, rapid(*options, "--drafter-gpus", "8").stdout

        assert limit_of(fewest, DRAFTED.format(2)) == "16.3"
        assert limit_of(eight, DRAFTED.format(8)) == "5.3"

    def test_every_known_model_has_a_known_vocabulary(self):
        assert KNOWN_VOCABULARIES.keys() == KNOWN_SHAPES.keys()

    def test_where_its_acceptance_comes_from(self):
        options = (*self.EIGHT, "--drafter", "llama-3.2-1b")
        assert "Acceptance 0.77 is what arXiv 2502.20330 reports" in rapid("plan", *options).stderr
        given = rapid("plan", *options, "--acceptance", "0.9")
        assert "acceptance 0.9" in given.stdout
        assert "Acceptance" not in given.stderr

    @pytest.mark.parametrize(
        ("target", "drafter", "how"),
        [
            (
                "qwen3-30b-a3b",
                "llama-3.2-1b",
                "that of qwen3-30b-a3b (Qwen3's) has 151,936 tokens, that of llama-3.2-1b "
                "(Llama 3's) 128,256",
            ),
            (
                "llama-3.1-8b",
                "embedded:drafter",
                "that of llama-3.1-8b (Llama 3's) has 128,256 tokens, that of embedded:drafter "
                "1,024",
            ),
            ("embedded:target", "{other}", "only the drafter has the token '<extra>' (id 1024)"),
        ],
    )
    def test_a_pair_that_the_server_refuses_is_refused_in_its_words(
        self, target, drafter, how, tmp_path
    ):
        other = tmp_path / "other"
        shutil.copytree(checkpoint_source("embedded:drafter"), other)
        tokenizer = load_tokenizer(str(other))
        tokenizer.add_tokens(["<extra>"])
        tokenizer.save_pretrained(other)
        pair = ("--target", target, "--drafter", drafter.format(other=other))
        result = rapid("plan", *pair, "--gpu", "h200", "--context", "4096")
        assert result.exit_code == 2
        assert (
            f"target and drafter have different vocabularies: {how}; choose a drafter of the "
            "target's family" in result.stderr
        )

    @pytest.mark.parametrize(
        ("target", "drafter"),
        [("embedded:target", "embedded:drafter"), ("qwen2.5-72b", "qwen2.5-7b")],
    )
    def test_a_pair_of_one_vocabulary_is_planned(self, target, drafter):
        pair = ("--target", target, "--drafter", drafter, "--target-gpus", "2")
        result = rapid("plan", *pair, "--gpu", "h200", "--context", "2048")
        assert result.exit_code == 0, result.stderr

    def test_what_does_not_fit_is_told_what_would(self):
        result = rapid("plan", *self.EIGHT, "--drafter", "llama-3.2-1b", "--batch", "7")
        assert result.exit_code == 1
        assert "7 sequences need 130.2 GiB of 118.2 usable; try --batch 6 or" in result.stderr
        assert "--target-gpus 2" in result.stderr

    def test_a_drafter_that_does_not_fit(self):
        options = (*self.EIGHT, "--drafter", "llama-3.1-70b", "--drafter-gpus", "1")
        result = rapid("plan", *options)
        assert result.exit_code == 1
        assert "the drafter does not fit 1 h200" in result.stderr
        assert "--drafter-gpus 2" in result.stderr
        assert "--drafter-bits 8" in result.stderr
        assert rapid("plan", *options, "--drafter-bits", "8").exit_code == 0

    def test_over_two_machines_sums_take_longer_and_what_is_assumed_of_them_is_said(self):
        options = ("plan", *self.EIGHT, "--drafter", "llama-3.1-70b", "--drafter-gpus", "8")
        one, two = rapid(*options), rapid(*options, "--machine-gpus", "4")

        for draft_ms, sum_ms in ((limit_of, 0.009), (likely_of, 0.014)):
            more_ms = 162 * (0.030 - sum_ms)  # sums of a step of 80 layers
            on_one, on_two = (float(draft_ms(x.stdout, DRAFTED.format(8))) for x in (one, two))
            assert on_two == pytest.approx(on_one + more_ms, abs=0.15)
        assert "30 µs and 400 Gb/s" in two.stderr
        assert "µs" not in one.stderr

    @pytest.mark.parametrize(
        ("options", "told"),
        [
            (("--drafter-gpus", "24"), "64 attention heads, which 24 GPUs do not divide"),
            (("--drafter-gpus", "12"), "those of 2 machines, each with 8: plan a multiple"),
            (
                ("--drafter-gpus", "8", "--machine-gpus", "4", "--drafter-bits", "6"),
                "split by layers within one: lower --drafter-gpus to 4",
            ),
        ],
    )
    def test_what_cannot_be_spread_over_machines_is_refused(self, options, told):
        result = rapid("plan", *self.EIGHT, "--drafter", "llama-3.1-70b", *options)
        assert result.exit_code == 2
        assert told in result.stderr

    @pytest.mark.parametrize(
        ("options", "rows"),
        [
            (("--drafter-gpus", "4"), "7392 rows"),
            (("--drafter-gpus", "8"), "3696 rows"),
            (("--drafter-gpus", "0", "--target-gpus", "4"), "7392 rows"),
        ],
    )
    def test_four_bits_that_the_engine_would_refuse(self, options, rows):
        models = ("--target", "qwen2.5-7b", "--drafter", "qwen2.5-72b", "--drafter-bits", "4")
        pair = ("plan", *models, "--gpu", "h200", "--context", "131072")
        result = rapid(*pair, *options)
        assert result.exit_code == 2
        told = f"the drafter has {rows} of the MLP on each GPU, and quantization: int4 packs 64"
        assert told in result.stderr
        assert rapid(*pair, "--drafter-gpus", "2").exit_code == 0

    def test_a_published_checkpoint_has_the_bits_that_it_is_stored_in(self, tmp_path):
        engine, plain = publish(tmp_path, "awq")
        options = ("--gpu", "h200", "--context", "256", "--drafter-context", "64")
        result = rapid(
            "plan", "--target", engine.model, "--drafter", engine.model, "--drafter-gpus", "0",
            *options,
        )  # fmt: skip
        assert result.exit_code == 0, result.stderr
        said = " ".join(result.stdout.split())
        assert "stored is stored quantized: awq, 4 bits in groups of 128" in said
        more = ("--target", engine.model, "--drafter", plain.model, "--target-bits", "8")
        result = rapid("plan", *more, *options)
        assert result.exit_code == 2
        assert "leave --target-bits out" in result.stderr

    def test_nor_are_they_what_a_plan_advises(self):
        options = ("--target", "qwen2.5-72b", "--gpu", "a100-80gb", "--context", "131072")
        result = rapid(
            "plan", *options, "--drafter", "qwen2.5-7b", "--target-gpus", "4", "--batch", "5"
        )
        assert result.exit_code == 1
        assert "--target-gpus 8" in result.stderr
        assert "--target-bits 4" not in result.stderr

    def test_a_target_that_drafts_itself_has_its_weights_once(self):
        own = (*self.EIGHT, "--drafter", "llama-3.1-8b", "--drafter-gpus", "0", "--batch", "6")
        shown = rapid("plan", *own).stdout
        assert memory_of(shown) == ["1 16.67 15.0 100.0 3.1 118.1 118.2 yes 6"]
        assert "draft ahead" not in shown
        other = (*self.EIGHT, "--drafter", "llama-3.2-1b", "--drafter-gpus", "0", "--batch", "6")
        result = rapid("plan", *other)
        assert result.exit_code == 1
        assert "lower --batch to 5" in result.stderr

    def test_a_price_turns_gpu_seconds_into_money(self):
        options = (*self.EIGHT, "--drafter", "llama-3.2-1b", "--batch", "6", "--gpu-hour", "3.6")
        assert limit_of(rapid("plan", *options).stdout, "plain: price/1M") == "4.16"

    def test_the_schedule_s_settings_are_counted(self):
        options = (*self.EIGHT, "--drafter", "llama-3.2-1b", "--drafter-gpus", "1")

        def speedup(schedule: str, *more: str) -> list[float]:
            cells = columns(rapid("plan", *options, *more).stdout, f"{schedule}: speedup")
            return [float(cell[0]) for cell in cells]

        longer = speedup("sequential", "--extra-position")
        assert all(a > b for a, b in zip(longer, speedup("sequential"), strict=True))
        right = speedup("draft ahead", "--hits", "1")
        assert all(a > b for a, b in zip(right, speedup("draft ahead"), strict=True))

    def test_what_a_device_measured_replaces_what_is_estimated(self, tmp_path):
        options = ("plan", *self.EIGHT, "--drafter", "llama-3.2-1b")
        report = tmp_path / "gpu.json"
        report.write_text('{"losses": {"kv_share": 0.35, "round_s": 0.01}, "table": []}')
        before, after = rapid(*options), rapid(*options, "--measured", str(report))
        assert limit_of(after.stdout, STEP) == limit_of(before.stdout, STEP)
        assert likely_of(before.stdout, STEP) == "10.0"
        assert likely_of(after.stdout, STEP) == "15.1"  # 17.2 GB of keys at half the speed
        name = "sequential: speedup"
        assert likely_of(after.stdout, name) < likely_of(before.stdout, name)
        assert "as estimated for an H200" in before.stderr
        assert f"as in {report}" in after.stderr

    @pytest.mark.parametrize(
        "text", [None, "{", "[]", "{}", '{"losses": {"x": 1}}', '{"losses": {"kv_share": 0}}']
    )
    def test_a_report_that_cannot_be_used_is_named(self, text, tmp_path):
        report = tmp_path / "gpu.json"
        if text is not None:
            report.write_text(text)
        options = ("plan", *self.EIGHT, "--drafter", "llama-3.2-1b", "--measured", str(report))
        result = rapid(*options)
        assert result.exit_code == 2
        assert f"{report} is no report of benchmarks/gpu.py that this plan can use" in result.stderr

    def test_documents_in_common_and_keys_in_fp8_are_counted(self):
        options = ("plan", *self.EIGHT, "--drafter", "llama-3.2-1b", "--batch", "6")
        assert limit_of(rapid(*options, "--kv-bits", "8").stdout, STEP) == "14.2"
        assert limit_of(rapid(*options, "--shared", "131000").stdout, STEP) == "7.0"
        refused = rapid(*options, "--shared", "131072")
        assert refused.exit_code == 2
        assert "cannot have 131,072 in common: lower --shared" in refused.stderr

    @pytest.mark.parametrize(
        ("drafter", "gpus", "batch", "sentence"),
        [
            ("llama-3.1-70b", "4", "1", "costs speed and buys quality: at best 0.60 of plain"),
            ("llama-3.1-70b", "8", "1", "costs speed and buys quality: at best 0.78 of plain"),
            ("llama-3.1-8b", "0", "1", "this drafter likely costs speed: at best 0.89 of plain"),
            ("llama-3.1-70b", "4", "6", "likely makes decoding 1.33 times as fast as plain"),
        ],
    )
    def test_the_last_line_tells_what_a_drafter_likely_does(self, drafter, gpus, batch, sentence):
        options = ("--drafter", drafter, "--drafter-gpus", gpus, "--batch", batch)
        shown = rapid("plan", *self.EIGHT, *options).stdout
        assert sentence in shown.splitlines()[-1]

    def test_a_gpu_without_its_variant_is_the_usual_one(self):
        options = ("--target", "qwen3-8b", "--drafter", "qwen3-32b", "--context", "40960")
        result = rapid("plan", *options, "--gpu", "H100")
        assert result.exit_code == 0
        assert "H100 is taken as h100-sxm" in result.stderr
        assert "NVIDIA H100 SXM datasheet" in result.stdout

    def test_a_checkpoint_directory_is_read(self):
        from rapid.embedded import DRAFTER

        options = ("--target", "embedded:target", "--gpu", "h200", "--context", "2048")
        assert rapid("plan", *options, "--drafter", str(DRAFTER)).exit_code == 0

    @pytest.mark.parametrize(
        ("option", "value", "sentence"),
        [
            ("--gpu", "tpu", "take one of a100-40gb, a100-80gb, h100-sxm"),
            ("--gpu", "h20", "did you mean h200"),
            ("--drafter", "qwen3-7b", "did you mean qwen3-1.7b"),
            ("--drafter", "gpt-5", "take one of llama-3.2-1b, llama-3.1-8b"),
            ("--drafter", str(ROOT / "docs"), "holds no config.json"),
        ],
    )
    def test_a_name_that_is_not_known(self, option, value, sentence):
        result = rapid("plan", *self.EIGHT, "--drafter", "llama-3.2-1b", option, value)
        assert (result.exit_code, result.stdout) == (2, "")
        assert sentence in result.stderr
