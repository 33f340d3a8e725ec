"""Unmodified clients against the shipped application: ``python -m tests.clients [NAME ...]``.

The scripts are those of `examples/clients/`, each with what is tried and asserted. Their packages,
pinned, live in virtual environments below `build/clients`, as some ask for other versions than the
others do, and those in JavaScript in a folder beside them. The first run installs
them. ``--url`` asks a server that runs, and ``--embedder`` tries its vectors, which the shipped
embedder has none of. Where there is no node, those that need it are not run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.serving.embedded_application import embedded_application
from tests.environments import install

ROOT = Path(__file__).parent.parent
SCRIPTS = ROOT / "examples/clients"
OLDER_SDK = ("instructor_client", "litellm_client", "llama_index_client")
ENVIRONMENTS = dict.fromkeys(OLDER_SDK, "older_sdk") | {"aider_client": "aider"}


def scripts() -> dict[str, Path]:
    """Return the clients' scripts by their names."""
    found = sorted(each for each in SCRIPTS.iterdir() if each.suffix in (".py", ".mjs"))
    return {each.stem: each for each in found if each.stem != "tries"}


def install_node(npm: str) -> Path:
    """Return the folder of the scripts in JavaScript, in which their packages are."""
    folder = ROOT / "build/clients/node"
    folder.mkdir(parents=True, exist_ok=True)
    lock, stamp = "package-lock.json", folder / "installed.json"
    for each in (*SCRIPTS.glob("*.mjs"), SCRIPTS / "package.json", SCRIPTS / lock):
        shutil.copy(each, folder)
    if not stamp.exists() or stamp.read_text() != (SCRIPTS / lock).read_text():
        print(f"installing package.json into {folder}", flush=True)
        quiet = ("--no-audit", "--no-fund", "--loglevel=error")
        subprocess.run([npm, "ci", *quiet], cwd=folder, check=True)
        shutil.copy(SCRIPTS / lock, stamp)
    return folder


def run(script: Path, url: str, embedder: str | None = None) -> bool:
    """Run a client's script, which prints what works; return whether all did, or none was tried."""
    print(f"# {script.stem}", flush=True)
    command: list[str | Path]
    if script.suffix == ".mjs":
        node, npm = shutil.which("node"), shutil.which("npm")
        if node is None or npm is None:
            print("not run: it needs node 20 or later, with npm", flush=True)
            return True
        command = [node, install_node(npm) / script.name]
    else:
        environment = ENVIRONMENTS.get(script.stem, "newest_sdk")
        python = install(SCRIPTS / f"{environment}.txt", f"clients/{environment}")
        command = [python, script]
    # Nothing of this is sent to anybody.
    quiet = {"OPENAI_AGENTS_DISABLE_TRACING": "1", "DO_NOT_TRACK": "1", "OPENAI_API_KEY": "none"}
    given = [url] if embedder is None else [url, embedder]
    return subprocess.run([*command, *given], env=os.environ | quiet, check=False).returncode == 0


@contextlib.contextmanager
def serve(url: str | None) -> Iterator[str]:
    """Yield the address of a server: `url`, or else that of one which is started."""
    if url is not None:
        yield url
        return
    with embedded_application() as application:
        yield application.url


def main() -> None:
    """Run the clients that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(scripts()))
    parser.add_argument("--url", help="of a server that runs; otherwise one is started")
    parser.add_argument("--embedder", help="of that server, as requests name it")
    options = parser.parse_args()
    known = scripts()
    for name in options.names:
        if name not in known:
            parser.error(f"there is no client {name!r}: name one of {', '.join(known)}")
    with serve(options.url) as url:
        failed = [
            each for each in options.names or known if not run(known[each], url, options.embedder)
        ]
    if failed:
        sys.exit(f"not all works with {', '.join(failed)}")


if __name__ == "__main__":
    main()
