"""The command ``rapid init``, which writes a first configuration file for some GPUs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deployments.cli.sizing.planning import ACCEPTANCE
from deployments.cli.terminal import USAGE, fail, note, rapid_command

if TYPE_CHECKING:
    from deployments.config.api_config import ApiKey
    from deployments.config.initial_file import Wishes
    from rapid.planning.division import Demand
    from rapid.planning.gpus import GPU

_GPUS = re.compile(r"(?:(\d+)\s*(?:[xX*]\s*|\s))?\s*(\w[\w -]*)")
_MOST_GPUS = 64  # that are tried for an advice
_LEAST_DOCUMENT = 1_000  # tokens, below which nobody needs a long context
_OPERATOR = "operator"  # the tenant whose key sees the state of every pool


def init(
    gpus: Annotated[
        str,
        typer.Option(
            help="Those of the machine, such as 4xh100.",
            prompt="GPUs (as 4xh100)",
            callback=lambda text: _read_gpus(text) and text,  # before the next is asked for
        ),
    ],
    path: Annotated[Path, typer.Argument(help="The file that is written.")] = Path("my.yaml"),
    document_tokens: Annotated[
        int,
        typer.Option(
            help="Of the longest document; a page has about 700.",
            prompt="Tokens of the longest document (a page has about 700)",
            min=1,
        ),
    ] = 30_000,
    people: Annotated[
        int, typer.Option(help="Who ask; of ten, one at once.", prompt="People who ask", min=1)
    ] = 10,
    teams: Annotated[
        str,
        typer.Option(
            help="A number, or names with commas: each gets an API key, which is printed once.",
            prompt="Teams with a key each (a number, or names with commas; 0 for none)",
        ),
    ] = "0",
) -> None:
    """Write a configuration with Qwen3 models for some GPUs, or say what would fit instead.

    What is not given is asked for. The largest models that hold all questions are taken; numbers
    of 'rapid plan' stand in the file. Keys are stored as hashes, and one more is an operator's.
    """
    from deployments.config.initial_file import (
        HEADROOM,
        MOST_CONTEXT,
        Wishes,
        compose_file,
        describe_parts,
    )
    from rapid.planning.division import divide

    if path.exists():
        fail(f"{path} is there already: give the name of another file", USAGE)
    num_gpus, gpu = _read_gpus(gpus)
    names = _read_teams(teams)
    wishes = Wishes(document_tokens, people)
    demand = wishes.demand(ACCEPTANCE)
    if demand.context > MOST_CONTEXT:
        fail(
            f"Qwen3 reads {MOST_CONTEXT:,} tokens: give --document-tokens "
            f"{MOST_CONTEXT - HEADROOM} at most; what is longer can be asked with --mode rag",
            USAGE,
        )
    division = divide(gpu, num_gpus, demand)
    if division is None:
        fail(_say_what_would_fit(gpu, num_gpus, wishes, demand))
    keys = _make_keys(names)
    text = compose_file(wishes, demand, division, [key for _, key in keys])
    path.write_text(text, encoding="utf-8")
    note(f"wrote {path}: {describe_parts(division)}")
    if keys:
        note("keys (keep them, they are stored nowhere):")
    for secret, key in keys:
        typer.echo(f"{key.tenant}\t{secret}")
    note(f"Next: {rapid_command()} doctor {path}, then {rapid_command()} serve {path}")


def _read_gpus(text: str) -> tuple[int, GPU]:
    from rapid.planning.gpus import find_gpu

    found = _GPUS.fullmatch(text.strip())
    if found is None or found[1] == "0":
        fail(
            f"--gpus {text}: write a number and a name, such as 4xh100; for a machine without GPUs "
            "there are serve_config.yaml and cluster/configs/own-text.yaml",
            USAGE,
        )
    return int(found[1] or 1), find_gpu(found[2])


def _read_teams(text: str) -> list[str]:
    if text.strip().isdigit():
        return [f"team-{number}" for number in range(1, int(text) + 1)]
    names = [each.strip() for each in text.split(",") if each.strip()]
    if len({*names, _OPERATOR}) <= len(names):
        fail(
            f"--teams {text}: each name once, and none is {_OPERATOR}, who gets a key anyhow", USAGE
        )
    return names


def _make_keys(teams: list[str]) -> list[tuple[str, ApiKey]]:
    """Return a key for each team, and with any also one for the operator, as text and as hash."""
    from deployments.config.api_config import ApiKey
    from library.accounts.callers import hash_key, make_key

    made = []
    for name in [*teams, _OPERATOR] if teams else []:
        secret = make_key()
        key = ApiKey(tenant=name, sha256=hash_key(secret), operator=name == _OPERATOR)
        made.append((secret, key))
    return made


def _say_what_would_fit(gpu: GPU, num_gpus: int, wishes: Wishes, demand: Demand) -> str:
    """Return that nothing fits, and the least change of each wish with which something would."""
    from deployments.config.initial_file import Wishes, people_for
    from rapid.planning.division import divide, find_fewest_gpus, find_most_questions

    def holds(document_tokens: int) -> bool:
        shorter = Wishes(document_tokens, wishes.people).demand(demand.acceptance)
        return divide(gpu, num_gpus, shorter) is not None

    advice = []
    if most := find_most_questions(gpu, num_gpus, demand):
        advice.append(f"--people {people_for(most)}")
    if length := _find_longest(holds, wishes.document_tokens):
        advice.append(f"--document-tokens {length}")
    if enough := find_fewest_gpus(gpu, demand, range(num_gpus + 1, _MOST_GPUS + 1)):
        advice.append(f"--gpus {enough}x{gpu.name}")
    fits = " or ".join(advice) or "nothing smaller"
    return (
        f"{num_gpus} {gpu.name} do not hold {demand.questions} questions at once on documents of "
        f"{wishes.document_tokens:,} tokens; what fits is {fits}"
    )


def _find_longest(holds: Callable[[int], bool], most: int) -> int:
    """Return a length below `most`, in thousands, that is held and the next is not; 0 if none."""
    low, high = 0, most // _LEAST_DOCUMENT
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle * _LEAST_DOCUMENT) else (low, middle - 1)
    return low * _LEAST_DOCUMENT
