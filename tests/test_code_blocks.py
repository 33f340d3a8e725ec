"""Every block of code in the README and on the pages of *Start* and *Use* runs, or is parsed.

Commands are read by the parsers that would read them, and settings by the server's own classes.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.core import TyperGroup
from typer.exceptions import TyperException
from typer.main import get_command

from deployments.cli import app
from deployments.config.serve_file import read_applications
from tests.test_site import _Loader

ROOT = Path(__file__).parent.parent
RAN_BY = {  # of the blocks in Python, the tests that run them
    "README.md": "tests/end_to_end/test_readme.py",
    "docs/start.md": "tests/end_to_end/test_start.py",
    "docs/from-the-paper-code.md": "tests/test_documents.py",
    "docs/own-rule.md": "tests/test_documents.py",
}
OTHER_PROGRAMS = {"cut", "git", "python3.11", "pip", "open-webui"}
FILES = ("report.pdf", "paper.pdf", "sample/document.txt", "notes/minutes.txt")  # a reader's own


def list_pages() -> list[str]:
    site = yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)
    parts = {title: entries for part in site["nav"] for title, entries in part.items()}
    named = [place for part in ("Start", "Use") for e in parts[part] for place in e.values()]
    return ["README.md", *(f"docs/{place}" for place in named)]


def list_blocks() -> list[tuple[str, str, str]]:
    """The page, the language and the code of every block."""
    fenced = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
    pages = ((page, (ROOT / page).read_text()) for page in list_pages())
    return [(page, *block) for page, text in pages for block in fenced.findall(text)]


def split_commands(code: str) -> list[list[str]]:
    """The words of every command in lines of a shell, without what it sets for the command."""
    commands: list[list[str]] = []
    for line in code.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        commands.append([])
        for word in lexer:
            if set(word) <= set("|&;()<>"):
                commands.append([])
            elif commands[-1] or not re.match(r"\w+=", word):
                commands[-1].append(word)
    return [each for each in commands if each]


def check_commands(page: str, code: str) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for program, *words in split_commands(code):
        name = Path(program).name
        if name == "make":
            assert set(words) <= {*targets}
        elif name == "rapid":
            parse(get_command(app), words)
        else:
            assert name in OTHER_PROGRAMS, page


def parse(command: Any, words: list[str], parent: Any = None) -> None:
    """Read the words of a command as it would, down to its last subcommand, and run nothing."""
    context = command.make_context(command.name, list(words), parent=parent)
    if isinstance(command, TyperGroup):
        _, found, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        parse(found, rest, context)


def check_settings(page: str, code: str) -> None:
    file = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    file["applications"][0]["args"] |= yaml.safe_load(code)
    assert read_applications(file), page


def check_python(page: str, code: str) -> None:
    compile(code, page, "exec")
    assert Path(page).name in (ROOT / RAN_BY[page]).read_text()


def check_tree(page: str, code: str) -> None:
    folders: list[str] = []
    for line in code.splitlines():
        indent, path = re.match(r"( *)(\S+/) ", line).groups()  # type: ignore[union-attr]
        folders[len(indent) // 2 :] = [path]
        assert (ROOT / "".join(folders)).is_dir(), (page, line)


CHECKS: dict[str, Callable[[str, str], None]] = {
    "bash": check_commands,
    "yaml": check_settings,
    "python": check_python,
    "": check_tree,
}


@pytest.mark.parametrize(("page", "language", "code"), list_blocks())
def test_a_block_of_code_is_right(
    page: str, language: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in FILES:
        (tmp_path / each).parent.mkdir(exist_ok=True)
        (tmp_path / each).touch()
    for each in ("LICENSE", "cluster", "examples"):
        (tmp_path / each).symlink_to(ROOT / each)
    monkeypatch.chdir(tmp_path)
    CHECKS[language](page, code)


def test_commands_are_split_and_wrong_ones_refused() -> None:
    line = 'ID=$(rapid documents add "a b" | cut -f 1)\nX=1 rapid ask -d - Why?  # as typed'
    assert split_commands(line) == [
        ["rapid", "documents", "add", "a b"],
        ["cut", "-f", "1"],
        ["rapid", "ask", "-d", "-", "Why?"],
    ]
    for wrong in ("rapid aks Why?", "rapid ask --stat Why?", "rapid ask --mode fast Why?"):
        with pytest.raises(TyperException):
            check_commands("", wrong)
