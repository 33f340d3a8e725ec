"""The options of ``rapid eval``, declared once and gathered into one value."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

TARGET, DRAFTER = "embedded:target", "embedded:drafter"

_what = partial(typer.Option, rich_help_panel="What is asked", show_default=False)
_who = partial(typer.Option, rich_help_panel="Who answers", show_default=False)
_how = partial(typer.Option, rich_help_panel="How it is run", show_default=False)


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """What was asked on the command line; an option that was not given is None."""

    task: Annotated[
        str | None, _what(help="Name (--list shows them) or .yaml file.", metavar="NAME|FILE")
    ] = None
    data: Annotated[
        Path | None,
        _what(
            help="The official file, or a folder that holds it, instead of the hub's copy.",
            metavar="PATH",
        ),
    ] = None
    recipe: Annotated[
        list[str] | None,
        _what(
            help="One published row: its tasks, models, settings; may be repeated for rows of the "
            "same models.",
            metavar="NAME",
        ),
    ] = None
    system: Annotated[
        list[str] | None,
        _who(help="Which system answers; may be repeated. By default the task's.", metavar="NAME"),
    ] = None
    mode: Annotated[
        Literal["plain", "lossless", "fused", "paper", "rag"] | None,
        _who(help="One system instead."),
    ] = None
    eta: Annotated[float | None, _who(help="With --mode fused or paper.", metavar="NUMBER")] = None
    transfer: Annotated[
        str | None,
        _who(
            help="With --mode fused: boost, distill, adaptive, mixture or one of --rules.",
            metavar="RULE",
        ),
    ] = None
    rules: Annotated[
        Path | None,
        _who(help="Python file that calls rapid.register_transfer; it is run.", metavar="FILE"),
    ] = None
    max_draft: Annotated[
        int | None, _who(help="With --mode: tokens per block.", metavar="NUMBER")
    ] = None
    target: Annotated[
        str | None, _who(help=f"Checkpoint; by default {TARGET}.", metavar="MODEL")
    ] = None
    drafter: Annotated[
        str | None, _who(help=f"Checkpoint; by default {DRAFTER}.", metavar="MODEL")
    ] = None
    dtype: Annotated[
        str | None,
        _who(
            help="Of both models: float32, bfloat16 or float16; by default float32 on a CPU.",
            metavar="NAME",
        ),
    ] = None
    url: Annotated[
        str | None, _who(help="Ask a running server instead of loading models.", metavar="URL")
    ] = None
    api_key: Annotated[
        str | None, _who(envvar="RAPID_API_KEY", help="If the server wants one.", metavar="KEY")
    ] = None
    embedder: Annotated[
        str | None,
        _who(
            help="lexical, sentence-transformers or bge-m3, instead of the task's; lexical needs "
            "no weights.",
            metavar="NAME",
        ),
    ] = None
    judge_url: Annotated[
        str | None,
        _who(help="OpenAI-compatible endpoint of the judge.", metavar="URL"),
    ] = None
    judge_model: Annotated[str | None, _who(help="Its model.", metavar="MODEL")] = None
    limit: Annotated[int | None, _what(min=1, help="Only the first items.", metavar="NUMBER")] = (
        None
    )
    item_seed: Annotated[
        int | None,
        _what(
            help="Other generated documents than the task's own, for tasks such as laptop.",
            metavar="NUMBER",
        ),
    ] = None
    shard: Annotated[
        str | None,
        _how(
            help="Only the I-th of N parts of the items, in a folder of its own within OUT; a "
            "report of OUT is of all parts.",
            metavar="I/N",
        ),
    ] = None
    reuse_prefill: Annotated[
        bool,
        _how(
            "--reuse-prefill",
            help="Each text is read once for all systems; times of prefill then say nothing.",
        ),
    ] = False
    batch: Annotated[
        int | None,
        _how(
            min=1,
            help="Answers at once in a process; by default 8, on CUDA 1.",
            metavar="NUMBER",
        ),
    ] = None
    workers: Annotated[
        int | None,
        _how(min=1, help="Processes; by default one per core, on CUDA 1.", metavar="NUMBER"),
    ] = None
    node: Annotated[
        str | None,
        _how(
            help="Recipes, by default all of Table 1, on all GPUs of this machine, such as 8xh100.",
            metavar="NxGPU",
        ),
    ] = None
    quantization: Annotated[
        str | None,
        _how(help="With --node: fp8 or int4, of the large models' weights.", metavar="NAME"),
    ] = None
    compare: Annotated[
        tuple[Path, Path] | None,
        _what(
            help="Run nothing: the differences of two kept runs over the same items, the second "
            "minus the first.",
            metavar="RUN RUN",
        ),
    ] = None
    out_dir: Annotated[
        Path | None,
        _how(
            "--out",
            file_okay=False,
            help="Folder of the run; by default .eval/NAME. The same command goes on where it "
            "was interrupted.",
            metavar="DIR",
        ),
    ] = None
    dry_run: Annotated[bool, _how("--dry-run", help="Only show what would be run.")] = False
    is_list: Annotated[bool, _how("--list", help="Show tasks, recipes and systems.")] = False
    as_json: Annotated[bool, _how("--json", help="With --list: print JSON, for programs.")] = False


def gather_options(command: Callable[[EvalOptions], None]) -> Callable[..., None]:
    """Return a command whose parameters are the fields of `EvalOptions`, which Typer reads."""

    @wraps(command)
    def call(**given: Any) -> None:
        command(EvalOptions(**given))

    vars(call)["__signature__"] = inspect.signature(EvalOptions, eval_str=True)
    return call
