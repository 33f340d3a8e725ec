"""The command line, against a scripted server and a stand-in for Ray's ``serve``."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
import yaml
from typer.testing import CliRunner, Result

from deployments.api.ingress import Ingress
from deployments.cli import app
from deployments.cli.server_process import AlreadyRunning, ServerProcess, running_pid, stop_running
from deployments.config.serve_config import ApiConfig, ApiKey
from deployments.config.tenants import hash_key
from rapid.embedded.generator import generate_document
from rapid.errors import EngineFailed, Overloaded, PromptTooLong, TargetUnavailable
from rapid.messages import TextDelta
from tests.deployments.scripted import STARTED, ScriptedOrchestrator

ROOT = Path(__file__).parents[3]


def rapid(*arguments: str, **options: object) -> Result:
    return CliRunner().invoke(app, arguments, **options)  # type: ignore[arg-type]


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "notes.txt"
    path.write_text("One. Two.", encoding="utf-8")
    return path


class Server:
    """An ingress in a thread, until the test is over."""

    def __init__(self, orchestrator: ScriptedOrchestrator, **config: object) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        ingress = Ingress(orchestrator, ApiConfig(model="rapid-embedded", **config))  # type: ignore[arg-type]
        settings = uvicorn.Config(ingress, log_level="error", lifespan="off", ws="none")
        self.orchestrator = orchestrator
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._server = uvicorn.Server(settings)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]})
        self._thread.start()

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()


@pytest.fixture
def serve() -> Iterator[type[Server]]:
    servers: list[Server] = []

    def start(*script: object, **config: object) -> Server:
        servers.append(Server(ScriptedOrchestrator(*script), **config))  # type: ignore[arg-type]
        return servers[-1]

    yield start  # type: ignore[misc]
    for server in servers:
        server.close()


class TestHelp:
    def test_it_is_quick_and_loads_nothing_heavy(self):
        code = (
            "import sys; from deployments.cli import app;"
            "heavy = {'torch', 'transformers', 'ray', 'httpx', 'pydantic'} & sys.modules.keys();"
            "sys.exit(', '.join(heavy) or 0)"
        )
        began = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, b"")
        assert time.perf_counter() - began < 5  # a busy machine; alone it takes 0.3 s

    @pytest.mark.parametrize(
        "command",
        [[], ["ask"], ["sample-document"], ["serve"], ["stop"], ["check-config"], ["plan"]],
    )
    def test_every_command_explains_itself(self, command):
        result = rapid(*command, "--help")
        assert result.exit_code == 0
        assert "Usage" in result.output

    def test_it_says_what_the_embedded_models_understand(self):
        for command in ([], ["ask"], ["sample-document"]):
            assert "understand" in rapid(*command, "--help").output

    def test_version(self):
        assert rapid("--version").output.startswith("rapid-serve ")


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
        assert plain.startswith("Plain: 24.6 ms a step, 244 tokens/s, 4,100 GPU-s")
        (target,) = [line.split() for line in shown.splitlines() if line.startswith("target ")]
        assert " ".join(target) == "target 1 16.00 15.0 96.0 2.9 113.9 118.2 yes 6"
        assert sum("draft ahead" in line for line in shown.splitlines()) == 4  # 1, 2, 4, 8 GPUs

    def test_where_its_acceptance_comes_from(self):
        options = (*self.EIGHT, "--drafter", "llama-3.2-1b")
        assert "Acceptance 0.77 is what arXiv 2502.20330 reports" in rapid("plan", *options).stderr
        given = rapid("plan", *options, "--acceptance", "0.9")
        assert "acceptance 0.9" in given.stdout
        assert "Acceptance" not in given.stderr

    def test_what_does_not_fit_is_told_what_would(self):
        result = rapid("plan", *self.EIGHT, "--drafter", "llama-3.2-1b", "--batch", "7")
        assert result.exit_code == 1
        assert "7 sequences need 129.9 GiB of 118.2 usable; try --batch 6 or" in result.stderr
        assert "--target-gpus 2" in result.stderr

    def test_a_drafter_that_does_not_fit(self):
        options = (*self.EIGHT, "--drafter", "llama-3.1-70b", "--drafter-gpus", "1")
        result = rapid("plan", *options)
        assert result.exit_code == 1
        assert "the drafter does not fit 1 h200" in result.stderr
        assert "--drafter-gpus 2" in result.stderr
        assert "--drafter-bits 8" in result.stderr
        assert rapid("plan", *options, "--drafter-bits", "8").exit_code == 0

    def test_a_target_that_drafts_itself_has_its_weights_once(self):
        own = (*self.EIGHT, "--drafter", "llama-3.1-8b", "--drafter-gpus", "0", "--batch", "6")
        shown = rapid("plan", *own).stdout
        (both,) = [line.split() for line in shown.splitlines() if line.startswith("both ")]
        assert " ".join(both) == "both 1 16.67 15.0 100.0 2.9 117.9 118.2 yes 6"
        assert "draft ahead" not in shown
        other = (*self.EIGHT, "--drafter", "qwen2.5-7b", "--drafter-gpus", "0", "--batch", "6")
        result = rapid("plan", *other)
        assert result.exit_code == 1
        assert "lower --batch to 5" in result.stderr

    def test_a_price_turns_gpu_seconds_into_money(self):
        options = (*self.EIGHT, "--drafter", "llama-3.2-1b", "--batch", "6", "--gpu-hour", "3.6")
        assert "a price of 4.10" in rapid("plan", *options).stdout

    def test_slower_steps_and_rounds_are_counted(self):
        options = (*self.EIGHT, "--drafter", "llama-3.2-1b", "--drafter-gpus", "1")

        def speedups(*more: str) -> list[float]:
            lines = rapid("plan", *options, *more).stdout.splitlines()
            return [float(line.split()[-5]) for line in lines if line.startswith("1 GPU ")]

        assert max(speedups("--round-ms", "5")) < min(speedups())
        assert speedups("--extra-position")[0] > speedups()[0]
        assert speedups("--hits", "1")[1] > speedups()[1]
        half = rapid("plan", *options, "--bandwidth-share", "0.5").stdout
        assert "Plain: 13.4 ms" in half

    def test_a_checkpoint_directory_is_read(self):
        from rapid.embedded import DRAFTER

        options = (*self.EIGHT, "--drafter", str(DRAFTER))
        assert rapid("plan", *options).exit_code == 0

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


class TestAsk:
    def test_the_answer_streams_to_standard_output(self, serve, document):
        server = serve()
        result = rapid("ask", "-d", str(document), "Who?", "--url", server.url, "--seed", "3")
        assert (result.exit_code, result.stdout) == (0, "Hello, wörld!\n")
        assert "understands only" in result.stderr
        (request,) = server.orchestrator.requests
        assert request.messages[0].content == "Who?"
        assert [(d.name, d.text) for d in request.documents] == [("notes.txt", "One. Two.")]
        assert (request.seed, request.temperature) == (3, 0)

    def test_options_reach_the_server(self, serve):
        server = serve()
        options = "--mode lossless --eta 2 --transfer distill --max-draft 4 --retrieval-tokens 99"
        more = "--temperature 0.5 --top-p 0.9 --max-tokens 7"
        result = rapid("ask", "Who?", "--url", server.url, *options.split(), *more.split())
        assert result.exit_code == 0
        (request,) = server.orchestrator.requests
        asked = request.speculation
        assert (asked.mode, asked.eta, asked.transfer, asked.max_draft) == (
            "lossless",
            2.0,
            "distill",
            4,
        )
        assert (request.retrieval_tokens, request.max_tokens) == (99, 7)
        assert (request.temperature, request.top_p) == (0.5, 0.9)

    def test_stats(self, serve):
        shown = rapid("ask", "Who?", "--url", serve().url, "--stats").stdout
        for expected in ("fused", "6 of 9 tokens accepted (67%)", "notes [0:40]", "100 read"):
            assert expected in shown

    def test_files_of_one_name_are_told_apart(self, serve, tmp_path):
        paths = [tmp_path / folder / "a.txt" for folder in "xy"]
        for path in paths:
            path.parent.mkdir()
            path.write_text("text")
        server = serve()
        rapid("ask", "-d", str(paths[0]), "-d", str(paths[1]), "Who?", "--url", server.url)
        (request,) = server.orchestrator.requests
        assert [d.name for d in request.documents] == [str(path) for path in paths]

    def test_keys(self, serve, monkeypatch):
        server = serve(keys=(ApiKey(tenant="acme", sha256=hash_key("sk-1")),))
        refused = rapid("ask", "Who?", "--url", server.url)
        assert (refused.exit_code, "API key" in refused.stderr) == (1, True)
        monkeypatch.setenv("RAPID_API_KEY", "sk-1")
        assert rapid("ask", "Who?", "--url", server.url).exit_code == 0

    def test_no_server(self):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        result = rapid("ask", "Who?", "--url", f"http://127.0.0.1:{port}")
        assert result.exit_code == 1
        assert "make run" in result.stderr

    @pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", "http://x:port"])
    def test_no_url(self, url):
        result = rapid("ask", "Who?", "--url", url)
        assert result.exit_code == 1
        assert "is no URL" in result.stderr

    @pytest.mark.parametrize(
        ("script", "said"),
        [
            ((PromptTooLong("The prompt is 5 tokens too long."),), "5 tokens too long"),
            ((STARTED, TextDelta(0, "Hel"), EngineFailed("secret")), "The server made a mistake"),
            ((Overloaded("The pool is full."),), "The pool is full. Asking again may help."),
            (
                (STARTED, TextDelta(0, "Hel"), TargetUnavailable("The target was lost.")),
                "The target was lost. Asking again may help.",
            ),
        ],
    )
    def test_what_the_server_says_is_shown(self, serve, script, said):
        result = rapid("ask", "Who?", "--url", serve(*script).url)
        assert result.exit_code == 1
        assert said in " ".join(result.stderr.split())

    def test_bad_options_and_files(self, serve, tmp_path):
        url = serve().url
        assert "rapid.mode must be" in rapid("ask", "Who?", "--url", url, "--mode", "x").stderr
        assert "cannot be read" in rapid("ask", "-d", str(tmp_path / "no"), "Who?").stderr
        latin = tmp_path / "latin.txt"
        latin.write_bytes("é".encode("latin-1"))
        assert "no UTF-8" in rapid("ask", "-d", str(latin), "Who?").stderr


class TestSampleDocument:
    def test_files_and_what_to_type_next(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        result = rapid("sample-document", "--seed", "7", "--tokens", "300", "--out", "my sample")
        assert result.exit_code == 0
        expected = generate_document(7, 300)
        folder = tmp_path / "my sample"
        assert (folder / "document.txt").read_text(encoding="utf-8") == expected.text
        lines = (folder / "questions.jsonl").read_text(encoding="utf-8").splitlines()
        questions = [json.loads(line) for line in lines]
        assert questions[0] == {
            "question": expected.questions[0].question,
            "answer": expected.questions[0].answer,
        }
        assert len(questions) == len(expected.questions)
        typed = shlex.split(result.stdout)
        assert typed[1:] == ["ask", "--document", "my sample/document.txt", typed[-1]]
        assert typed[-1] == expected.questions[0].question

    def test_a_folder_that_cannot_be_made(self, tmp_path):
        (tmp_path / "file").touch()
        result = rapid("sample-document", "--out", str(tmp_path / "file" / "x"))
        assert result.exit_code == 1
        assert "cannot be written" in result.stderr


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


class TestCheckConfig:
    def test_the_default(self):
        result = rapid("check-config", str(ROOT / "serve_config.yaml"))
        assert result.exit_code == 0
        assert "is fine" in result.stdout

    def test_it_says_what_drafts(self, tmp_path):
        file = yaml.safe_load((ROOT / "serve_config.yaml").read_text(encoding="utf-8"))
        args = file["applications"][0]["args"]
        del args["retriever"]
        path = tmp_path / "config.yaml"
        for drafter, named in (("prompt_lookup", "prompt lookup"), ("target", "embedded:target")):
            args["drafter"] = drafter
            path.write_text(yaml.safe_dump(file), encoding="utf-8")
            assert f"{named} drafts" in rapid("check-config", str(path)).stdout.replace("\n", " ")

    def test_a_mistake_is_one_readable_message(self, tmp_path):
        text = (ROOT / "serve_config.yaml").read_text(encoding="utf-8")
        path = tmp_path / "config.yaml"
        path.write_text(text.replace("max_draft:", "max_drafts:"), encoding="utf-8")
        for command in ("check-config", "serve"):
            result = rapid(command, str(path))
            assert result.exit_code == 1
            assert "max_drafts" in result.stderr
            assert "Traceback" not in result.output


STAND_IN = """\
#!{python}
import http.server, signal, sys, threading, yaml
print("stand-in says: hello", flush=True)
config = yaml.safe_load(open(sys.argv[2]))
if "fails" in config:
    sys.exit(config["fails"])
if "gives_up" in config:
    print("rapid.errors.EngineFailed: No memory.", flush=True)
    print("(Controller pid=1) ERROR -- Failed to update the deployments ['Target'].", flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *args): pass
server = http.server.HTTPServer(("127.0.0.1", config["http_options"]["port"]), Handler)
try:
    server.serve_forever(poll_interval=0.05)
except KeyboardInterrupt:
    print("stand-in says: bye", flush=True)
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration for the stand-in, which takes the place of Ray's ``serve``."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "serve"
    script.write_text(STAND_IN.format(python=sys.executable))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr("deployments.cli.server_process.SERVE_COMMAND", script)
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    path = tmp_path / "config.yaml"
    path.write_text(f"http_options: {{port: {port}}}\n")
    return path


def wait(condition: object, timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.02)


class TestServerProcess:
    def test_life(self, config):
        server = ServerProcess.start(config)
        wait(server.is_ready)
        assert server.failure() is None
        assert running_pid() == os.getpid()
        with pytest.raises(AlreadyRunning, match="rapid stop"):
            ServerProcess.start(config)
        server.stop()
        assert "bye" in server.tail()  # it was interrupted, not killed
        server.forget()
        assert running_pid() is None

    def test_a_process_that_ends_says_why(self, config):
        config.write_text(config.read_text() + "fails: out of luck\n")
        server = ServerProcess.start(config)
        wait(server.has_ended)
        assert "out of luck" in server.tail()
        server.forget()

    def test_an_application_that_is_given_up_says_why(self, config):
        config.write_text(config.read_text() + "gives_up: true\n")
        server = ServerProcess.start(config)
        wait(server.failure)
        assert server.failure() == "No memory."
        server.stop()
        server.forget()

    def test_a_taken_port_is_said_at_once(self, config):
        port = int(config.read_text().split()[-1].rstrip("}"))
        with (
            socket.create_server(("127.0.0.1", port)),
            pytest.raises(AlreadyRunning, match="something else"),
        ):
            ServerProcess.start(config)

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_watched_until_it_is_told_to_stop(self, config, number):
        """`rapid serve` in a process of its own, whose shell has it ignore Ctrl-C."""
        code = (
            "import sys; from pathlib import Path; from types import SimpleNamespace as N;"
            "from deployments.cli import serving, server_process;"
            f"server_process.SERVE_COMMAND = {str(config.parent / 'bin' / 'serve')!r};"
            "engine = N(engine=N(model='a-model'));"
            "serving._checked = lambda path: N(target=engine, api=N(model='m'));"
            "serving.serve(Path('config.yaml'))"
        )
        served = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=config.parent,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        )
        assert served.stderr is not None
        lines = iter(served.stderr.readline, "")
        assert any("ready" in line for line in lines)
        assert running_pid() == served.pid
        if number == signal.SIGTERM:
            assert stop_running(served.pid, 20)
        else:
            served.send_signal(number)
        assert served.wait(20) == 0
        assert "bye" in (config.parent / ".run" / "serve.log").read_text()
        served.stderr.close()

    def test_nothing_to_stop(self, config):
        assert rapid("stop").exit_code == 0
