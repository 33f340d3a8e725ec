"""The commands ``rapid documents ...``, for the files that a server keeps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from deployments.cli.server.server_client import KeyOption, Url, call, connect
from deployments.cli.terminal import (
    DEFAULT_URL,
    USAGE,
    AsJson,
    Waiting,
    fail,
    note,
    out,
    print_json,
)

if TYPE_CHECKING:
    import httpx

_LOOK_S = 0.3  # between two looks at a file that is being read
_UPLOAD_TIMEOUT_S = 600.0  # for 512 MB at a megabyte a second

FileIds = Annotated[list[str], typer.Argument(metavar="ID...", show_default=False)]

documents = typer.Typer(
    no_args_is_help=True, help="Keep files on the server, and ask about them by their ids."
)


@documents.command(epilog="Example: rapid documents add report.pdf contracts/ --prefill")
def add(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", exists=True, readable=True)],
    prefill: Annotated[
        bool, typer.Option("--prefill", help="Have the target read them before the first question.")
    ] = False,
    url: Url = DEFAULT_URL,
    api_key: KeyOption = None,
    as_json: AsJson = False,
) -> None:
    """Upload files (text, Markdown, HTML, PDF, DOCX), wait until they are read, print their ids.

    Of a folder all files of these kinds are uploaded. Then ask: rapid ask --file ID 'What is ...?'
    A file may be longer than what the server takes in a question, which is said: it can be
    searched, but not asked about.
    """
    from library.parsing.local_files import find_files, show_path

    paths, problems = find_files(files)
    failed = bool(problems)
    read: list[Mapping[str, Any]] = []
    for problem in problems:
        note(problem)
    if not paths:
        fail(f"{', '.join(map(show_path, files))}: there is no file that can be read", USAGE)
    with connect(url, api_key) as client:
        for path in paths:
            file = _upload(client, path, prefills=prefill)
            if as_json:
                print_json(file)
            if file["status"] == "error":
                failed = True
                note(f"{path.name}: {file['status_details']}")
            elif not as_json:
                typer.echo(f"{file['id']}  {path.name}: {_size(file)}")
            read.append(file)
        _warn_of_length(client, read)
    if failed:
        raise typer.Exit(1)


@documents.command("list", epilog="Example: rapid documents list --json")
def list_documents(
    url: Url = DEFAULT_URL, api_key: KeyOption = None, as_json: AsJson = False
) -> None:
    """List the files, newest first."""
    with connect(url, api_key) as client:
        files = call(client, "GET", "/v1/files")["data"]
    if as_json:
        print_json(files)
        return
    if not files:
        note("no files: add some with 'rapid documents add FILE...'")
        return
    table = Table("id", "name", "state", "size", box=None, pad_edge=False)
    for file in files:
        table.add_row(file["id"], file["filename"], file["status"], _size(file))
    out.print(table)


@documents.command(epilog="Example: rapid documents show file-1a2b3c")
def show(
    file_ids: FileIds,
    url: Url = DEFAULT_URL,
    api_key: KeyOption = None,
    as_json: AsJson = False,
) -> None:
    """Show what is known of files; with --json, an object for each."""
    for _, file in _call_each("GET", file_ids, url, api_key, as_json=as_json):
        table = Table(show_header=False, box=None)
        for name, value in {**file, **file.pop("rapid", {})}.items():
            if value is not None and name not in ("object", "rapid"):
                table.add_row(name, str(value))
        out.print(table)


@documents.command(epilog="Example: rapid documents remove file-1a2b3c")
def remove(
    file_ids: FileIds,
    url: Url = DEFAULT_URL,
    api_key: KeyOption = None,
    as_json: AsJson = False,
) -> None:
    """Delete files and all that was made of them, and say where it was looked for."""
    for file_id, deleted in _call_each("DELETE", file_ids, url, api_key, as_json=as_json):
        certificate = deleted.get("rapid", {})
        table = Table("place", "bytes", "removed", "", box=None, pad_edge=False)
        for each in certificate.get("searched", ()):
            size, removed = f"{each['bytes']:,}", str(each["removed"])
            table.add_row(each["place"], size, removed, each.get("pending", ""))
        if table.row_count:
            out.print(table)
        is_gone = certificate.get("state") == "gone"
        left = "nothing is left of it" if is_gone else "ask again whether all of it is gone"
        note(f"{file_id} is deleted: {left}")


@documents.command(epilog="Example: rapid documents verify serve_config.yaml")
def verify(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="The server's configuration.")
    ] = Path("serve_config.yaml"),
    repair: Annotated[
        bool, typer.Option("--repair", help="Delete what is of no file, give work to somebody.")
    ] = False,
) -> None:
    """Check that files, their bytes and the work on them belong together, and nothing is orphaned.

    This looks at the library where the server keeps it, and for passages and KV of deleted texts in
    Qdrant and in folders of this machine; the server may run meanwhile. What --repair finds of them
    is forgotten again by the server, now or when it runs.
    Exit status 1 if something was found and not repaired.
    """
    from deployments.config.serve_file import front_of, read_applications
    from rapid.config_errors import read_yaml
    from rapid.errors import RapidError

    settings = read_yaml(config, "serve_config.yaml")
    # Models and memory are not looked at: those that run have them.
    applications = read_applications(settings, f"{config}: ")
    library = applications[front_of(settings)].library
    if library is None:
        fail(f"{config} has no library: there is nothing to verify")
    places = [place for each in applications.values() for place in _places(each)]
    try:
        findings = asyncio.run(_verify(library.kept, places, repairs=repair))
    except RapidError as error:
        fail(str(error))
    for each in findings:
        typer.echo(f"{each.kind}: {each.name}")
    note(f"{len(findings)} findings{', repaired' if repair and findings else ''}")
    if findings and not repair:
        raise typer.Exit(1)


async def _verify(config: Any, places: Sequence[Any], *, repairs: bool) -> Any:
    from library.library_access import Library
    from library.upkeep import verify

    library = await Library.open(config)
    try:
        return await verify(library, places, repairs=repairs)
    finally:
        await library.close()


def _places(config: Any) -> list[tuple[str, Any]]:
    """Return where parts of texts outlive the processes of an application, and how to find them."""
    from rapid.engines.kv.tiers.page_files import find_documents
    from retrieval.composing import find_texts

    def find_kv(folder: str) -> Any:
        return lambda texts: asyncio.to_thread(find_documents, Path(folder), texts)

    retrievers = [model.retriever for model in config.served if model.retriever]
    engines = [part.settings.engine for part in config.engine_parts.values()]
    folders = [getattr(engine, "disk_cache_folder", None) for engine in engines]
    return [
        *(("passages", partial(find_texts, each.settings.retrieval)) for each in retrievers),
        *(("KV", find_kv(each)) for each in folders if each),
    ]


def _upload(client: httpx.Client, path: Path, *, prefills: bool) -> Any:
    """Send a file, wait until it is read, and return what the server says of it."""
    waiting = Waiting(f"sending {path.name}")
    try:
        with path.open("rb") as content:
            form: dict[str, Any] = {"purpose": (None, "user_data"), "file": (path.name, content)}
            if prefills:
                form["prefill"] = (None, "true")
            file = call(client, "POST", "/v1/files", files=form, timeout=_UPLOAD_TIMEOUT_S)
        waiting.say(f"reading {path.name}")
        while file["status"] == "uploaded":
            time.sleep(_LOOK_S)
            file = call(client, "GET", f"/v1/files/{file['id']}")
        return file
    finally:
        waiting.stop()


def _warn_of_length(client: httpx.Client, files: Sequence[Mapping[str, Any]]) -> None:
    """Say of files that are too long for a question that they are."""
    cards = call(client, "GET", "/v1/models")["data"]
    most = max((card.get("rapid", {}).get("max_characters", 0) for card in cards), default=0)
    for file in files:
        size = file["rapid"]["characters"] or 0
        if size > most > 0:
            note(
                f"{file['filename']} is kept and can be searched, but not asked about: it has "
                f"{size:,} characters, and this server takes {most:,} in a question. Split it, or "
                "raise api.max_characters in the server's configuration"
            )


def _call_each(
    method: str, file_ids: Sequence[str], url: str, api_key: str | None, *, as_json: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each file's id with what the server answers, unless that is printed as JSON."""
    with connect(url, api_key) as client:
        for file_id in file_ids:
            answer = call(client, method, f"/v1/files/{file_id}")
            if as_json:
                print_json(answer)
            else:
                yield file_id, answer


def _size(file: dict[str, Any]) -> str:
    """Return the length of a file as its reader thinks of it."""
    characters, pages = file["rapid"]["characters"], file["rapid"]["pages"]
    if characters is None:
        return f"{file['bytes']:,} bytes"
    return f"{pages:,} pages, {characters:,} characters" if pages else f"{characters:,} characters"
