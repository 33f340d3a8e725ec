"""The console in a real browser: ``python -m tests.console``.

A headless Chromium of this machine (Debian's package ``chromium``; `CHROMIUM` names another) walks
through `tests/console/stories.py`, in a light and in a dark theme, before the real ingress and
library with an orchestrator that does what each story needs. Playwright and axe-core live in an
environment of their own below `build/console`, which the first run makes. With ``--pictures`` the
shipped application answers instead, and the pictures in `docs/pictures` are taken of it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image

from benchmarks.serving.embedded_application import embedded_application
from tests.environments import install

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
COLORS = 64  # of a picture, which is then a third as long
QUESTION = "List the three deposits of Lonadu."


def find_browser() -> str:
    """Return the browser's program.

    Raises:
        SystemExit: There is none.
    """
    names = (os.environ.get("CHROMIUM", "chromium"), "chromium-browser", "google-chrome")
    for name in names:
        if (found := shutil.which(name)) is not None:
            return found
    raise SystemExit(
        "no Chromium was found: install one (Debian: `apt-get install chromium`), or name its "
        "program by CHROMIUM"
    )


@contextmanager
def fake_application() -> Iterator[str]:
    """Serve `tests.console.fake_application` and yield its address."""
    command = [sys.executable, "-m", "tests.console.fake_application"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def main() -> None:
    """Tell the stories, or take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", default="", metavar="WORD", help="stories whose names have it")
    parser.add_argument("--pictures", action="store_true", help="take the pictures of the pages")
    options = parser.parse_args()
    stories = [
        install(HERE / "requirements.txt", "console"),
        "-m",
        "tests.console.stories",
        "--browser",
        find_browser(),
    ]
    if options.pictures:
        with embedded_application() as application, tempfile.TemporaryDirectory() as folder:
            rapid = Path(sys.executable).parent / "rapid"
            subprocess.run([rapid, "sample-document", "--seed", "7", "--out", folder], check=True)
            of = [f"{folder}/document.txt", QUESTION, ROOT / "docs/pictures"]
            done = subprocess.run([*stories, application.url, "--pictures", *of], cwd=ROOT)
            for each in (ROOT / "docs/pictures").glob("console-*.png"):
                Image.open(each).quantize(COLORS).save(each, optimize=True)
    else:
        with fake_application() as url:
            done = subprocess.run([*stories, url, "--only", options.only], cwd=ROOT)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
