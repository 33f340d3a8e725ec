from __future__ import annotations

import inspect
import re

from rapid import errors


def test_the_docstring_draws_the_tree() -> None:
    drawn: dict[str, str] = {}
    path = ["RapidError"]
    for branch, name in re.findall(r"^    (.*)[├└]── (\w+)", errors.__doc__ or "", re.MULTILINE):
        path = [*path[: len(branch) // 4 + 1], name]
        drawn[name] = path[-2]
    classes = inspect.getmembers(errors, inspect.isclass)
    assert drawn == {
        name: cls.__base__.__name__ for name, cls in classes if cls is not errors.RapidError
    }


def test_no_two_losses_are_handled_alike() -> None:
    """Handlers that tell losses from each other may stand in any order."""
    losses = (
        errors.DrafterHangs,
        errors.DrafterUnavailable,
        errors.LeaseNotFound,
        errors.TargetUnavailable,
    )
    for loss in losses:
        assert [each for each in losses if issubclass(loss, each)] == [loss]
