"""A numeric constant has a row in docs/constants.md or a comment at its line, and rows are true.

The rule: a number that an operator or a researcher may vary and measure again has a row there. A
limit or a fact, which nobody need change, has its reason as a comment.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("rapid", "retrieval", "cluster", "library", "deployments")
KINDS = {"measured", "tuned"}


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


def constants(module: str, source: str) -> Iterator[tuple[str, str, bool]]:
    """Yield the dotted name and the value, as `ast` writes it, of each constant of a module.

    The third item says whether a comment stands on its lines or on the line above.
    """
    lines = ["", *source.splitlines()]
    for statement in ast.parse(source).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                pass
            case ast.AnnAssign(target=ast.Name(id=name), value=value):
                pass
            case _:
                continue
        if value and re.fullmatch(r"_?[A-Z][A-Z0-9_]*", name) and is_numeric(value):
            own = lines[statement.lineno : (statement.end_lineno or statement.lineno) + 1]
            above = lines[statement.lineno - 1]
            explained = above.startswith("#") or any("  # " in line for line in own)
            yield f"{module}.{name}", ast.unparse(value), explained


def in_code() -> dict[str, tuple[str, bool]]:
    found: dict[str, tuple[str, bool]] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            for name, *rest in constants(module.removesuffix(".__init__"), path.read_text()):
                found[name] = (str(rest[0]), bool(rest[1]))
    return found


def in_table() -> dict[str, list[str]]:
    """Return the cells after the name of each row: value, kind, and what it is."""
    lines = (ROOT / "docs/constants.md").read_text().splitlines()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines if line[:1] == "|"
    ]
    named = [(row[0].strip("`"), row[1:]) for row in rows if row[0].startswith("`")]
    assert len({name for name, _ in named}) == len(named), "a constant has two rows"
    return dict(named)


def test_every_constant_has_a_row_or_a_comment():
    table = in_table()
    bare = [name for name, (_, explained) in in_code().items() if not explained]
    lacking = sorted(set(bare) - table.keys())
    assert not lacking, "these need a comment that says why, or a row:\n" + "\n".join(lacking)


def test_every_row_has_the_value_of_its_constant():
    code = in_code()
    for name, (value, *_) in in_table().items():
        assert name in code, f"docs/constants.md has a row of {name}, which is gone"
        assert ast.unparse(ast.parse(value.strip("`"))) == code[name][0], name


def test_every_row_says_what_its_constant_is():
    for name, (_, kind, meaning) in in_table().items():
        assert kind in KINDS, name
        assert len(meaning.split()) > 2, name


def test_the_scan_finds_numbers_in_any_form_and_their_comments():
    source = """
A = 2**26
_B: dict[str, float] = {"x": -0.5}  # here
# Above.
C = (1, 2.0)
D = [
    3,  # inside
]
E = True
F = "5"
G = A + 1
H = ()
I = f(3)
j = 4
"""
    assert list(constants("m", source)) == [
        ("m.A", "2 ** 26", False),
        ("m._B", "{'x': -0.5}", True),
        ("m.C", "(1, 2.0)", True),
        ("m.D", "[3]", True),
    ]
