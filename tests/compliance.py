"""The compliance suite of Open Responses against the shipped application.

``python -m tests.compliance FOLDER`` runs the suite of a checkout of its repository, unmodified, by
node with the packages that it imports, which are installed below `build/compliance`. ``--url`` asks
a server that runs.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import httpx

from tests.clients import ROOT, serve

SOURCE = "https://github.com/openresponses/openresponses"
COMMIT = "92c12d96d7b61d6d15e2214daa5e9c6000ab6e1c"  # of 2026-07-15: specification 2026-04-24
PACKAGES = ("zod@3.25.76", "tsx@4.23.15")
# The embedded models cannot choose to call a tool: they have read nothing but generated documents.
# Whether one is called is then not tried, but what a call looks like is.
MUST_CALL = """
const ask = globalThis.fetch;
globalThis.fetch = (url, options) => {
  const body = JSON.parse(options.body);
  const chosen = body.tools ? { tool_choice: "required" } : {};
  return ask(url, { ...options, body: JSON.stringify({ ...body, ...chosen }) });
};"""
NOT_RUN = {"image-input": "no model here reads images", "websocket": "no WebSockets are served"}


def prepare(checkout: Path) -> Path:
    """Return a copy of a checkout's suite beside its packages.

    Raises:
        SystemExit: There is no suite, or nothing to run it by.
    """
    if not (checkout / "bin/compliance-test.ts").is_file():
        sys.exit(f"{checkout} has no suite: name a checkout of {SOURCE} at {COMMIT}")
    if (npm := shutil.which("npm")) is None:
        sys.exit("npm is not found: install node 20 or later")
    folder = ROOT / "build/compliance"
    shutil.rmtree(folder, ignore_errors=True)
    for part in ("bin", "src/lib", "src/generated"):
        shutil.copytree(checkout / part, folder / "suite" / part)
    quiet = ("--no-audit", "--no-fund", "--loglevel=error")
    subprocess.run([npm, "install", "--prefix", folder, *quiet, *PACKAGES], check=True)
    return folder / "suite"


def list_tests(suite: Path) -> tuple[list[str], dict[str, str]]:
    """Return the names of the tests that are run, and why each other one is not."""
    text = (suite / "src/lib/compliance-tests.ts").read_text()
    names = re.findall(r'^    id: "([a-z-]+)"', text, flags=re.MULTILINE)
    left = {name: why for name in names for what, why in NOT_RUN.items() if name.startswith(what)}
    return [name for name in names if name not in left], left


def run(suite: Path, names: list[str], url: str) -> bool:
    """Run tests of the suite, and print what becomes of each; return whether all pass."""
    (model, *_) = httpx.get(f"{url}/v1/models", timeout=30).json()["data"]
    command = ["node", "--import", "tsx"]
    if model["rapid"]["embedded"]:
        print("changed | tool-calling | asked with tool_choice: required")
        command += ["--import", f"data:text/javascript,{quote(MUST_CALL)}"]
    command += ["bin/compliance-test.ts", "--base-url", f"{url}/v1", "--api-key", "none"]
    command += ["--model", model["id"], "--json", "--filter", ",".join(names)]
    done = subprocess.run(command, cwd=suite, stdout=subprocess.PIPE, text=True, check=False)
    if not done.stdout:
        sys.exit(f"the suite did not run: {done.returncode}")
    results = json.loads(done.stdout)["results"]
    for each in results:
        print(each["status"], each["id"], *each.get("errors") or (), sep=" | ")
    return sorted(each["id"] for each in results if each["status"] == "passed") == sorted(names)


def main() -> None:
    """Run the suite of the checkout that is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("checkout", type=Path, help=f"of {SOURCE} at {COMMIT}")
    parser.add_argument("--url", help="of a server that runs; otherwise one is started")
    options = parser.parse_args()
    suite = prepare(options.checkout)
    names, left = list_tests(suite)
    for name, why in left.items():
        print(f"not run | {name} | {why}")
    with serve(options.url) as url:
        if not run(suite, names, url):
            sys.exit("not all of the suite passes")


if __name__ == "__main__":
    main()
