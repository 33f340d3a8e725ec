"""Stream an answer that survives a broken connection: `continuing_client.py FILE QUESTION`.

Every chunk of a stream has an id. When the connection breaks, the same body is sent again with the
last id as `Last-Event-ID`, and the server sends the rest of the same answer.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx


class Failed(Exception):
    """An error of the server that no repetition mends, with the error object that says why."""


def chunks(
    url: str, body: dict[str, Any], key: str = "local", *, patience_s: float = 60.0
) -> Iterator[dict[str, Any]]:
    """Yield the chunks of a streamed answer, each once, however often the connection breaks.

    Args:
        url: The server's address, such as ``http://127.0.0.1:8000``.
        body: The body of a chat completion.
        key: The API key.
        patience_s: Seconds to go on trying without a new chunk.

    Raises:
        Failed: The server refused the request, or cannot continue it.
        httpx.TransportError: No new chunk came for `patience_s` seconds.
    """
    content = json.dumps(body | {"stream": True}).encode()  # the very same bytes each time
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    last_s, pause_s = time.monotonic(), 0.1
    with httpx.Client(timeout=httpx.Timeout(10.0, read=patience_s)) as http:
        while True:
            try:
                with http.stream(
                    "POST", f"{url}/v1/chat/completions", content=content, headers=headers
                ) as response:
                    if response.status_code != 200:
                        response.read()
                        check(response.json()["error"])
                        raise httpx.RemoteProtocolError(f"status {response.status_code}")
                    for data in events(response):
                        if data == "[DONE]":
                            return
                        chunk = json.loads(data)
                        if "error" in chunk:
                            check(chunk["error"])
                            raise httpx.RemoteProtocolError(chunk["error"]["message"])
                        headers["last-event-id"] = chunk["rapid_event_id"]
                        last_s, pause_s = time.monotonic(), 0.1
                        yield chunk
                raise httpx.RemoteProtocolError("The stream ended without [DONE].")
            except httpx.TransportError:
                if time.monotonic() - last_s > patience_s:
                    raise
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 5.0)


def events(response: httpx.Response) -> Iterator[str]:
    """Yield the data of each event; comments, which fill silence, are passed over."""
    for line in response.iter_lines():
        field, _, value = line.partition(": ")
        if field == "data":
            yield value


def check(error: dict[str, Any]) -> None:
    """Raise `Failed` unless the same request may succeed when it is sent again."""
    if not error["retryable"] or error["code"] == "cannot_continue":
        raise Failed(error["message"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--key", default="local")
    asked = parser.parse_args()
    models = httpx.get(
        f"{asked.url}/v1/models", headers={"authorization": f"Bearer {asked.key}"}
    ).json()
    body = {
        "model": models["data"][0]["id"],
        "messages": [{"role": "user", "content": asked.question}],
        "rapid": {"documents": [{"name": asked.file.name, "text": asked.file.read_text()}]},
    }
    for chunk in chunks(asked.url, body, asked.key):
        for choice in chunk["choices"]:
            print(choice["delta"].get("content", ""), end="", flush=True)
    print()


if __name__ == "__main__":
    main()
