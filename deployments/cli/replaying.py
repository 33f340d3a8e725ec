"""The command ``rapid replay``, which recomputes an answer from its receipt."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deployments.cli.terminal import Waiting, fail
from rapid.errors import ConfigurationError


def replay(
    receipt: Annotated[
        Path, typer.Argument(help="What 'rapid ask --receipt' has written.", show_default=False)
    ],
    target: Annotated[
        str | None, typer.Option(help="The target; by default the one that the file names.")
    ] = None,
    drafter: Annotated[
        str | None,
        typer.Option(help="The drafter, likewise; the target again where it drafted for itself."),
    ] = None,
) -> None:
    """Recompute an answer offline, and name the first token that its contract does not explain.

    Exit status 0: every token is explained. 1: one is not. 2: the answer cannot be recomputed.
    """
    try:
        content = receipt.read_bytes()
    except OSError as error:
        fail(f"{receipt} cannot be read: {error.strerror}", status=2)
    waiting = Waiting("loading")
    from transformers.utils.logging import disable_progress_bar

    from rapid.replay import (
        CannotReplay,
        ReplayModels,
        answering_role,
        find_mismatch,
        read_receipt,
    )

    disable_progress_bar()
    try:
        file = read_receipt(content)
        models = ReplayModels(target or file.models.target, drafter or file.models.drafter)
        found = find_mismatch(file, models, lambda done: waiting.say(f"{done} tokens"))
    except (CannotReplay, ConfigurationError) as error:
        waiting.stop()
        fail(str(error), status=2)
    finally:
        waiting.stop()
    explain = file.receipt.explain
    assert explain is not None
    if found is None:
        count = sum(map(len, explain.token_ids))
        contract, seed = file.receipt.contract, file.receipt.seed
        typer.echo(f"all {count} tokens are explained by the contract '{contract}' (seed {seed})")
        return
    role = answering_role(file.receipt)
    was, expected = (
        models.decode(role, token_id) for token_id in (found.token_id, found.expected_id)
    )
    where = f" of choice {found.choice}" if len(explain.token_ids) > 1 else ""
    typer.echo(
        f"token {found.position}{where} ({was!r}) is not explained: the contract "
        f"'{file.receipt.contract}' gives {expected!r} there"
    )
    raise typer.Exit(1)
