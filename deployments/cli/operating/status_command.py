"""The command ``rapid status``: what a server does now, this folder's or another one."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from deployments.cli.server.server_client import KeyOption, connect, parse_body
from deployments.cli.terminal import fail, make_title_table, out

if TYPE_CHECKING:
    from deployments.cli.server.server_state import ServerState

_TIMEOUT_S = 5.0  # `/ready` answers from memory, within four seconds where nobody else is left
_UNITS = (("d", 86_400), ("h", 3_600), ("min", 60))  # seconds of each


@dataclass(frozen=True)
class ServerStatus:
    """The state of a server; what is not known is None or empty.

    Attributes:
        url: Where it is.
        ready: Whether a request would be answered.
        reason: Why not, if it would not.
        pools: The replicas of each pool by their state, and its engines' leases.
        waiting: Requests that wait in engines for a lease.
        metrics: The metrics URL of every node.
        process: The id of the process that ``rapid stop`` ends, of a server of this folder.
        uptime_s: Seconds for which that process has run.
        log: The file with the output of Ray, of a server of this folder.
        session: The folder of Ray's session, with the logs of all processes.
    """

    url: str
    ready: bool
    reason: str = ""
    pools: dict[str, dict[str, Any]] = field(default_factory=dict)
    waiting: int | None = None
    metrics: list[str] = field(default_factory=list)
    process: int | None = None
    uptime_s: float | None = None
    log: str = ""
    session: str = ""


def status(
    url: Annotated[
        str | None, typer.Option(help="Another server; by default that of this folder.")
    ] = None,
    api_key: KeyOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Print what runs from this folder: address, pools, queue, metrics and log.

    The exit status is 1 unless it is ready. A server with keys shows its replicas to an operator's
    key only.
    """
    found = _ask(url, api_key) if url is not None else _find_here(api_key)
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=2))
    else:
        _show(found)
    raise typer.Exit(0 if found.ready else 1)


def _find_here(api_key: str | None) -> ServerStatus:
    import psutil

    from deployments.cli.server.server_process import LOG, running_pid
    from deployments.cli.server.server_state import read_state

    pid = running_pid()
    if pid is None:
        fail(
            "nothing is running that was started from here: `rapid serve` starts a server, and "
            "--url names another"
        )
    own = {
        "process": pid,
        "uptime_s": round(time.time() - psutil.Process(pid).create_time(), 1),
        "log": str(LOG),
    }
    state = read_state()
    if state is None:
        return ServerStatus("", False, "Ray is starting", **own)
    own["session"] = state.session
    return _merge(_ask(state.url, api_key), state, own)


def _merge(asked: ServerStatus, state: ServerState, own: dict[str, Any]) -> ServerStatus:
    """Return what a server says, with what its process has written down where it does not say."""
    written = {name: {"status": each} for name, each in state.pools.items()}
    seen = {"pools": asked.pools or written, "metrics": asked.metrics or state.metrics}
    return ServerStatus(**asdict(asked) | seen | own)


def _ask(url: str, api_key: str | None) -> ServerStatus:
    import httpx

    with connect(url, api_key) as client:
        base = str(client.base_url).rstrip("/")
        try:
            answer = client.get("/ready", timeout=_TIMEOUT_S)
        except httpx.HTTPError as error:
            return ServerStatus(base, False, f"nothing answers there ({type(error).__name__})")
    told = parse_body(answer.content)
    if "ready" not in told:
        return ServerStatus(
            base, False, f"it answers {answer.status_code}: still starting, or no RAPID server"
        )
    pools = {name: dict(pool) for name, pool in told.get("pools", {}).items()}
    engines = told.get("engines", [])
    for engine in engines:
        pool = pools.setdefault(engine["pool"], {})
        for name in ("leases_open", "leases_waiting"):
            pool[name] = pool.get(name, 0) + engine.get(name, 0)
    waiting = sum(each.get("leases_waiting", 0) for each in engines) if "engines" in told else None
    return ServerStatus(
        base, told["ready"], told.get("reason", ""), pools, waiting, told.get("metrics", [])
    )


def _show(found: ServerStatus) -> None:
    table = make_title_table()
    state = "ready" if found.ready else f"not ready: {found.reason}"
    table.add_row("server", escape(f"{found.url}/v1 " if found.url else "") + escape(state))
    if found.uptime_s is not None:
        table.add_row("running", f"for {say_duration(found.uptime_s)}, process {found.process}")
    for name, pool in found.pools.items():
        table.add_row(escape(name), escape(describe_pool(pool)))
    if found.waiting is not None:
        table.add_row("queue", f"{found.waiting} requests wait for an engine")
    if found.metrics:
        table.add_row("metrics", escape(", ".join(found.metrics)))
    if found.log:
        table.add_row("log", escape(found.log) + "; those of a pool: rapid logs --pool target")
    out.print(table, highlight=False)


def describe_pool(pool: dict[str, Any]) -> str:
    """Return a pool's replicas and leases in words."""
    if "replicas" not in pool:
        return str(pool.get("status", ""))
    parts = [f"{pool['replicas']} replica{'s' * (pool['replicas'] != 1)}"]
    parts += [f"{pool[each]} {each}" for each in ("starting", "stopping") if pool.get(each)]
    if "leases_open" in pool:
        parts.append(f"{pool['leases_open']} leases open")
    if pool.get("leases_waiting"):
        parts.append(f"{pool['leases_waiting']} waiting")
    return ", ".join(parts)


def say_duration(seconds: float) -> str:
    """Return a duration in its two largest units."""
    parts: list[str] = []
    for unit, length in _UNITS:
        if seconds >= length or parts:
            parts.append(f"{int(seconds // length)} {unit}")
            seconds %= length
    return " ".join([*parts, f"{seconds:.0f} s"][:2])
