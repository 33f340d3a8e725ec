from __future__ import annotations

import dataclasses

import pytest

from evaluation.items import Item
from rapid.chat_messages import Message

ITEM = Item("one", (Message("user", "Who?"),), None, ("me",))


def test_an_item_does_not_change_under_the_systems_that_share_it():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ITEM.id = "two"  # type: ignore[misc]


def test_equal_items_are_written_alike_because_runs_are_told_apart_by_that():
    again = Item("one", (Message("user", "Who?"),), None, ("me",))
    assert (again, repr(again)) == (ITEM, repr(ITEM))
    assert repr(dataclasses.replace(ITEM, evidence=((0, 3),))) != repr(ITEM)
