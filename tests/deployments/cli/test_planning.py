"""`rapid plan`, as it is typed and as it is shown."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rapid.checkpoints.files import checkpoint_source, load_tokenizer
from rapid.planning.shapes import KNOWN_SHAPES, KNOWN_VOCABULARIES
from tests.deployments.cli.command import rapid

ROOT = Path(__file__).parents[3]


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
        (plain,) = [line for line in shown.splitlines() if line.startswith("Plain: ")]
        assert plain.startswith("Plain: 24.9 ms a step, 241 tokens/s, 4,155 GPU-s")
        (target,) = [line.split() for line in shown.splitlines() if line.startswith("target ")]
        assert " ".join(target) == "target 1 16.00 15.0 96.0 3.2 114.1 118.2 yes 6"
        assert sum("draft ahead" in line for line in shown.splitlines()) == 1

    def test_a_drafter_gets_the_fewest_gpus_that_hold_it_and_is_faster_on_more(self):
        options = ("plan", *self.EIGHT, "--drafter", "llama-3.1-70b")
        fewest, eight = rapid(*options).stdout, rapid(*options, "--drafter-gpus", "8").stdout

        def draft_ms(shown: str, group: str) -> str:
            lines = [line.split() for line in shown.splitlines() if line.startswith(group)]
            return lines[0][3]

        assert draft_ms(fewest, "2 GPUs") == "16.3"
        assert draft_ms(eight, "8 GPUs") == "5.3"

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
                "that of qwen3-30b-a3b is Qwen3's, that of llama-3.2-1b Llama 3's",
            ),
            (
                "llama-3.1-8b",
                "embedded:drafter",
                "that of llama-3.1-8b has 128,256 tokens, that of embedded:drafter 1,024",
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
        assert result.exit_code == 1
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

        def draft_ms(shown: str) -> float:
            lines = [line.split() for line in shown.splitlines() if line.startswith("8 GPUs")]
            return float(lines[0][3])

        more_ms = 162 * (0.030 - 0.009)  # sums of a step of 80 layers
        assert draft_ms(two.stdout) == pytest.approx(draft_ms(one.stdout) + more_ms, abs=0.15)
        assert "30 µs and 400 Gb/s" in two.stderr
        assert "µs" not in one.stderr

    @pytest.mark.parametrize(
        ("options", "told"),
        [
            (("--drafter-gpus", "16"), "8 key and value heads, which 16 GPUs do not divide"),
            (("--drafter-gpus", "12"), "those of 2 machines, each with 8: plan a multiple"),
            (
                ("--drafter-gpus", "8", "--machine-gpus", "4", "--drafter-bits", "6"),
                "split by layers within one: lower --drafter-gpus to 4",
            ),
        ],
    )
    def test_what_cannot_be_spread_over_machines_is_refused(self, options, told):
        result = rapid("plan", *self.EIGHT, "--drafter", "llama-3.1-70b", *options)
        assert result.exit_code == 1
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
        assert result.exit_code == 1
        told = f"the drafter has {rows} of the MLP on each GPU, and quantization: int4 packs 64"
        assert told in result.stderr
        assert rapid(*pair, "--drafter-gpus", "2").exit_code == 0

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
        (both,) = [line.split() for line in shown.splitlines() if line.startswith("both ")]
        assert " ".join(both) == "both 1 16.67 15.0 100.0 3.2 118.1 118.2 yes 6"
        assert "draft ahead" not in shown
        other = (*self.EIGHT, "--drafter", "llama-3.2-1b", "--drafter-gpus", "0", "--batch", "6")
        result = rapid("plan", *other)
        assert result.exit_code == 1
        assert "lower --batch to 5" in result.stderr

    def test_a_price_turns_gpu_seconds_into_money(self):
        options = (*self.EIGHT, "--drafter", "llama-3.2-1b", "--batch", "6", "--gpu-hour", "3.6")
        assert "a price of 4.16" in rapid("plan", *options).stdout

    def test_slower_steps_and_rounds_are_counted(self):
        options = (*self.EIGHT, "--drafter", "llama-3.2-1b", "--drafter-gpus", "1")

        def speedups(*more: str) -> list[float]:
            lines = rapid("plan", *options, *more).stdout.splitlines()
            return [float(line.split()[-5]) for line in lines if line.startswith("1 GPU ")]

        assert max(speedups("--round-ms", "5")) < min(speedups())
        assert speedups("--extra-position")[0] > speedups()[0]
        assert speedups("--hits", "1")[1] > speedups()[1]
        half = rapid("plan", *options, "--bandwidth-share", "0.5").stdout
        assert "Plain: 13.6 ms" in half
        assert "Plain: 6.7 ms" in rapid("plan", *options, "--host-ms", "0").stdout

    def test_documents_in_common_and_keys_in_fp8_are_counted(self):
        options = ("plan", *self.EIGHT, "--drafter", "llama-3.2-1b", "--batch", "6")
        assert "Plain: 14.2 ms" in rapid(*options, "--kv-bits", "8").stdout
        assert "Plain: 7.0 ms" in rapid(*options, "--shared", "131000").stdout
        refused = rapid(*options, "--shared", "131072")
        assert refused.exit_code == 1
        assert "cannot have 131,072 in common: lower --shared" in refused.stderr

    @pytest.mark.parametrize(
        ("drafter", "gpus", "batch", "sentence"),
        [
            ("llama-3.1-70b", "4", "1", "costs speed and buys quality: at best 0.65 of plain"),
            ("llama-3.1-70b", "8", "1", "costs speed and buys quality: at best 0.91 of plain"),
            ("llama-3.1-8b", "0", "1", "this drafter costs speed: at best 0.9"),
            ("llama-3.1-70b", "4", "6", None),
        ],
    )
    def test_a_drafter_that_makes_decoding_slower_is_named(self, drafter, gpus, batch, sentence):
        options = ("--drafter", drafter, "--drafter-gpus", gpus, "--batch", batch)
        shown = rapid("plan", *self.EIGHT, *options).stdout
        assert (sentence in shown) if sentence else ("costs speed" not in shown)

    def test_a_checkpoint_directory_is_read(self):
        from rapid.embedded import DRAFTER

        options = ("--target", "embedded:target", "--gpu", "h200", "--context", "2048")
        assert rapid("plan", *options, "--drafter", str(DRAFTER)).exit_code == 0

    @pytest.mark.parametrize(
        ("option", "value", "sentence"),
        [
            ("--gpu", "tpu", "take one of a100-80gb, h100-sxm, h200"),
            ("--drafter", "gpt-5", "take one of llama-3.2-1b, llama-3.1-8b"),
            ("--drafter", str(ROOT / "docs"), "holds no config.json"),
        ],
    )
    def test_a_name_that_is_not_known(self, option, value, sentence):
        result = rapid("plan", *self.EIGHT, "--drafter", "llama-3.2-1b", option, value)
        assert (result.exit_code, result.stdout) == (1, "")
        assert sentence in result.stderr
