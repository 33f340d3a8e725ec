"""The ``rapid`` command line.

Commands import their dependencies when they run, so that ``rapid --help`` is quick.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any

import typer

from deployments.cli import (
    doctor_command,
    documents_command,
    models,
    replaying,
    samples,
    serving,
)
from deployments.cli.command_lines import CommandGroup, CommandLine
from deployments.cli.evals import evaluating
from deployments.cli.operating import (
    draining,
    keys,
    logs_command,
    manifests_command,
    status_command,
)
from deployments.cli.questions import ask_command, chat_command
from deployments.cli.sizing import init_command, planning
from deployments.cli.terminal import USAGE, fail
from rapid.errors import ConfigurationError


class _Commands(CommandGroup):
    def invoke(self, ctx: Any) -> Any:
        """Run a command; a configuration or file that it cannot use ends it with the message."""
        try:
            return super().invoke(ctx)
        except ConfigurationError as error:
            fail(str(error), USAGE)
        except OSError as error:
            if error.filename is None:  # of a connection, say
                raise
            fail(f"{Path(error.filename).absolute()} cannot be used: {error.strerror}")


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_show_locals=False,
    help=(
        "Ask many questions of very long documents, with your own open models.\n\n"
        "The models of the default configuration live in the package and understand only "
        "documents made by 'rapid sample-document'. For text of your own, serve a configuration "
        "with real models."
    ),
    epilog=(
        "Exit status: 0 done; 1 the server refused or something failed; 2 what was typed is wrong, "
        "an option or a file that it names; 130 interrupted by Ctrl-C."
    ),
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        from importlib.metadata import version

        typer.echo(f"rapid-serve {version('rapid-serve')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    pass


_COMMANDS = (
    ("ask", ask_command.ask, "rapid ask -d report.pdf -d notes/ 'What was decided?'"),
    ("chat", chat_command.chat, "rapid chat report.pdf 'notes/*.md'"),
    ("replay", replaying.replay, "rapid replay receipt.json"),
    (
        "sample-document",
        samples.sample_document,
        "rapid sample-document --seed 7 --tokens 1000 --out sample",
    ),
    (
        "init",
        init_command.init,
        "rapid init my.yaml --gpus 4xh100 --document-tokens 60000 --people 40 --teams law,sales",
    ),
    ("serve", serving.serve, "rapid serve my.yaml --metrics-port 9100"),
    ("doctor", doctor_command.doctor, "rapid doctor my.yaml"),
    ("apply", serving.apply, "rapid apply serve_config.yaml"),
    ("stop", serving.stop, "rapid stop"),
    ("status", status_command.status, "rapid status --json"),
    ("logs", logs_command.logs, "rapid logs -f --pool target"),
    ("check-config", serving.check_config, "rapid check-config serve_config.yaml"),
    (
        "plan",
        planning.plan,
        "rapid plan --target qwen3-8b --drafter qwen3-32b --gpu h100 --context 65536 --batch 4",
    ),
    ("eval", evaluating.evaluate, "rapid eval --list"),
    ("hash-key", keys.hash_key, "rapid hash-key --new"),
    ("drain", draining.drain, "rapid drain --notice 600"),
    ("manifests", manifests_command.manifests, "rapid manifests serve_config.yaml one-node"),
)
for _name, _command, _example in _COMMANDS:
    app.command(_name, epilog=f"Example: {_example}")(_command)
_GROUPS = {"documents": documents_command.documents, "models": models.app, "keys": keys.app}
for _name, _group in _GROUPS.items():
    app.add_typer(_group, name=_name, cls=CommandGroup)
for _group in (app, *_GROUPS.values()):
    for _each in _group.registered_commands:
        # Rich keeps the ends of a docstring's lines, which the terminal would wrap once more.
        paragraphs = (inspect.getdoc(_each.callback) or "").split("\n\n")
        _each.cls = CommandLine
        _each.help = "\n\n".join(" ".join(each.split()) for each in paragraphs)
