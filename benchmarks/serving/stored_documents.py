"""Times of documents that are stored: until they are read, and until answers about them begin.

    python -m benchmarks.serving.stored_documents [--repeats 20]

The embedded application answers greedily, one question at a time. **Reading**: seconds from the
upload of 1 MB of text until it is indexed in a vector store. **Stored**: milliseconds until the
first text when a document is named by its file id, and when its text is in the request, in turns,
after both have been read. **Prefill**: the first question of a file that was uploaded with
``prefill``, and the second and third, which are other questions of the same form. **Search**:
one query over the chunks of a vector store, and pages of its files and of a file's chunks.

It takes three minutes with the defaults, with `--quick` one.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import httpx

from benchmarks.reporting import interval, keep, settings, shown, spread, table
from benchmarks.serving.embedded_application import embedded_application
from rapid.embedded.generator import generate_document

MODES = ("plain", "auto")
CHUNK_TOKENS = 100  # the shortest that OpenAI's API knows
FILE_TOKENS = 10_000
AT_ONCE = 20  # files that are uploaded before the first of them is waited for
LOOK_S = 0.02


def upload(client: httpx.Client, name: str, text: str, **fields: str) -> str:
    file = (name, text.encode(), "text/plain")
    sent = client.post("/v1/files", data={"purpose": "user_data", **fields}, files={"file": file})
    found: str = sent.raise_for_status().json()["id"]
    return found


def wait_for(client: httpx.Client, path: str, name: str, done: str) -> None:
    """Wait until a field of a file, or of its part `rapid`, is as it shall be."""
    while True:
        told = client.get(path).raise_for_status().json()
        state = {**told.get("rapid", {}), **told}[name]
        if state == done:
            return
        if state in ("error", "failed"):
            raise SystemExit(f"{path}: {told}")
        time.sleep(LOOK_S)


def first_text_s(client: httpx.Client, mode: str, question: str, rapid: dict[str, Any]) -> float:
    """Return the seconds until the first text of an answer, which is read to its end."""
    body = {
        "model": "rapid-embedded",
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 8,
        "stream": True,
        "rapid": {"mode": mode, **rapid},
    }
    began, found = time.perf_counter(), None
    with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        reply.raise_for_status()
        for line in reply.iter_lines():
            if '"content":"' in line.replace(" ", "") and found is None:
                found = time.perf_counter() - began
    if found is None:
        raise SystemExit(f"no text came: {body}")
    return found


def measure_reading(client: httpx.Client, repeat: int) -> float:
    """Return the seconds in which 1 MB of text is read and indexed."""
    document = generate_document(f"a megabyte {repeat}", 2_000).text
    text = "".join(f"{place}.\n\n{document}\n\n" for place in range(1 + 1_000_000 // len(document)))
    began = time.perf_counter()
    file = upload(client, f"megabyte {repeat}.txt", text[:1_000_000])
    store = client.post("/v1/vector_stores", json={"file_ids": [file]}).raise_for_status().json()
    wait_for(client, f"/v1/vector_stores/{store['id']}/files/{file}", "status", "completed")
    took = time.perf_counter() - began
    client.delete(f"/v1/files/{file}").raise_for_status()
    return took


def measure_stored(
    client: httpx.Client, mode: str, num_tokens: int, repeats: int
) -> dict[str, list[float]]:
    """Return the seconds until the first text, with the document stored and inline."""
    document = generate_document(f"stored in {mode}", num_tokens)
    file = upload(client, "stored.txt", document.text)
    wait_for(client, f"/v1/files/{file}", "status", "processed")
    ways: dict[str, dict[str, Any]] = {
        "stored": {"file_ids": [file]},
        "inline": {"documents": [{"name": "stored.txt", "text": document.text}]},
    }
    asked = [each.question for each in document.questions]
    for question in asked:
        for rapid in ways.values():
            first_text_s(client, mode, question, rapid)
    found: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats):
        question = asked[repeat % len(asked)]
        for name in sorted(ways, reverse=bool(repeat % 2)):
            found[name].append(first_text_s(client, mode, question, ways[name]))
    return found


def measure_prefill(
    client: httpx.Client, mode: str, num_tokens: int, repeats: int
) -> dict[str, list[float]]:
    """Return the seconds until the first text of the first questions of files read in advance."""
    found: dict[str, list[float]] = {"first": [], "second": [], "third": []}
    for repeat in range(repeats):
        document = generate_document(f"prefill {mode} {repeat}", num_tokens)
        file = upload(client, f"prefill {repeat}.txt", document.text, prefill="true")
        wait_for(client, f"/v1/files/{file}", "prefill", "done")
        asked = [each.question for each in document.questions if each.kind == "fact"]
        for name, question in zip(found, asked, strict=False):
            found[name].append(first_text_s(client, mode, question, {"file_ids": [file]}))
        client.delete(f"/v1/files/{file}").raise_for_status()
    return found


def list_chunks(client: httpx.Client, path: str) -> list[dict[str, Any]]:
    """Return all passages of a file, page by page."""
    found: list[dict[str, Any]] = []
    while True:
        after = {"after": found[-1]["id"]} if found else {}
        page = client.get(path, params={"limit": 100} | after).raise_for_status().json()
        found += page["data"]
        if not page["has_more"]:
            return found


def measure_store(client: httpx.Client, num_chunks: int, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of searches in a store, and of lists of its files and chunks."""
    static = {"max_chunk_size_tokens": CHUNK_TOKENS, "chunk_overlap_tokens": 0}
    store = client.post("/v1/vector_stores", json={"name": "large"}).raise_for_status().json()["id"]
    path, files, of_a_file = f"/v1/vector_stores/{store}", list[str](), num_chunks
    while len(files) * of_a_file < num_chunks:
        document = generate_document(f"large {len(files)}", FILE_TOKENS)
        files.append(upload(client, f"large {len(files)}.txt", document.text))
        sent = {"file_id": files[-1], "chunking_strategy": {"type": "static", "static": static}}
        client.post(f"{path}/files", json=sent).raise_for_status()
        if len(files) % AT_ONCE == 1:
            wait_for(client, f"{path}/files/{files[-1]}", "status", "completed")
        if len(files) == 1:
            of_a_file = len(list_chunks(client, f"{path}/files/{files[0]}/chunks"))
    for each in files[-AT_ONCE:]:
        wait_for(client, f"{path}/files/{each}", "status", "completed")
    listed = list_chunks(client, f"{path}/files/{files[0]}/chunks")
    found: dict[str, list[float]] = {"search": [], "list files": [], "list chunks": []}
    for repeat in range(repeats):
        query = listed[repeat * 7 % len(listed)]["content"][0]["text"][:200]
        asked = {
            "search": ("POST", f"{path}/search", {"json": {"query": query}}),
            "list files": ("GET", f"{path}/files", {"params": {"limit": 100}}),
            "list chunks": ("GET", f"{path}/files/{files[-1]}/chunks", {"params": {"limit": 100}}),
        }
        for name, (method, url, how) in asked.items():
            began = time.perf_counter()
            reply = client.request(method, url, **how).raise_for_status()  # type: ignore[arg-type]
            found[name].append(time.perf_counter() - began)
            if not reply.json()["data"]:
                raise SystemExit(f"{url} found nothing")
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with (
        embedded_application(pools_grow=False) as application,
        httpx.Client(base_url=application.url, timeout=120) as client,
    ):
        for mode in MODES:
            stored = measure_stored(client, mode, options.tokens, options.repeats)
            prefill = measure_prefill(client, mode, options.tokens, options.repeats)
            for name, each in (stored | prefill).items():
                found[f"{mode}: {name}_ms"] = spread([1e3 * s for s in each], 1)
            more = [1e3 * (a - b) for a, b in zip(stored["stored"], stored["inline"], strict=True)]
            found[f"{mode}: stored - inline, ms"] = spread(more, 1)
            found[f"{mode}: its interval"] = interval(more)
            ratio = [a / b for a, b in zip(prefill["first"], prefill["second"], strict=True)]
            found[f"{mode}: first / second"] = spread(ratio)
        for name, each in measure_store(client, options.chunks, 2 + options.repeats).items():
            found[f"{name}_ms"] = spread([1e3 * s for s in each[2:]], 1)
        found["megabyte_s"] = spread(
            [measure_reading(client, each) for each in range(1 + options.repeats // 10)]
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=1_000, help="of a document")
    parser.add_argument("--chunks", type=int, default=100_000, help="that are searched")
    parser.add_argument("--quick", action="store_true", help="three times; keeps nothing")
    options = parser.parse_args()
    if options.quick:
        options.repeats, options.chunks = 3, 10_000
    found = measure(options)
    rows = [
        [name, shown(each, 2) if isinstance(each, dict) else "{:.1f} to {:.1f}".format(*each)]
        for name, each in found.items()
    ]
    name = None if options.quick else "stored_documents"
    text = table(["what", "median (least to most)"], rows)
    keep(name, "Stored documents", text, {"settings": settings(options), "found": found})


if __name__ == "__main__":
    main()
