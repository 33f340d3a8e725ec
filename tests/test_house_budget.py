"""The measures of the house, on a tree of a few lines, and the budget of this one."""

from __future__ import annotations

import ast
import tomllib

import pytest

from tests.house_budget import (
    BUDGET,
    PACKAGES,
    exceeding,
    is_named_by_participle,
    measure,
    write,
)

HALL = """
from ray.serve._private import secrets
from rapid import kitchen

class Place: ...

def kept(place): ...
"""
KITCHEN = """
from rapid import hall

class _Place:
    @property
    def shown(self): ...

    def embed(self): ...
"""


@pytest.fixture
def tree(tmp_path):
    for package in PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "rapid" / "hall.py").write_text(HALL)
    (tmp_path / "rapid" / "kitchen.py").write_text(KITCHEN)
    (tmp_path / "cluster" / "hall.py").write_text("")
    return tmp_path


def test_everything_is_counted(tree):
    found = measure(tree)
    assert found["rooms"] == {"cluster": 1, "rapid": 2}
    assert found["tree"] == {
        "source_lines": 15,
        "benchmark_lines": 0,
        "longest_file_lines": 8,
        "docs_words": 0,
        "circles": 1,
        "repeated_class_names": 1,
        "repeated_module_names": 1,
        "functions_named_by_participles": 1,
        "private_imports_of_ray": 1,
    }


@pytest.mark.parametrize(("name", "is_participle"), [
    ("answered", True), ("_told_by", True), ("drawn", True), ("answer", False),
    ("embed_all", False), ("read", False), ("is_closed", False),
])  # fmt: skip
def test_a_participle_is_no_name_for_a_function(name, is_participle):
    node = ast.parse(f"async def {name}(): ...").body[0]
    assert is_named_by_participle(node) == is_participle


def test_what_rose_is_said_and_what_fell_is_not():
    budget = {"tree": {"circles": 1, "docs_words": 5}}
    assert list(exceeding({"tree": {"circles": 0, "docs_words": 5}}, budget)) == []
    assert list(exceeding({"tree": {"circles": 2}, "rooms": {"rapid": 3}}, budget)) == [
        "tree: circles rose to 2; house.toml allows 1",
        "rooms: rapid is 3 and has no budget: add it to house.toml",
    ]


def test_the_budget_reads_as_it_is_written(tree):
    found = measure(tree)
    assert tomllib.loads(write(found)) == found


def test_the_budget_names_nothing_that_is_gone():
    budget, found = tomllib.loads(BUDGET.read_text()), measure()
    assert {table: set(names) for table, names in budget.items()} == {
        table: set(names) for table, names in found.items()
    }
