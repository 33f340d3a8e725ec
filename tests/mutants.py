"""Make the mistakes of `mutants.toml` one at a time, and say which of them no test notices.

``python -m tests.mutants`` runs all of them, ``python -m tests.mutants noise loop`` those of some
modules. The tests run in copies of the working tree, which stays as it is. A mistake is killed when
one of its tests fails, hangs or crashes, else it survives: a test is missing. The exit status is 1
when fewer than 95 % are killed, and when the list is out of date.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parents[1]
LEAST_SCORE = 0.95
NUM_JOBS = 2
TIMEOUT_S = 300
CRASHES = (-signal.SIGABRT, -signal.SIGFPE, -signal.SIGSEGV)


@dataclass(frozen=True)
class Mutant:
    """One mistake: `text`, which the file holds exactly once, becomes something else."""

    module: str
    file: str
    breaks: str
    text: str
    becomes: str
    tests: tuple[str, ...]

    def applied(self, source: str) -> str:
        """The source with the mistake; raise ValueError or SyntaxError if none comes of it."""
        if (count := source.count(self.text)) != 1:
            raise ValueError(f"{self.file} holds {count} times, not once: {self.text}")
        mutated = source.replace(self.text, self.becomes)
        ast.parse(mutated)
        return mutated


def read_mutants() -> list[Mutant]:
    """The list, in its order."""
    modules = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text())
    files, tests = modules.pop("files"), modules.pop("tests")
    mutants = []
    for module, entries in modules.items():
        for entry in entries:
            named = [test for name in entry.pop("tests", [module]) for test in tests[name]]
            mutants.append(Mutant(module, files[module], tests=tuple(named), **entry))
    return mutants


def out_of_date(mutants: Sequence[Mutant], root: Path = ROOT) -> list[str]:
    """Why mutants cannot be made any more, a sentence each."""
    problems = []
    for mutant in mutants:
        try:
            mutant.applied((root / mutant.file).read_text())
        except (OSError, ValueError, SyntaxError) as error:
            problems.append(f"{mutant.module}, {mutant.breaks!r}: {error}")
    return problems


def failure(tests: Sequence[str], tree: Path) -> str | None:
    """What pytest says in a copy when a test fails; None when all pass."""
    command = [sys.executable, "-m", "pytest", "-xq", "-p", "no:cacheprovider", "-m", "not ray"]
    try:
        done = subprocess.run(
            [*command, "--hypothesis-seed=0", *tests],
            cwd=tree,
            env=os.environ | {"PYTHONPATH": str(tree)},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return f"{tests} did not end within {TIMEOUT_S} s"
    if done.returncode not in (0, 1, *CRASHES):
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout if done.returncode else None


def is_killed(mutant: Mutant, tree: Path) -> bool:
    """Whether a test notices; the copy is left as it was."""
    path = tree / mutant.file
    bytecode = Path(importlib.util.cache_from_source(str(path)))
    source = path.read_text()
    try:
        path.write_text(mutant.applied(source))
        bytecode.unlink(missing_ok=True)  # Python knows it by size and second alone
        return failure(mutant.tests, tree) is not None
    finally:
        path.write_text(source)
        bytecode.unlink(missing_ok=True)


def main(modules: Sequence[str]) -> int:
    """Run the list, or the part of it that belongs to some modules."""
    known = read_mutants()
    if unknown := set(modules) - {mutant.module for mutant in known}:
        print(f"No mutant belongs to {', '.join(sorted(unknown))}: see tests/mutants.toml.")
        return 1
    mutants = [mutant for mutant in known if not modules or mutant.module in modules]
    if problems := out_of_date(mutants):
        print("The list is out of date:", *problems, sep="\n  ")
        return 1
    began, survivors = time.monotonic(), []
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(NUM_JOBS) as pool:
        copies = SimpleQueue[Path]()
        for number in range(NUM_JOBS):
            ignored = shutil.ignore_patterns(".*", "__pycache__")
            copies.put(shutil.copytree(ROOT, Path(scratch, str(number)), ignore=ignored))

        def in_copy(run, item):
            tree = copies.get()
            try:
                return run(item, tree)
            finally:
                copies.put(tree)

        print(f"{len(tests)} modules and tests without a mistake ...", flush=True)
        for said in pool.map(lambda test: in_copy(failure, [test]), tests):
            if said is not None:
                print(said)
                return 1
        judged = pool.map(lambda mutant: in_copy(is_killed, mutant), mutants)
        for number, (mutant, killed) in enumerate(zip(mutants, judged, strict=True), start=1):
            survivors += [] if killed else [mutant]
            verdict = "killed  " if killed else "SURVIVED"
            print(f"{number}/{len(mutants)} {verdict} {mutant.module}: {mutant.breaks}", flush=True)
    for mutant in survivors:
        print(f"survived in {mutant.file}: {mutant.breaks}\n- {mutant.text}\n+ {mutant.becomes}")
    share, minutes = 1 - len(survivors) / len(mutants), (time.monotonic() - began) / 60
    print(f"{share:.1%} of {len(mutants)} mutants killed in {minutes:.0f} minutes")
    return int(share < LEAST_SCORE)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modules", nargs="*", help="whose mistakes alone are made")
    sys.exit(main(parser.parse_args().modules))
