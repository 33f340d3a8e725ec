"""Ask a server five questions about one document in three modes, and write down what it says.

::

    .venv/bin/rapid serve cluster/configs/own-text.yaml   # in another shell
    .venv/bin/python examples/own_text/transcript.py   # writes transcript.md beside this file

The document, shown to the model as MPL-2.0.txt, is the Mozilla Public License 2.0 of the
evaluation's texts. The questions were written before the first answer was seen.
"""

from __future__ import annotations

import argparse
import os
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openai import OpenAI

HERE = Path(__file__).parent
DOCUMENT = HERE.parents[1] / "evaluation/texts/documents/mozilla-public-license.txt"
NAME = "MPL-2.0.txt"
MODES = ("plain", "lossless", "auto")
MAX_TOKENS = 40


@dataclass(frozen=True)
class Question:
    """A question, what the text says about it, and a word that every right answer has."""

    text: str
    evidence: str
    word: str | None


QUESTIONS = (
    Question(
        "Who is the license steward?", "Mozilla Foundation is the license steward.", "Mozilla"
    ),
    Question(
        'What does "Source Code Form" mean?',
        '"Source Code Form" means the form of the work preferred for making modifications.',
        "modif",
    ),
    Question(
        "Where may litigation relating to this License be brought?",
        "only in the courts of a jurisdiction where the defendant maintains its principal place of "
        "business",
        "principal",
    ),
    Question(
        "How many licenses are named as Secondary Licenses?",
        "either the GNU General Public License, Version 2.0, the GNU Lesser General Public "
        "License, Version 2.1, the GNU Affero General Public License, Version 3.0",
        "three",
    ),
    Question("How many people work for Mozilla?", "nothing", None),
)


@dataclass(frozen=True)
class Answer:
    """An answer with its mode as asked for, its receipt and the seconds that it took."""

    mode: str
    text: str
    seconds: float
    receipt: dict[str, Any]

    @property
    def kept(self) -> str:
        drafted, accepted = self.receipt["drafted"], self.receipt["accepted"]
        return f"{accepted} of {drafted} drafts kept" if drafted else "nothing drafted"


def ask(client: OpenAI, model: str, question: str, mode: str) -> Answer:
    began = time.monotonic()
    completion = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=MAX_TOKENS,
        extra_body={
            "rapid": {
                "mode": mode,
                "documents": [{"name": NAME, "text": DOCUMENT.read_text()}],
            }
        },
    )
    text = completion.choices[0].message.content or ""
    receipt = (completion.model_extra or {})["rapid"]
    return Answer(mode, text, time.monotonic() - began, receipt)


def verdict(question: Question, answer: Answer) -> str:
    if question.word is None:
        return "the text does not say"
    return f'has "{question.word}"' if question.word in answer.text else f'no "{question.word}"'


def section(number: int, question: Question, answers: list[Answer]) -> str:
    lines = [f"## {number}. {question.text}", "", *wrapped(f"The text says: {question.evidence}")]
    plain = next(answer.text for answer in answers if answer.mode == "plain")
    for answer in answers:
        mode = f"`{answer.mode}`"
        if answer.receipt["mode"] != answer.mode:
            mode += f" (as `{answer.receipt['mode']}`)"
        head = f"{mode}, {answer.seconds:.1f} s, {answer.kept}, {verdict(question, answer)}"
        is_again = answer.mode != "plain" and answer.text == plain
        said = "the same as `plain`" if is_again else answer.text.strip()
        lines += ["", *wrapped(head + ":"), "", *(f"> {line}" for line in wrapped(said))]
    return "\n".join(lines)


def table(asked: list[tuple[Question, list[Answer]]]) -> str:
    rows = [
        "| mode | right, by the word, of 4 | seconds in all | drafts kept |",
        "| --- " * 4 + "|",
    ]
    for index, mode in enumerate(MODES):
        answers = [(question, given[index]) for question, given in asked]
        right = sum(q.word is not None and q.word in a.text for q, a in answers)
        drafted, accepted = (sum(a.receipt[k] for _, a in answers) for k in ("drafted", "accepted"))
        share = f"{accepted} of {drafted}" if drafted else "nothing drafted"
        rows.append(f"| `{mode}` | {right} | {sum(a.seconds for _, a in answers):.0f} | {share} |")
    return "\n".join(rows)


def wrapped(text: str) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), 110) or ["(nothing)"]


def main(url: str, out: Path) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="local", max_retries=0, timeout=3600)
    model = client.models.list().data[0].id
    load = os.getloadavg()[0]
    asked = []
    for question in QUESTIONS:
        answers = [ask(client, model, question.text, mode) for mode in MODES]
        asked.append((question, answers))
        print(f"{question.text} {answers[0].text!r}", flush=True)
    about = (
        f"`transcript.py` asked the model `{model}` five questions about `{NAME}`, the "
        f"Mozilla Public License 2.0, greedily and with at most {MAX_TOKENS} tokens an answer, on "
        f"{os.cpu_count()} CPUs whose load average was {load:.0f} at the start and "
        f"{os.getloadavg()[0]:.0f} at the end. The very first answer includes reading the text. "
        "An answer counts as right when it has one word, which is generous: read the answers."
    )
    sections = [section(number, *each) for number, each in enumerate(asked, 1)]
    head = ["# Five questions about one document", *("\n".join(wrapped(about)), table(asked))]
    out.write_text("\n\n".join([*head, *sections]) + "\n")
    print(f"{out} is written")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="where the server is")
    parser.add_argument("--out", type=Path, default=HERE / "transcript.md", help="what to write")
    options = parser.parse_args()
    main(options.url, options.out)
