"""Time from the last byte of a streamed request to the first byte of its answer's body.

    python -m benchmarks.serving.first_byte [--repeats 5] [--url http://127.0.0.1:8000]

Chat, completions and responses are asked for greedily and sampled, about a short document and about
one of 3,500 tokens that the server has not read, while nobody else asks and while `--others` ask.
Without `--url` the application of `serve_config.yaml` is started and ended. The goal is 200 ms.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import statistics
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from benchmarks.reporting import keep, settings, table
from benchmarks.serving.embedded_application import embedded_application
from rapid.embedded.generator import generate_document

GOAL_MS = 200
TOKENS = {"short": 60, "long": 3500}
ROUTES = ("chat/completions", "completions", "responses")
seeds = itertools.count(int(time.time()))  # of documents that the server has not read


def ask(url: str, model: str, route: str, prompt: str, temperature: float) -> float:
    """Return the milliseconds from the last byte sent to the first of the body."""
    document = generate_document(next(seeds), TOKENS[prompt])
    question = document.questions[0].question
    body: dict[str, Any] = {"model": model, "stream": True, "temperature": temperature}
    body |= {
        "chat/completions": {"messages": [{"role": "user", "content": question}], "max_tokens": 32},
        "completions": {"prompt": f"{document.text}\n\n{question}", "max_tokens": 32},
        "responses": {"input": question, "max_output_tokens": 32},
    }[route]
    if route != "completions":
        body["rapid"] = {"documents": [{"name": "notes", "text": document.text}]}
    server = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
    with contextlib.closing(server):
        server.request(
            "POST", f"/v1/{route}", json.dumps(body), {"content-type": "application/json"}
        )
        began = time.monotonic()
        response = server.getresponse()
        response.read(1)
        took_ms = 1e3 * (time.monotonic() - began)
        rest = response.read()
        if response.status != 200:
            raise SystemExit(f"{route}: {response.status}: {rest[:300].decode()}")
        return took_ms


@contextlib.contextmanager
def others_asking(url: str, model: str, count: int) -> Iterator[None]:
    """Keep so many chats about long documents going."""
    is_over = threading.Event()

    def go_on() -> None:
        while not is_over.is_set():
            ask(url, model, ROUTES[0], "long", 1.0)

    threads = [threading.Thread(target=go_on) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="a running server; by default one is started and ended")
    parser.add_argument("--model", default="rapid-embedded", help="the model that is asked")
    parser.add_argument("--repeats", type=int, default=5, help="streams of each case")
    parser.add_argument("--others", type=int, default=4, help="streams beside, where it is busy")
    parser.add_argument("--out", help="a name of results to keep; by default they are printed")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        url = options.url or stack.enter_context(embedded_application()).url
        for count in (0, options.others):
            with others_asking(url, options.model, count):
                for case in itertools.product(ROUTES, TOKENS, (0.0, 0.8)):
                    took = [ask(url, options.model, *case) for _ in range(options.repeats)]
                    rows.append({"case": [count, *case], "ms": took})
    lines = [
        (*row["case"], f"{statistics.median(row['ms']):.0f}", f"{max(row['ms']):.0f}")
        for row in rows
    ]
    late = sum(each > GOAL_MS for row in rows for each in row["ms"])
    head = ("others", "route", "document", "temperature", "median, ms", "most, ms")
    told = f"{late} streams began later than {GOAL_MS} ms.\n\n{table(head, lines)}"
    keep(options.out, "First byte of a stream", told, {"settings": settings(options), "rows": rows})


if __name__ == "__main__":
    main()
