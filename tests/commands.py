"""The commands that the pages and the Makefile name, as they name them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "benchmarks/README.md",
    *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")),
)

_PACKAGES = "benchmarks|evaluation|tests|deployments|rapid|retrieval|cluster|library"
_REST = r"((?: [^`#|;&<>$\n]*)?)"
_MODULE = re.compile(rf"python\S* -m ((?:{_PACKAGES})(?:\.[a-z_0-9]+)+){_REST}")
_SCRIPT = re.compile(rf"(?<!/)\b(benchmarks/(?:\w+/)*\w+)\.py\b{_REST}")
_RAPID = re.compile(rf"(?:^|(?<!-n)[ /@(])rapid ([a-z][a-z-]+){_REST}")  # not kubectl -n rapid
_GROUPS = ("documents", "keys", "models")

Command = tuple[str, frozenset[str]]
"""The name of a command, such as `benchmarks.serving.load` or `rapid plan`, and its options."""


def commands() -> dict[str, dict[str, set[str]]]:
    """Return the pages and options by the name of every command."""
    found: dict[str, dict[str, set[str]]] = {}
    for page, text in [*_pages(), ("Makefile", _makefile())]:
        for code in _spans(text) if page != "Makefile" else text.splitlines():
            for name, options in commands_in(code):
                found.setdefault(name, {}).setdefault(page, set()).update(options)
    table = (ROOT / "benchmarks/README.md").read_text(encoding="utf-8")
    for row in re.findall(r"^\| (`[a-z_0-9]*\.[^|]*) \|", table, flags=re.MULTILINE):
        room = ""
        for name in re.findall(r"`([a-z_0-9.]+)`", row):  # `pictures.house`, `.readme_pictures`
            room = name.partition(".")[0] or room
            whole = "gpu" if name == "gpu.py" else room + "." + name.partition(".")[2]
            found.setdefault(f"benchmarks.{whole}", {}).setdefault("benchmarks/README.md", set())
    return found


def commands_in(code: str) -> Iterator[Command]:
    """Yield the commands in a line of code, with those of their options that are spelled out."""
    for name, rest in _MODULE.findall(code):
        yield name, _options(rest)
    for path, rest in _SCRIPT.findall(code):
        yield path.replace("/", "."), _options(rest)
    for name, rest in _RAPID.findall(code):
        if name in _GROUPS and (word := re.match(r" ([a-z]+)", rest)):
            name = f"{name} {word[1]}"
        yield f"rapid {name}", _options(rest)


def _options(rest: str) -> frozenset[str]:
    try:
        words = shlex.split(rest)
    except ValueError:  # a quotation that ends beyond the line
        words = rest.split()
    return frozenset(word.split("=")[0] for word in words if word.startswith("--"))


def _pages() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        yield page, (ROOT / page).read_text(encoding="utf-8")


def _spans(text: str) -> Iterator[str]:
    """Yield the lines of a page's blocks of code, and the code in its sentences."""
    blocks = re.findall(r"^ *```\w*\n(.*?)^ *```", text, flags=re.DOTALL | re.MULTILINE)
    for block in blocks:
        yield from (line.strip() for line in block.replace("\\\n", "").splitlines())
    rest = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    yield from (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", rest))


def _makefile() -> str:
    """Return the Makefile with its lists of benchmarks written out."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    for name, words in re.findall(r"^(FULL|QUICK) := (.*)$", text, flags=re.MULTILINE):
        (line,) = re.findall(rf"for script in \$\({name}\); do (.*) \|\|", text)
        text += "".join(f"\n{line.replace('$$script', word)}" for word in words.split())
    return text.replace("$(BIN)", ".venv/bin")
