"""The commands ``rapid serve``, ``apply``, ``stop`` and ``check-config``, around Ray Serve.

The file is checked first, Ray and readiness are watched, and Ctrl-C, SIGTERM and ``rapid stop`` all
end the server the same way.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from deployments.cli.terminal import DEFAULT_URL, USAGE, err, fail, note, rapid_command
from deployments.config.tenants import is_loopback

if TYPE_CHECKING:
    from deployments.cli.doctor.check_result import CheckResult
    from deployments.cli.server.server_process import ServerProcess
    from deployments.cli.server.stages import Stages
    from deployments.config.plans import Effect
    from deployments.config.serve_config import ApplicationConfig
    from rapid.vllm_config import AnyEngineConfig

_STOP_TIMEOUT_S = 90.0  # for a server to finish after `rapid stop`
_RAY_STARTS = 3  # Ray gives itself 30 s each time
_UNDER_WAY = ("NOT_STARTED", "DEPLOYING")
_EFFECTS = {
    "live": "takes new settings, no replica is replaced",
    "rolls": "replaces its replicas, new ones first where there is room",
    "starts": "starts",
    "ends": "ends",
}

Config = Annotated[Path, typer.Argument(help="A Ray Serve configuration file.")]


def check_config(config: Config = Path("serve_config.yaml")) -> None:
    """Check a configuration without starting it: keys, ranges, checkpoints and bind address."""
    checked = _check(config)
    keys = f"{len(checked.api.keys) or 'no'} API keys"
    if not checked.api.lists_its_keys:
        keys += " in it, and those that it points to"
    answers = []
    for model in checked.served:
        own_drafting = model.config.own_drafting
        drafter = own_drafting.name if own_drafting else _tell(model.config.drafter_pool.engine)
        target = _tell(model.target.settings.engine)
        answers.append(f"{target} answers as {model.name!r}, {drafter} drafts")
    typer.echo(f"{config} is fine: {'; '.join(answers)}, {keys}")


def _tell(engine: AnyEngineConfig) -> str:
    """Return an engine's model, with how it is stored where that is quantized, or who runs it."""
    from rapid.checkpoints.facts import read_model_facts
    from rapid.vllm_config import VllmConfig

    if isinstance(engine, VllmConfig):
        return f"{engine.model} ({engine.kind})"
    stored = read_model_facts(engine).stored
    return engine.model if stored is None else f"{engine.model} ({stored})"


def serve(
    config: Config = Path("serve_config.yaml"),
    metrics_port: Annotated[
        int | None,
        typer.Option(
            envvar="RAPID_METRICS_PORT",
            help="Where Prometheus finds the metrics; by default a free port, which is told.",
            min=1,
            max=65535,
        ),
    ] = None,
    fallback: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="What is served instead where this machine lacks what CONFIG needs, such as "
            "models that have not been fetched.",
        ),
    ] = None,
) -> None:
    """Start the application of a configuration and run it until Ctrl-C or 'rapid stop'.

    The exit status is 1 when the server ends by itself, or its Ray is lost.
    """
    from deployments.cli.addresses import joins_cluster
    from deployments.cli.server.server_process import CannotStart, ServerProcess
    from deployments.cli.server.stages import Stages

    began = time.monotonic()
    if metrics_port is not None and joins_cluster():
        fail(
            "--metrics-port is for a Ray that is started here: the one of RAY_ADDRESS has its "
            "own, which `ray start --metrics-export-port` sets"
        )
    config, checked, lacking = _examine(config, fallback)
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    if lacking:
        note(lacking)
    try:
        server = ServerProcess.start(config, metrics_port)
    except CannotStart as error:
        fail(str(error))
    try:
        with err.status(f"starting {config}") as status:
            _wait_until_ready(server, stopping, Stages(status, config, server.log_path))
        if not stopping.is_set():
            _say_what_next(server, checked, time.monotonic() - began)
        _watch(server, stopping)
    finally:
        with err.status("stopping"):
            server.stop()
        server.forget()
    note("stopped")


def apply(
    config: Config = Path("serve_config.yaml"),
    address: Annotated[
        str | None,
        typer.Option(
            envvar="RAY_DASHBOARD_ADDRESS",
            help="The address of Ray's dashboard; by default that of this folder's server.",
        ),
    ] = None,
) -> None:
    """Bring a running application to the state of its edited file; replace only what must be."""
    from ray.dashboard.modules.serve.sdk import ServeSubmissionClient
    from ray.exceptions import AuthenticationError

    from deployments.cli.server.server_process import dashboard_address
    from deployments.config.applying import update
    from deployments.config.serve_file import check_applications
    from deployments.logs import with_system_logging
    from rapid.config_errors import read_yaml

    address = address or dashboard_address()
    if address is None:
        fail(
            "no server with a Ray of its own was started from this folder: give the address of "
            "the Ray's dashboard with --address, such as http://127.0.0.1:8265"
        )
    try:
        file = read_yaml(config, "serve_config.yaml")
        configs = check_applications(file, f"{config}: ")
        client = ServeSubmissionClient(address, headers=_token_for(address))
        details = client.get_serve_details()
        states = _states(details, configs)
        running = {name: each["deployed_app_config"] for name, each in states.items()}
        content: dict[str, Any] = file
        effects: dict[str, Effect] = {}
        if any(each["status"] == "DEPLOY_FAILED" for each in states.values()):
            note("the last change failed, so the whole file is applied")
        else:
            content, effects = update(file, configs, running)
    except AuthenticationError:
        fail(
            f"the Ray at {address} asks for a token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN "
            "or ~/.ray/auth_token to the cluster's"
        )
    except ConnectionError:
        fail(f"no Ray answers at {address}: give the address of its dashboard with --address")
    client.deploy_applications(with_system_logging(content))
    for deployment, effect in effects.items():
        note(f"{deployment}: {_EFFECTS[effect]}")
    for option in _list_kept(details, file):
        note(f"{option}: stays as it is until a restart")
    with err.status("waiting until it is done"):
        while True:
            states = _states(client.get_serve_details(), configs)
            if not any(each["status"] in _UNDER_WAY for each in states.values()):
                break
            time.sleep(0.2)
    for name, each in states.items():
        if each["status"] != "RUNNING":
            fail(f"the application {name} is {each['status']}: {each['message']}")
    note("done")


def _token_for(address: str) -> dict[str, str]:
    """Return the header with this user's token of Ray, for a Ray on this machine."""
    # A client of Ray sends it only where RAY_AUTH_MODE is set. Other machines do not get it.
    token = Path.home() / ".ray" / "auth_token"
    if not is_loopback(urlsplit(address).hostname or "") or not token.exists():
        return {}
    return {"authorization": f"Bearer {token.read_text(encoding='utf-8').strip()}"}


def _states(details: dict[str, Any], names: Iterable[str]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = details["applications"]
    return {name: found[name] for name in names if name in found}


def _list_kept(details: dict[str, Any], file: dict[str, Any]) -> list[str]:
    """Return the options of the file's proxies that a running Serve does not take from it."""

    def options(of: dict[str, Any]) -> dict[str, Any]:
        found = {
            f"http_options.{name}": each for name, each in (of.get("http_options") or {}).items()
        }
        return found | {"proxy_location": of.get("proxy_location")}

    running = options(details)
    return [
        name
        for name, value in options(file).items()
        if None not in (value, running.get(name)) and value != running[name]
    ]


def stop() -> None:
    """Stop the server that 'rapid serve' (or 'make run') started from this folder, and wait."""
    from deployments.cli.server.server_process import running_pid, stop_running

    pid = running_pid()
    if pid is None:
        note("nothing is running that was started from here")
        return
    with err.status("stopping"):
        has_ended = stop_running(pid, _STOP_TIMEOUT_S)
    if not has_ended:
        fail(f"process {pid} has not ended after {_STOP_TIMEOUT_S:.0f} s")
    note("stopped")


def _check(config: Path) -> ApplicationConfig:
    from deployments.config.serve_file import check

    return check(config)


def _examine(config: Path, fallback: Path | None) -> tuple[Path, ApplicationConfig, str]:
    """Return the file to serve, its settings, and why it is `fallback`; empty if it is not.

    No check of ``rapid doctor`` may find an error, and with a fallback there is memory for all
    processes. A file that is no configuration has no fallback.
    """
    from deployments.cli.doctor.checklist import examine

    diagnosis, lacking = examine(config), ""
    if fallback is not None and not diagnosis.subject.misreading:
        lacks = [*diagnosis.errors]
        lacks += [
            each for each in diagnosis.findings if (each.check, each.mark) == ("memory", "warning")
        ]
        if lacks:
            reason = "; ".join(map(_tell_finding, lacks))
            lacking = f"{fallback} is served in place of {config}: {reason}"
            lacking = lacking.replace("`rapid ", f"`{rapid_command()} ")
            config, diagnosis = fallback, examine(fallback)
    if diagnosis.errors:
        status = USAGE if diagnosis.subject.misreading else 1
        fail("\n".join([*filter(None, [lacking]), *map(_tell_finding, diagnosis.errors)]), status)
    return config, diagnosis.subject.configs[diagnosis.subject.front], lacking


def _tell_finding(found: CheckResult) -> str:
    return found.fact + f": {found.mend}" * bool(found.mend)


def _wait_until_ready(server: ServerProcess, stopping: threading.Event, stages: Stages) -> None:
    num_starts = 1
    while not stopping.wait(0.5):
        state = server.state()
        stages.show(state)
        if server.is_ready():
            return
        if problem := server.why_no_ray():
            if num_starts == _RAY_STARTS:
                fail(f"{problem} ({_RAY_STARTS} tries; see {server.log_path})")
            num_starts += 1
            note(f"{problem} It has 30 s, which a busy machine may exceed: try {num_starts}")
            server.start_again()
        elif server.has_ended():
            fail(f"the server did not start; the end of {server.log_path}:\n{server.tail()}")
        if reason := server.failure():
            fail(f"the application did not start (see {server.log_path}): {reason}")
        if state is not None:  # before that Ray itself finds out
            _check_ray(server)


def _watch(server: ServerProcess, stopping: threading.Event) -> None:
    """Wait until told to stop, and fail when the server has ended or can answer nobody."""
    from deployments.cli.server.vigil import Vigil

    vigil = Vigil()
    while not stopping.wait(0.5):
        if server.has_ended():
            fail(f"the server ended by itself; the end of {server.log_path}:\n{server.tail()}")
        _check_ray(server)
        if vigil.is_due and (problem := vigil.look(server.readiness())):
            fail(f"{problem}: see {server.log_path}")


def _check_ray(server: ServerProcess) -> None:
    if part := server.find_lost_part():
        fail(
            f"Ray is lost, as its {part} has died (killed for memory, perhaps), so nothing can be "
            f"answered: start again; Ray's output is in {server.log_path}"
        )


def _say_what_next(server: ServerProcess, config: ApplicationConfig, seconds: float) -> None:
    rapid = rapid_command()
    names = ", ".join(repr(model.name) for model in config.served)
    several = "s" * (len(config.served) > 1)
    err.print(
        f"[bold green]ready[/] after {seconds:.0f} s: {server.url}/v1, model{several} {names}",
        highlight=False,
    )
    if config.api.console:
        note(f"{server.url}/ asks about your own files in a browser.")
    note("In another shell:")
    if server.url != DEFAULT_URL:
        note(f"  export RAPID_URL={server.url}")
    for number, model in enumerate(config.served):
        if model.config.is_embedded:
            note(f"  {rapid} sample-document     # {model.name} understands such documents only")
        else:
            chosen = f" --model {model.name}" * bool(number)
            note(f'  {rapid} ask{chosen} --document FILE "question"     # a text of your own')
    if (state := server.state()) is not None and state.metrics:
        note(f"Metrics: {', '.join(state.metrics)}")
    note(f"Ctrl-C here or '{rapid} stop' ends it. Ray's output is in {server.log_path}.")
