"""Writes the documents of the task `real-text` from texts that a Python on Debian carries.

    python -m tests.evaluation.texts.write_documents FOLDER

The package carries the documents as Python 3.11.7 on Debian 13 wrote them, because questions point
into them; another version writes slightly different ones.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import pydoc_data.topics
import textwrap
from pathlib import Path
from types import ModuleType

LICENSES = Path("/usr/share/common-licenses")

DOCUMENTS: dict[str, tuple[str, int]] = {
    # The source, and the greatest length in characters.
    "assignment": ("topic assignment", 16_000),
    "attribute-access": ("topic attribute-access", 16_000),
    "calls": ("topic calls", 16_000),
    "comparisons": ("topic comparisons", 16_000),
    "compound-statements": ("topic compound", 28_000),
    "customization": ("topic customization", 16_000),
    "debugger": ("topic debugger", 22_000),
    "execution-model": ("topic execmodel", 16_000),
    "format-strings": ("topic formatstrings", 24_000),
    "identifiers": ("topic identifiers", 16_000),
    "import-statement": ("topic import", 16_000),
    "mappings": ("topic typesmapping", 16_000),
    "mutable-sequences": ("topic typesseq-mutable", 16_000),
    "numeric-types": ("topic numeric-types", 16_000),
    "objects": ("topic objects", 16_000),
    "string-literals": ("topic strings", 16_000),
    "string-methods": ("topic string-methods", 26_000),
    "type-hierarchy": ("topic types", 28_000),
    "argparse": ("module argparse", 10_000),
    "calendar": ("module calendar", 12_000),
    "cmd": ("module cmd", 16_000),
    "collections": ("module collections", 16_000),
    "configparser": ("module configparser", 24_000),
    "difflib": ("module difflib", 20_000),
    "doctest": ("module doctest", 28_000),
    "json": ("module json", 16_000),
    "optparse": ("module optparse", 16_000),
    "pathlib": ("module pathlib", 16_000),
    "random": ("module random", 16_000),
    "shutil": ("module shutil", 20_000),
    "statistics": ("module statistics", 20_000),
    "tempfile": ("module tempfile", 16_000),
    "threading": ("module threading", 28_000),
    "zipfile": ("module zipfile", 12_000),
    "apache-license": ("licence Apache-2.0", 12_000),
    "artistic-license": ("licence Artistic", 12_000),
    "creative-commons-zero": ("licence CC0-1.0", 12_000),
    "documentation-license": ("licence GFDL-1.3", 24_000),
    "general-public-license": ("licence GPL-2", 20_000),
    "mozilla-public-license": ("licence MPL-2.0", 17_000),
}


def text_of(source: str) -> str:
    """Return the whole text of a source: ``topic NAME``, ``module NAME`` or ``licence FILE``."""
    kind, name = source.split()
    if kind == "topic":
        return str(pydoc_data.topics.topics[name])
    if kind == "module":
        return module_text(importlib.import_module(name))
    return (LICENSES / name).read_text(encoding="utf-8")


def module_text(module: ModuleType) -> str:
    """Return the documentation strings of a module, its functions, classes and methods."""
    parts = [f"The module {module.__name__}", inspect.getdoc(module) or ""]
    for name in vars(module)["__all__"]:
        member = getattr(module, name)
        if callable(member):
            parts += _describe(name, member)
            methods = vars(member).items() if inspect.isclass(member) else ()
            for of_class, method in methods:
                if not of_class.startswith("_"):
                    parts += _describe(f"{name}.{of_class}", method)
    return "\n\n".join(parts)


def _describe(name: str, member: object) -> list[str]:
    """Return a heading and the documentation string, or nothing where there is none."""
    doc = inspect.getdoc(member) if hasattr(member, "__doc__") else None
    is_own = doc and doc != inspect.getdoc(type(member))
    if not is_own:
        return []
    try:
        heading = f"{name}{inspect.signature(member)}"  # type: ignore[arg-type]
    except (TypeError, ValueError):
        heading = name
    return [f"{heading}\n{textwrap.indent(str(doc), '    ')}"]


def cut(text: str, characters: int) -> str:
    """Return the paragraphs of `text` that fit into `characters`, without white space around."""
    text = text.expandtabs().strip()
    if len(text) <= characters:
        return text + "\n"
    return text[: text.rindex("\n\n", 0, characters)].rstrip() + "\n"


def main() -> None:
    """Write every document into the folder that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, (source, characters) in DOCUMENTS.items():
        (folder / f"{name}.txt").write_text(cut(text_of(source), characters), encoding="utf-8")


if __name__ == "__main__":
    main()
