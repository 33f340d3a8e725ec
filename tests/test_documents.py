"""What the documents show must run."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def python_blocks(page: str) -> str:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
    return "\n".join(blocks)


def test_the_way_from_the_paper_code_runs(capsys):
    exec(compile(python_blocks("docs/from-the-paper-code.md"), "from-the-paper-code", "exec"), {})
    answer, kept = capsys.readouterr().out.strip().splitlines()
    assert answer
    assert re.fullmatch(r"\d+ of \d+ drafted tokens kept", kept)
