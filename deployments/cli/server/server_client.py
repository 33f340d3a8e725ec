"""The connection of commands to a running server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from deployments.cli.terminal import DEFAULT_URL, USAGE, fail

if TYPE_CHECKING:
    import httpx

CONNECT_TIMEOUT_S = 5.0  # loopback answers at once, a far server within a second
SILENCE_TIMEOUT_S = 60.0  # beyond what the server says it may be silent; else it answers at once

# What the API says of a request's key, and what a person does about it.
_KEYS: Mapping[str, str] = {
    "You did not provide an API key": (
        "this server wants an API key: give it with --api-key, or set RAPID_API_KEY"
    ),
    "Incorrect API key": (
        "the server does not take this API key: check --api-key and RAPID_API_KEY, or ask its "
        "operator for another"
    ),
}

Url = Annotated[str, typer.Option(envvar="RAPID_URL", help="Where the server is.")]
KeyOption = Annotated[
    str | None, typer.Option("--api-key", envvar="RAPID_API_KEY", help="If the server wants one.")
]


def connect(url: str, api_key: str | None) -> httpx.Client:
    """Return a client of the server; a URL or key that cannot be one ends the command."""
    import httpx

    from deployments.config.tenants import is_loopback

    if api_key and not (api_key.isascii() and api_key.isprintable()):
        fail(
            "--api-key has characters that no key has: a key is one word of ASCII characters", USAGE
        )
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        base = httpx.URL(url.rstrip("/").removesuffix("/v1"))  # `rapid serve` prints it with /v1
    except httpx.InvalidURL as error:
        fail(f"--url {url} is no URL: {error}", USAGE)
    if base.scheme not in ("http", "https") or not base.host:
        fail(f"--url {url} is no URL: write it as {DEFAULT_URL}", USAGE)
    return httpx.Client(
        base_url=base,
        headers=headers,
        timeout=httpx.Timeout(SILENCE_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
        trust_env=not is_loopback(base.host),  # a proxy cannot reach this machine's loopback
    )


def call(client: httpx.Client, method: str, path: str, **options: Any) -> dict[str, Any]:
    """Return the body of an answer; a refusal or a lost connection ends the command."""
    import httpx

    try:
        response = client.request(method, path, **options)
    except httpx.HTTPError as error:
        give_up(client, error)
    if response.status_code != 200:
        refuse(response.status_code, response.content)
    return parse_body(response.content)


def give_up(client: httpx.Client, error: Exception) -> NoReturn:
    """End the command because of a connection's error."""
    import httpx

    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        from deployments.config.tenants import is_loopback

        if not is_loopback(client.base_url.host):
            fail(f"no server answers at {client.base_url} ({error}): check --url or RAPID_URL")
        if client.base_url.scheme == "https":
            fail(
                f"no server answers at {client.base_url}: Serve itself has no TLS, so write "
                "http:// unless a proxy of this machine has it"
            )
        from deployments.cli.server.server_process import running_pid

        if running_pid() is not None:
            fail(
                f"no server answers at {client.base_url}, and this folder's is running: it may "
                "still be starting, or be at another address; `rapid status` says which"
            )
        fail(
            f"no server answers at {client.base_url}: start one with `make run`, wait until "
            "it says that it is ready, then ask again, or give another --url"
        )
    fail(f"the server at {client.base_url} went silent ({type(error).__name__}): ask again")


def tell_of_key(message: str) -> str | None:
    """Return what to do about a refusal for want of a right key; None of another refusal."""
    return next((told for start, told in _KEYS.items() if message.startswith(start)), None)


def refuse(status: int, content: bytes) -> NoReturn:
    """End the command because of a refusal, in the server's words where it has some."""
    error = parse_body(content).get("error")
    if isinstance(error, dict) and error.get("message"):
        if told := tell_of_key(error["message"]):
            fail(told)
        again = " Asking again may help." if error.get("retryable") else ""
        fail(f"{error['message']}{again}")
    fail(f"the server answered {status}: is this a RAPID server, and has it finished starting?")


def parse_body(content: bytes) -> dict[str, Any]:
    """Return the object of a response's body; an empty one where it has none."""
    try:
        parsed = json.loads(content)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}
