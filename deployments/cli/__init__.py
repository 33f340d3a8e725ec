"""The ``rapid`` command line.

Commands import their dependencies when they run, so that ``rapid --help`` is quick.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from deployments.cli import (
    ask_command,
    doctor_command,
    documents_command,
    draining,
    evaluating,
    init_command,
    keys,
    logs_command,
    manifests_command,
    models,
    planning,
    replaying,
    samples,
    serving,
    status_command,
)
from deployments.cli.terminal import fail
from rapid.errors import ConfigurationError


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        """Run a command; a configuration that it rejects ends it with the message alone."""
        try:
            return super().invoke(ctx)
        except ConfigurationError as error:
            fail(str(error))


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    help=(
        "Ask many questions of very long documents, with your own open models.\n\n"
        "The models of the default configuration live in the package and understand only "
        "documents made by 'rapid sample-document'. For text of your own, serve a configuration "
        "with real models."
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


app.command("ask")(ask_command.ask)
app.add_typer(documents_command.documents, name="documents")
app.command("replay")(replaying.replay)
app.command("sample-document")(samples.sample_document)
app.command("init")(init_command.init)
app.command("serve")(serving.serve)
app.command("doctor")(doctor_command.doctor)
app.command("apply")(serving.apply)
app.command("stop")(serving.stop)
app.command("status")(status_command.status)
app.command("logs")(logs_command.logs)
app.command("check-config")(serving.check_config)
app.add_typer(models.app, name="models")
app.command("plan")(planning.plan)
app.command("eval")(evaluating.evaluate)
app.command("hash-key")(keys.hash_key)
app.add_typer(keys.app, name="keys")
app.command("drain")(draining.drain)
app.command("manifests")(manifests_command.manifests)
