"""The budget of the house: what `house.toml` allows of size, circles and doubtful names.

    python -m tests.house_budget            # prints what is over the budget; part of `make check`
    python -m tests.house_budget --lower    # writes what was measured where it is less

Each number may only fall. One that has to rise is raised by hand, with its reason in the commit.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from benchmarks.pictures.rooms import House

ROOT = Path(__file__).parent.parent
BUDGET = ROOT / "house.toml"
PRIVATE_PARTS = "cluster/serve_internals.py"  # the one module that may use private parts of Ray
PACKAGES = ("rapid", "retrieval", "cluster", "library", "evaluation", "deployments")

Measures = dict[str, dict[str, int]]

_VERBS_IN_ED = {"embed", "exceed", "feed", "need", "proceed", "seed", "shed", "speed"}
_IRREGULAR = {
    *("begun", "born", "bought", "bound", "broken", "brought", "built", "caught", "chosen", "done"),
    *("drawn", "driven", "fallen", "felt", "forgotten", "found", "given", "gone", "grown"),
    *("held", "hidden", "kept", "known", "laid", "left", "lent", "lost", "made", "meant", "met"),
    *("overridden", "paid", "said", "seen", "sent", "shown", "sold", "spent", "spoken", "stood"),
    *("taken", "taught", "thought", "thrown", "told", "understood", "withdrawn", "won", "written"),
}  # fmt: skip


def measure(root: Path = ROOT) -> Measures:
    """Return all measures by table and name."""
    sources = {
        str(path.relative_to(root)): path.read_text()
        for package in PACKAGES
        for path in sorted((root / package).rglob("*.py"))
    }
    trees = {path: ast.parse(source) for path, source in sources.items()}
    walked = [(path, node) for path, tree in trees.items() for node in ast.walk(tree)]
    nodes = [node for _, node in walked]
    classes = [node.name.strip("_") for node in nodes if isinstance(node, ast.ClassDef)]
    modules = [Path(path).stem for path in sources if not path.endswith("__.py")]
    folders = sorted({str(Path(path).parent) for path in sources})
    houses = {
        folder: House.read(folder.replace("/", "."), _inside(folder, sources)) for folder in folders
    }
    return {
        "tree": {
            "source_lines": sum(map(_count_lines, sources.values())),
            "benchmark_lines": sum(
                _count_lines(path.read_text()) for path in (root / "benchmarks").rglob("*.py")
            ),
            "longest_file_lines": max(map(_count_lines, sources.values())),
            "docs_words": sum(
                len(path.read_text().split()) for path in (root / "docs").rglob("*.md")
            ),
            "circles": sum(len(house.circles) for house in houses.values()),
            "repeated_class_names": _count_repeated(classes),
            "repeated_module_names": _count_repeated(modules),
            "functions_named_by_participles": sum(map(is_named_by_participle, nodes)),
            "private_imports_of_ray": sum(
                _is_private_import_of_ray(node) for path, node in walked if path != PRIVATE_PARTS
            ),
        },
        "rooms": {folder: len(house.imports) for folder, house in houses.items() if house.imports},
    }


def is_named_by_participle(node: ast.AST) -> bool:
    """Whether a function's name begins with a participle; a property is no function."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    if any("property" in ast.unparse(each) for each in node.decorator_list):
        return False
    word = node.name.strip("_").split("_")[0]
    return word in _IRREGULAR or (word.endswith("ed") and word not in _VERBS_IN_ED)


def exceeding(measured: Measures, allowed: Measures) -> Iterator[str]:
    """Yield a sentence for each measure that is over its budget or has none."""
    for table, measures in measured.items():
        for name, value in measures.items():
            most = allowed.get(table, {}).get(name)
            if most is None:
                yield f"{table}: {name} is {value} and has no budget: add it to house.toml"
            elif value > most:
                yield f"{table}: {name} rose to {value}; house.toml allows {most}"


def write(measures: Measures) -> str:
    """Return measures in the form of house.toml."""
    lines = [
        "# What the tree may have at most, as `python -m tests.house_budget` counts. It only falls."
    ]
    for table, values in measures.items():
        lines += ["", f"[{table}]"]
        lines += [f"{_key(name)} = {value}" for name, value in values.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--lower", action="store_true", help="lower the budget to what is measured")
    measured = measure()
    allowed: Measures = tomllib.loads(BUDGET.read_text()) if BUDGET.exists() else {}
    if parser.parse_args().lower:
        lowered = {
            table: {
                name: min(value, allowed.get(table, {}).get(name, value))
                for name, value in values.items()
            }
            for table, values in measured.items()
        }
        BUDGET.write_text(write(lowered))
    over = list(exceeding(measured, allowed))
    print(*over, sep="\n", end="\n" * bool(over))
    sys.exit(bool(over))


def _inside(folder: str, sources: dict[str, str]) -> dict[str, str]:
    return {path: text for path, text in sources.items() if path.startswith(folder + "/")}


def _count_lines(text: str) -> int:
    return len(text.splitlines())


def _count_repeated(names: list[str]) -> int:
    return sum(count > 1 for count in Counter(names).values())


def _is_private_import_of_ray(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    elif isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    else:
        return False
    return any(re.match(r"ray\..*\b_", name) for name in names)


def _key(name: str) -> str:
    return name if re.fullmatch(r"\w+", name) else f'"{name}"'


if __name__ == "__main__":
    main()
