"""What all commands do with what is typed: flags without a type, and errors that tell it all."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

_PREFIX = "Value error, "  # of pydantic, by which Typer checks choices


class _WithPlainFlags:
    """Shows no type behind flags, which take no value."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, the option for help among them."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for each in params:
            if getattr(each, "is_flag", False):
                each.metavar = ""
        return params


class CommandGroup(_WithPlainFlags, TyperGroup):
    """A group of commands."""


class CommandLine(_WithPlainFlags, TyperCommand):
    """A command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read what was typed; an error names all options that are missing."""
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix(_PREFIX)
            # Those that are given were read before; of one that is missing there is no message.
            lacking = [
                each for each in self.params if each.required and each.name not in ctx.params
            ]
            if not error.message and len(lacking) > 1:
                names = ", ".join(f"'{each.opts[0]}'" for each in lacking)
                ctx.fail(f"Missing options {names}.")
            raise
