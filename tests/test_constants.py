"""docs/constants.md lists every numeric constant of the packages, with its value."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("rapid", "retrieval", "cluster", "deployments")
KINDS = {"measured", "tuned", "bound", "fact"}


def is_numeric(node: ast.expr | None) -> bool:
    """Whether an expression is a number, arithmetic on numbers, or a collection of numbers."""
    match node:
        case ast.Constant(value=value):
            return isinstance(value, int | float) and not isinstance(value, bool)
        case ast.BinOp(left=left, right=right):
            return is_numeric(left) and is_numeric(right)
        case ast.UnaryOp(operand=operand):
            return is_numeric(operand)
        case ast.Tuple(elts=values) | ast.List(elts=values) | ast.Dict(values=values):
            return bool(values) and all(is_numeric(value) for value in values)
    return False


def constants(module: str, source: str) -> Iterator[tuple[str, str]]:
    """Yield the dotted name and the value, as `ast` writes it, of each constant of a module."""
    for statement in ast.parse(source).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                pass
            case ast.AnnAssign(target=ast.Name(id=name), value=value):
                pass
            case _:
                continue
        if re.fullmatch(r"_?[A-Z][A-Z0-9_]*", name) and is_numeric(value):
            yield f"{module}.{name}", ast.unparse(value)


def in_code() -> dict[str, str]:
    found: dict[str, str] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found.update(constants(module.removesuffix(".__init__"), path.read_text()))
    return found


def in_table() -> dict[str, list[str]]:
    """Return the cells after the name of each row: value, unit, kind, and what it is."""
    lines = (ROOT / "docs/constants.md").read_text().splitlines()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines if line[:1] == "|"
    ]
    named = [(row[0].strip("`"), row[1:]) for row in rows if row[0].startswith("`")]
    assert len({name for name, _ in named}) == len(named), "a constant has two rows"
    return dict(named)


def test_the_table_lists_every_constant_with_its_value():
    code, table = in_code(), in_table()
    listed = {name: ast.unparse(ast.parse(row[0].strip("`"))) for name, row in table.items()}
    rows = [
        f"| `{name}` | {value} | unit | kind | what it is; its source |"
        for name, value in code.items()
        if listed.get(name) != value
    ]
    gone = sorted(listed.keys() - code.keys())
    assert not rows, "docs/constants.md lacks these rows, or has other values:\n" + "\n".join(rows)
    assert not gone, "docs/constants.md has rows of constants that are gone:\n" + "\n".join(gone)


def test_every_row_says_what_its_constant_is():
    for name, (_, unit, kind, meaning) in in_table().items():
        assert unit, name
        assert kind in KINDS, name
        assert len(meaning.split()) > 2, name


def test_the_scan_finds_numbers_in_any_form():
    source = """
A = 2**26
_B: dict[str, float] = {"x": -0.5}
C = (1, 2.0)
D = [3]
E = True
F = "5"
G = A + 1
H = ()
I = f(3)
j = 4
"""
    assert dict(constants("m", source)) == {
        "m.A": "2 ** 26",
        "m._B": "{'x': -0.5}",
        "m.C": "(1, 2.0)",
        "m.D": "[3]",
    }
