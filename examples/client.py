"""Ask a running server with the plain OpenAI SDK: `python examples/client.py FILE QUESTION`."""

from __future__ import annotations

import sys
from pathlib import Path

from openai import OpenAI


def main(path: str, question: str) -> None:
    client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="local")
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": question}],
        stream=True,
        extra_body={"rapid": {"documents": [{"name": path, "text": Path(path).read_text()}]}},
    )
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if receipt := (chunk.model_extra or {}).get("rapid"):
            print(f"\n\n{receipt['mode']}: {receipt['reason']}")
            print(f"{receipt['accepted']} of {receipt['drafted']} drafted tokens kept")


if __name__ == "__main__":
    main(*sys.argv[1:])
