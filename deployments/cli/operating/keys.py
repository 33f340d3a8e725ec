"""The commands ``rapid hash-key`` and ``rapid keys``, for API keys.

The second go to the database of a configuration and not to its server: the first key of an
administrator has to come from somewhere, and who may read the configuration and write its database
is one. Elsewhere ``/v1/admin/keys`` does the same with such a key.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from deployments.cli.terminal import USAGE, AsJson, fail, note, out, print_json

if TYPE_CHECKING:
    from library.library_config import LibraryConfig
    from library.storage.database import Database

Result = TypeVar("Result")

_ACTOR = "rapid keys"  # in the audit log
_PAGE = 100  # keys of one look-up
_DAY_S = 86_400  # seconds of a day

app = typer.Typer(
    no_args_is_help=True, help="Make, list, revoke and rotate API keys in the library's database."
)
Config = Annotated[Path, typer.Option(help="The configuration that the server was started with.")]
KeyId = Annotated[str, typer.Argument(help="The id of a key.", show_default=False)]
_CONFIG = Path("serve_config.yaml")


def hash_key(
    new: Annotated[
        bool, typer.Option("--new", help="Make a new key; it is shown once, on standard error.")
    ] = False,
) -> None:
    """Read an API key and print its SHA-256, for api.keys in the configuration.

    The key comes from a hidden prompt, or from standard input when that is no terminal.
    """
    from library.accounts.callers import hash_key as hash_of
    from library.accounts.callers import make_key

    if new:
        key = make_key()
        note(f"key (keep it, it is stored nowhere): {key}")
    elif sys.stdin.isatty():
        key = typer.prompt("API key", hide_input=True, err=True)
    else:
        key = sys.stdin.readline()
    if not key.strip():
        fail("there is no key: type one, pipe one in, or let --new make one")
    typer.echo(hash_of(key.strip()))


@app.command("create", epilog="Example: rapid keys create acme --days 90")
def create(
    tenant: Annotated[str, typer.Argument(help="Whom the key identifies.", show_default=False)],
    name: Annotated[str, typer.Option(help="What lists show it as.")] = "",
    scope: Annotated[
        list[str] | None,
        typer.Option(help="ask, documents or admin; may be repeated. By default the first two."),
    ] = None,
    days: Annotated[int | None, typer.Option(min=1, help="How long it is taken.")] = None,
    config: Config = _CONFIG,
) -> None:
    """Make a key and print it, once: it is stored nowhere."""
    from library.accounts import api_keys
    from library.accounts.callers import SCOPES

    scopes = scope or ["ask", "documents"]
    if wrong := set(scopes) - set(SCOPES):
        say = f"--scope {min(wrong)}: there is no such scope, give one of {', '.join(SCOPES)}"
        fail(say, USAGE)
    if not (0 < len(tenant) <= 128 and tenant.isprintable() and name.isprintable()):
        fail(
            "a tenant's name has 1 to 128 printable characters, and a key's is printable, too",
            USAGE,
        )
    expires_at = None if days is None else int(time.time()) + days * _DAY_S
    row, key = _with_database(
        config,
        lambda it: api_keys.create_key(it, tenant, name[:512], scopes, expires_at, actor=_ACTOR),
    )
    note(f"{row.id} is a key of {tenant} for {row.scopes}; keep it, it is stored nowhere:")
    typer.echo(key)


@app.command("list", epilog="Example: rapid keys list --tenant acme --json")
def list_all(
    tenant: Annotated[str | None, typer.Option(help="The keys of one tenant.")] = None,
    config: Config = _CONFIG,
    as_json: AsJson = False,
) -> None:
    """List keys, the latest first."""
    from rich.table import Table

    from library.accounts import api_keys
    from library.storage.schema import KeyRow

    async def read(database: Database) -> list[KeyRow]:
        rows: list[KeyRow] = []
        while True:
            after = rows[-1].id if rows else None
            page = await api_keys.list_keys(database, tenant, after, _PAGE)
            rows += page
            if len(page) < _PAGE:
                return rows

    rows = _with_database(config, read)
    if as_json:
        names = ("id", "tenant", "name", "created", "expires_at", "revoked_at")
        print_json(
            [
                {name: getattr(row, name) for name in names} | {"scopes": row.scopes.split()}
                for row in rows
            ]
        )
        return
    if not rows:
        note("no keys in the library: make one with 'rapid keys create TENANT'")
        return
    table = Table("id", "tenant", "name", "scopes", "state", box=None, pad_edge=False)
    for row in rows:
        state = "taken"
        if row.revoked_at is not None:
            state = f"revoked {_day(row.revoked_at)}"
        elif row.expires_at is not None:
            state = f"expire{'d' if row.expires_at <= time.time() else 's'} {_day(row.expires_at)}"
        table.add_row(row.id, row.tenant, row.name, row.scopes, state)
    out.print(table)


@app.command("revoke", epilog="Example: rapid keys revoke key_1a2b3c")
def revoke(key_id: KeyId, config: Config = _CONFIG) -> None:
    """Have a key taken no more, from the next request on."""
    from library.accounts import api_keys

    _with_database(config, lambda it: api_keys.revoke_key(it, key_id, actor=_ACTOR))
    note(f"{key_id} is not taken any more")


@app.command("rotate", epilog="Example: rapid keys rotate key_1a2b3c --grace 3600")
def rotate(
    key_id: KeyId,
    grace: Annotated[int, typer.Option(min=0, help="Seconds that the old one is taken.")] = 0,
    config: Config = _CONFIG,
) -> None:
    """Make a key like another one, whose time ends, and print it."""
    from library.accounts import api_keys

    row, key = _with_database(
        config, lambda it: api_keys.rotate_key(it, key_id, grace, actor=_ACTOR)
    )
    note(f"{row.id} takes the place of {key_id}; keep it, it is stored nowhere:")
    typer.echo(key)


def _with_database(config: Path, act: Callable[[Database], Awaitable[Result]]) -> Result:
    """Do something with the database of a configuration."""
    from library.storage.database import Database
    from rapid.errors import RapidError

    settings = _library_of(config)

    async def run() -> Result:
        database = (
            Database(settings.database)
            if settings.database is not None
            else Database.in_folder(settings.folder)
        )
        try:
            await database.migrate()
            return await act(database)
        finally:
            await database.close()

    try:
        return asyncio.run(run())
    except RapidError as error:
        fail(str(error))


def _library_of(path: Path) -> LibraryConfig:
    """Return where a configuration keeps its library."""
    from deployments.config.named_models import read_application
    from deployments.config.serve_file import applications_of, front_of, name_of
    from rapid.config_errors import read_yaml

    if not path.exists():
        fail(f"there is no {path}: name the configuration of the server with --config", USAGE)
    settings = read_yaml(path, "serve_config.yaml")
    front = front_of(settings)
    (application,) = (each for each in applications_of(settings) if name_of(each) == front)
    config = read_application(application.get("args") or {}, f"{path}: ")
    if config.library is None:
        fail(f"{path} has no library, which keeps the keys: write 'library: {{}}' under its args")
    return config.library


def _day(seconds: int) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(seconds))
