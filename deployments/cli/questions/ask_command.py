"""The command ``rapid ask``, which sends a question about documents to a running server."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from deployments.cli.questions.answer_stream import (
    StreamedAnswer,
    choose_card,
    document_objects,
    is_embedded,
    list_cards,
    stream_answer,
)
from deployments.cli.questions.citations import origin, passages, source_objects, warn_of_nothing
from deployments.cli.questions.local_documents import read_documents, read_kept
from deployments.cli.questions.question_options import (
    DocumentOption,
    MaxTokensOption,
    ModelOption,
    ModeOption,
    SectionsOption,
    SeedOption,
    TemperatureOption,
    Transfer,
    check_writable,
    make_body,
)
from deployments.cli.questions.who_wrote import list_tokens
from deployments.cli.server.server_client import KeyOption, Url, call, connect
from deployments.cli.terminal import (
    DEFAULT_URL,
    USAGE,
    AsJson,
    fail,
    make_title_table,
    note,
    out,
    print_json,
    print_text,
    rapid_command,
)

if TYPE_CHECKING:
    from library.parsing import ParsedText

_OWN_TEXT = "smollm2-135m all-minilm-l6-v2"  # which cluster/configs/with-own-text.yaml needs
_FOREIGN = 0.2  # generated documents have no unknown words, other English 0.7
_MOST_FETCHED_BYTES = 1 << 25  # of a kept file, only to say where an answer is from
_SETTINGS = "seed coupling transfer eta max_draft plausibility draft_top_k transfer_temperature"

_Json = dict[str, Any]


def ask(
    question: Annotated[str, typer.Argument(help="What to ask.", show_default=False)],
    document: DocumentOption = None,
    file: Annotated[
        list[str] | None,
        typer.Option("--file", metavar="ID", help="A file that the server keeps; may be repeated."),
    ] = None,
    url: Url = DEFAULT_URL,
    api_key: KeyOption = None,
    model: ModelOption = None,
    mode: ModeOption = None,
    sections: SectionsOption = False,
    temperature: TemperatureOption = 0.0,
    top_p: Annotated[float | None, typer.Option(help="Nucleus mass kept.")] = None,
    seed: SeedOption = None,
    max_tokens: MaxTokensOption = None,
    eta: Annotated[
        float | None, typer.Option(help="How far the drafter moves the target; fused, paper.")
    ] = None,
    transfer: Annotated[
        Transfer | None, typer.Option(help="How the drafter moves the target.")
    ] = None,
    max_draft: Annotated[int | None, typer.Option(help="Tokens drafted per round.")] = None,
    retrieval_tokens: Annotated[
        int | None, typer.Option(help="Tokens retrieved for the drafter.")
    ] = None,
    sources: Annotated[
        bool, typer.Option("--sources", help="Print the passages that were retrieved.")
    ] = False,
    stats: Annotated[
        bool,
        typer.Option("--stats", help="Print the receipt: how the answer was made, and how fast."),
    ] = False,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Print who wrote each token, and how likely it was."),
    ] = False,
    as_json: AsJson = False,
    receipt_file: Annotated[
        Path | None,
        typer.Option(
            "--receipt", metavar="FILE", help="Write what 'rapid replay' needs to a file."
        ),
    ] = None,
) -> None:
    """Ask a question about documents; the answer streams.

    A line on standard error says which pages or lines of the documents it is from, that its words
    do not stand there, or, before the answer too, that nothing in them is about the question. With
    --json one object has text, sources, nothing_found, receipt and usage.

    The models of the default configuration understand only documents that 'rapid sample-document'
    has made. For text of your own, ask another with --model.
    """
    if not question.strip():
        fail("the question is empty: write it in quotes", USAGE)
    check_writable(
        {
            "the question": question,
            "--url": url,
            "--model": model,
            "--temperature": temperature,
            "--top-p": top_p,
            "--eta": eta,
        }
    )
    texts = read_documents(document or [])
    rapid = {
        "mode": mode,
        "too_long": "sections" if sections else None,
        "eta": eta,
        "transfer": transfer,
        "max_draft": max_draft,
        "retrieval_tokens": retrieval_tokens,
        "documents": document_objects(texts),
        "file_ids": file,
        "explain": "tokens" if receipt_file else "writers" if explain else None,
    }
    messages = [{"role": "user", "content": question}]
    sampling = {"temperature": temperature, "top_p": top_p, "seed": seed}
    answer = StreamedAnswer()
    with connect(url, api_key) as client:
        cards = list_cards(client)
        card = choose_card(cards, model)
        if is_embedded(card):
            warn_of_foreign({name: each.text for name, each in texts.items()}, question, cards)
            if not texts and not file:
                note(
                    "no document is given, and this server's models can only look up answers in "
                    "one: name it with --document FILE"
                )
        kept = [call(client, "GET", f"/v1/files/{each}") for each in file or ()]
        named = [] if as_json else [*texts, *(each["filename"] for each in kept)]
        body = make_body(card["id"], messages, rapid, max_completion_tokens=max_tokens, **sampling)
        try:
            stream_answer(
                client,
                body,
                card,
                answer,
                (lambda _: None) if as_json else partial(print_text, ends_line=False),
                warn=lambda reason: warn_of_nothing(reason, named),
                kept=[(each["filename"], each["rapid"]["characters"] or 0) for each in kept],
            )
        finally:
            if answer.text and not as_json:
                typer.echo()
        documents: dict[str, ParsedText | None] = {**texts}
        for each in kept:  # a later one of the same name has another name in the receipt
            if each["filename"] not in documents:
                is_read = as_json or sources or each["bytes"] <= _MOST_FETCHED_BYTES
                documents[each["filename"]] = read_kept(client, each) if is_read else None
    if receipt_file is not None:
        _write(receipt_file, body, answer.receipt, is_embedded=is_embedded(card))
    if as_json:
        print_json(
            {
                "text": answer.text,
                "sources": source_objects(answer.receipt, documents),
                "nothing_found": warn_of_nothing(answer.receipt["reason"], [*documents])
                is not None,
                "receipt": answer.receipt,
                "usage": answer.final.get("usage"),
            }
        )
        return
    if (line := origin(question, answer.text, answer.receipt, documents)) is not None:
        note(line)
    for place, text in passages(answer.receipt, documents) if sources else ():
        print_text(f"\n{place}:\n{text or '(its text is not at hand)'}")
    if explain:
        out.print(list_tokens(answer.receipt))
    if stats:
        out.print(_table(answer.receipt, answer.final))


def _write(path: Path, body: _Json, receipt: _Json, *, is_embedded: bool) -> None:
    """Write the file that ``rapid replay`` reads; a server names no models but the embedded."""
    content: _Json = {"request": body, "receipt": receipt}
    if is_embedded:
        content["models"] = {"target": "embedded:target", "drafter": "embedded:drafter"}
    try:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        fail(f"{path} cannot be written: {error.strerror}")


def warn_of_foreign(texts: Mapping[str, str], question: str, cards: Sequence[_Json]) -> bool:
    """Say of words that the embedded models have never read that they have not, and who reads them.

    Returns whether there are such words: in one of the texts, or else in the question.
    """
    from rapid.embedded.wording import unknown_share

    shares = {name: unknown_share(text) for name, text in texts.items()}
    name = max(shares, key=lambda each: shares[each], default="the question")
    if shares.get(name, 0) <= _FOREIGN:
        name, shares = "the question", {"the question": unknown_share(question)}
    if shares[name] <= _FOREIGN:
        return False
    others = [card["id"] for card in cards if not is_embedded(card)]
    instead = (
        f"ask with --model {others[0]}"
        if others
        else f"run '{rapid_command()} models get {_OWN_TEXT}', then 'make run' again"
    )
    note(
        "this model understands only documents that 'rapid sample-document' has made, and "
        f"questions like theirs; {shares[name]:.0%} of the words of {name} are unknown to it, so "
        f"its answer means nothing and may run on: for English text of your own, {instead}"
    )
    return True


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
