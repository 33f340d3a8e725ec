"""aider: one question of its command line, streamed and not, about a file, and an edit mode."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tries import KEY, MODEL, QUESTION, URL, run

COMMAND = [
    *(sys.executable, "-m", "aider", "--model", f"openai/{MODEL}", "--no-pretty", "--no-git"),
    *("--yes-always", "--no-check-update", "--no-show-release-notes", "--analytics-disable"),
    *("--no-show-model-warnings", "--no-suggest-shell-commands", "--no-detect-urls"),
    *("--map-tokens", "0", "--message", QUESTION),
]


def _ask(*options: str) -> str:
    """Return what aider prints, in a folder and a home of its own with one file in it."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "light.py").write_text('def light():\n    return "white"\n')
        there = {"HOME": folder, "OPENAI_API_BASE": f"{URL}/v1", "OPENAI_API_KEY": KEY}
        done = subprocess.run(
            [*COMMAND, *options, "light.py"],
            cwd=folder,
            env=os.environ | there,
            capture_output=True,
            text=True,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    return done.stdout


def asks_streamed() -> None:
    printed = _ask("--chat-mode", "ask")
    assert "received." in printed, printed[-200:]


def asks_whole() -> None:
    printed = _ask("--chat-mode", "ask", "--no-stream")
    assert "received." in printed, printed[-200:]


def edits() -> None:
    printed = _ask("--edit-format", "udiff")  # a small model makes no edit, but answers
    assert "received." in printed, printed[-200:]


run(asks_streamed, asks_whole, edits)
