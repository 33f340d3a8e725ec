"""The command ``rapid ask``, which sends a question about documents to a running server."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.table import Table

from deployments.cli.citations import origin, passages
from deployments.cli.server_client import (
    CONNECT_TIMEOUT_S,
    SILENCE_TIMEOUT_S,
    KeyOption,
    Url,
    connect,
    give_up,
    parse_body,
    refuse,
)
from deployments.cli.terminal import DEFAULT_URL, Waiting, fail, make_title_table, note, out

if TYPE_CHECKING:
    import httpx

_FOREIGN = 0.2  # generated documents have no unknown words, other English 0.7
_SETTINGS = "seed coupling transfer eta max_draft plausibility draft_top_k transfer_temperature"

# Names of the HTTP API in messages, for which this command has options.
_OPTION = re.compile(r"\brapid\.(mode|eta|transfer|max_draft|retrieval_tokens)\b")
_LENGTH = re.compile(r"\bmax_(?:completion_)?tokens\b")
_DOCUMENT = re.compile(r"\brapid\.documents\[([0-9]+)\](?:\.text|\.name)?")

_PROGRESS = (": reading ", ": embedding ")

_Json = dict[str, Any]


def ask(
    question: Annotated[str, typer.Argument(help="What to ask.", show_default=False)],
    document: Annotated[
        list[Path] | None,
        typer.Option("--document", "-d", help="A text file (UTF-8); may be repeated."),
    ] = None,
    file: Annotated[
        list[str] | None,
        typer.Option("--file", metavar="ID", help="A file that the server keeps; may be repeated."),
    ] = None,
    url: Url = DEFAULT_URL,
    api_key: KeyOption = None,
    model: Annotated[
        str | None, typer.Option(help="By default the one that the server has.")
    ] = None,
    mode: Annotated[
        str | None, typer.Option(help="plain, lossless, fused, paper, rag or auto (the default).")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float | None, typer.Option(help="Nucleus mass kept.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed, the same answer.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer.")] = None,
    eta: Annotated[
        float | None, typer.Option(help="How far the drafter moves the target; fused, paper.")
    ] = None,
    transfer: Annotated[
        str | None, typer.Option(help="boost, distill, adaptive or mixture.")
    ] = None,
    max_draft: Annotated[int | None, typer.Option(help="Tokens drafted per round.")] = None,
    retrieval_tokens: Annotated[
        int | None, typer.Option(help="Tokens retrieved for the drafter.")
    ] = None,
    sources: Annotated[
        bool, typer.Option("--sources", help="Print the passages that were retrieved.")
    ] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Print under which contract, and how fast.")
    ] = False,
    receipt_file: Annotated[
        Path | None, typer.Option("--receipt", help="Write what 'rapid replay' needs to a file.")
    ] = None,
) -> None:
    """Ask a question about documents; the answer streams.

    A line on standard error says which lines of the documents it is from, or that nothing in them
    is about the question.

    The models of the default configuration understand only documents that 'rapid sample-document'
    has made. For text of your own, start the server with 'make run-text'.
    """
    if not question.strip():
        fail("the question is empty: write it in quotes")
    _check_writable(
        {
            "the question": question,
            "--url": url,
            "--model": model,
            "--mode": mode,
            "--transfer": transfer,
            "--temperature": temperature,
            "--top-p": top_p,
            "--eta": eta,
        }
    )
    documents = _read(document or [])
    rapid = {
        "mode": mode,
        "eta": eta,
        "transfer": transfer,
        "max_draft": max_draft,
        "retrieval_tokens": retrieval_tokens,
        "documents": documents,
        "file_ids": file,
        "progress": True,
        "explain": "tokens" if receipt_file else None,
    }
    body = {
        "messages": [{"role": "user", "content": question}],
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
        "max_completion_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "rapid": {key: value for key, value in rapid.items() if value is not None},
    }
    body = {key: value for key, value in body.items() if value is not None}
    with connect(url, api_key) as client:
        card = _card(client, model)
        is_embedded = card.get("rapid", {}).get("embedded", False)
        if is_embedded:
            _warn_of_foreign(documents or [{"name": "the question", "text": question}])
        names = [_name_of(client, each) for each in file or ()]
        silence_s = card.get("rapid", {}).get("silence_s", 0.0)
        body["model"] = card["id"]
        receipt, usage = _stream(client, body, silence_s)
    if receipt_file is not None:
        _write(receipt_file, body, receipt, is_embedded=is_embedded)
    documents = [*documents, *({"name": name, "text": ""} for name in names)]
    if (line := origin(receipt, documents)) is not None:
        note(line)
    for place, text in passages(receipt, documents) if sources else ():
        typer.echo(f"\n{place}:\n{text}")
    if stats:
        out.print(_table(receipt, usage))


def _check_writable(given: dict[str, str | float | None]) -> None:
    """Refuse what JSON cannot say: numbers that are not finite, and text that is not UTF-8."""
    for name, value in given.items():
        if isinstance(value, float) and not math.isfinite(value):
            fail(f"{name} must be a finite number, and it is {value}")
        if isinstance(value, str) and _show(value) != value:
            fail(f"{name} is no UTF-8 text: {_show(value)}")


def _show(text: str) -> str:
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _read(paths: list[Path]) -> list[_Json]:
    """Return the documents, named by file name, or by path where files share a name."""
    names = [path.name for path in paths]
    documents = []
    for path in paths:
        if _show(str(path)) != str(path):
            fail(f"the file name {_show(str(path))} is no UTF-8 text: rename the file")
        try:
            text = path.read_bytes().decode("utf-8")
        except OSError as error:
            fail(f"{path} cannot be read: {error.strerror}")
        except UnicodeDecodeError as error:
            fail(f"{path} is no UTF-8 text (byte {error.start}): convert it first")
        name = path.name if names.count(path.name) == 1 else str(path)
        documents.append({"name": name, "text": text})
    return documents


def _write(path: Path, body: _Json, receipt: _Json, *, is_embedded: bool) -> None:
    """Write the file that ``rapid replay`` reads; a server names no models but the embedded."""
    content: _Json = {"request": body, "receipt": receipt}
    if is_embedded:
        content["models"] = {"target": "embedded:target", "drafter": "embedded:drafter"}
    try:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        fail(f"{path} cannot be written: {error.strerror}")


def _warn_of_foreign(texts: list[_Json]) -> None:
    """Say of texts that the embedded models cannot understand that they cannot."""
    from rapid.embedded.wording import unknown_share

    shares = {text["name"]: unknown_share(text["text"]) for text in texts}
    name = max(shares, key=lambda each: shares[each])
    if shares[name] > _FOREIGN:
        note(
            "this server's models understand only documents that 'rapid sample-document' has made, "
            f"and {shares[name]:.0%} of the words of {name} are unknown to them: for English text "
            "of your own, start the server with 'make run-text'"
        )


def _name_of(client: httpx.Client, file_id: str) -> str:
    """Return the name of a file that the server keeps."""
    response = client.get(f"/v1/files/{file_id}")
    if response.status_code != 200:
        refuse(response.status_code, response.content)
    return str(response.json()["filename"])


def _card(client: httpx.Client, model: str | None) -> _Json:
    import httpx

    try:
        response = client.get("/v1/models")
    except httpx.HTTPError as error:
        give_up(client, error)
    if response.status_code != 200:
        _refuse(response.status_code, response.content, ())
    cards: list[_Json] = parse_body(response.content).get("data", [])
    if model is not None:
        return next((card for card in cards if card["id"] == model), {"id": model})
    if len(cards) != 1:
        names = ", ".join(card["id"] for card in cards)
        fail(f"the server has {names or 'no model'}: choose with --model")
    return cards[0]


def _stream(client: httpx.Client, body: _Json, silence_s: float) -> tuple[_Json, _Json]:
    """Print the answer as it arrives; return its receipt and the chunk with its usage."""
    import httpx

    receipt: _Json = {}
    final: _Json = {}
    num_characters = sum(len(document["text"]) for document in body["rapid"]["documents"])
    names = [document["name"] for document in body["rapid"]["documents"]]
    waiting = Waiting(f"reading {num_characters:,} characters" if num_characters else "thinking")
    is_printing = False
    try:
        timeout = httpx.Timeout(SILENCE_TIMEOUT_S + silence_s, connect=CONNECT_TIMEOUT_S)
        with client.stream("POST", "/v1/chat/completions", json=body, timeout=timeout) as response:
            if response.status_code != 200:
                waiting.stop()
                _refuse(response.status_code, response.read(), names)
            for chunk in _chunks(response):
                if isinstance(chunk, str):
                    waiting.say(chunk)
                    continue
                if "error" in chunk:
                    waiting.stop()
                    fail(_advice(chunk["error"], names))
                receipt = chunk.get("rapid", receipt)
                final = chunk if chunk.get("usage") else final
                for choice in chunk["choices"]:
                    if text := choice["delta"].get("content"):
                        waiting.stop()
                        typer.echo(text, nl=False)
                        is_printing = True
    except httpx.HTTPError as error:
        give_up(client, error)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    finally:
        waiting.stop()
        if is_printing:
            typer.echo()
    if not receipt:
        fail("the connection ended before the answer did: ask again")
    return receipt, final


def _chunks(response: httpx.Response) -> Iterator[_Json | str]:
    """Yield the chunks and, as strings, the comments that say how far the server is."""
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))
        elif line.startswith(_PROGRESS):
            yield line.removeprefix(": ")


def _refuse(status: int, content: bytes, names: Sequence[str]) -> NoReturn:
    error = parse_body(content).get("error")
    if isinstance(error, dict) and error.get("message"):
        fail(_advice(error, names))
    refuse(status, content)


def _advice(error: _Json, names: Sequence[str]) -> str:
    """Return the server's error message in this command's words, perhaps with a hint."""
    message = _OPTION.sub(lambda named: f"--{named[1].replace('_', '-')}", str(error["message"]))
    message = _LENGTH.sub("--max-tokens", message).replace("`mode: rag`", "`--mode rag`")
    message = _DOCUMENT.sub(lambda found: f"--document {names[int(found[1])]}", message)
    return f"{message} Asking again may help." if error.get("retryable") else message


def _table(receipt: _Json, final: _Json) -> Table:
    table = make_title_table()
    for name in ("mode", "reason", "contract"):
        table.add_row(name, str(receipt[name]))
    table.add_row("settings", "  ".join(f"{name} {receipt[name]}" for name in _SETTINGS.split()))
    drafted, accepted = receipt["drafted"], receipt["accepted"]
    share = f" ({accepted / drafted:.0%})" if drafted else ""
    table.add_row("drafts", f"{accepted} of {drafted} tokens accepted{share}")
    plain = receipt.get("plain_rounds", 0)
    table.add_row("rounds", f"{receipt['rounds']}" + (f", {plain} of them plain" if plain else ""))
    if lost := [position for position in receipt.get("plain_from", []) if position is not None]:
        table.add_row("without drafter", f"from token {lost[0]}")
    for index, chunk in enumerate(receipt["chunks"]):
        where = f"{chunk['document']} [{chunk['start']}:{chunk['end']}]"
        table.add_row("" if index else "chunks", f"{where}  score {chunk['score']:.3f}")
    timings = (f"{name} {ms:.0f}" for name, ms in receipt["timings_ms"].items())
    table.add_row("milliseconds", "  ".join(timings))
    if usage := final.get("usage"):
        cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        read = f"{usage['prompt_tokens']} read ({cached} cached)"
        table.add_row("tokens", f"{read}, {usage['completion_tokens']} written")
    if metrics := final.get("metrics"):
        table.add_row("tokens per second", f"{metrics['tokens_per_second']:.1f}")
    return table
