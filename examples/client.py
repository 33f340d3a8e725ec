"""Ask a running server with the plain OpenAI SDK, and show how the answer was made.

python examples/client.py FILE 'What is ...?'
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import openai


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="a text file")
    parser.add_argument("question")
    url = os.environ.get("RAPID_URL", "http://127.0.0.1:8000")
    parser.add_argument("--url", default=url, help="by default RAPID_URL, or port 8000 here")
    parser.add_argument("--key", default="local", help="an API key, if the server wants one")
    options = parser.parse_args()
    document = {"name": options.file.name, "text": options.file.read_text(encoding="utf-8")}
    client = openai.OpenAI(base_url=f"{options.url}/v1", api_key=options.key)
    try:
        stream = client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": options.question}],
            stream=True,
            extra_body={"rapid": {"documents": [document]}},
        )
    except openai.APIConnectionError:
        raise SystemExit(f"no server answers at {options.url}: start one with `make run`") from None
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if receipt := (chunk.model_extra or {}).get("rapid"):
            print(f"\n\n{receipt['mode']}: {receipt['reason']}")
            print(f"{receipt['accepted']} of {receipt['drafted']} drafted tokens kept")


if __name__ == "__main__":
    main()
