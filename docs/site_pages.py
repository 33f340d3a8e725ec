"""What the site has beside the pages of this folder, as MkDocs asks for it while it builds.

The reference is made from the code, so that it is always that of the code beside it: settings,
routes, commands and metrics. Files outside this folder that a page links to are copied, so that
their links lead somewhere on the site as they do in the repository.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]*)(#[^)\s]*)?\)")
COPIES = "files"  # the site's folder of files from outside docs/
_CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


# --- files outside docs/ --------------------------------------------------------------------------


def find_linked_files(page: str, text: str) -> Iterator[str]:
    """Yield the files outside docs/ that a page links to, by their paths in the repository."""
    for path, _ in LINK.findall(_CODE.sub("", text)):
        found = normpath(join(dirname(page), path))
        if path and not found.startswith("docs/") and (ROOT / found).is_file():
            yield found


def move_links(page: str, text: str, copied: frozenset[str]) -> str:
    """Return a page whose links out of docs/ lead to the copies; those to no copy become text.

    Args:
        page: Path of the page in the repository.
        text: The page, in which code is left alone.
        copied: Paths in the repository of the files that are copied.
    """
    here = dirname(_place(page))

    def move(link: re.Match[str]) -> str:
        path, anchor = link[1], link[2] or ""
        if not path:
            return link[0]
        found = normpath(join(dirname(page), path))
        if found in copied or found.startswith("docs/"):
            return f"]({relpath(_place(found), here or '.')}{anchor})"
        return "](#)"

    parts = re.split(f"({_CODE.pattern})", text, flags=re.DOTALL)
    moved = "".join(part if index % 2 else LINK.sub(move, part) for index, part in enumerate(parts))
    moved = re.sub(r"\[([^\[\]]*)\]\(#\)", r"\1", moved)
    return re.sub(r'(src|srcset)="docs/', r'\1="../', moved)


def _place(path: str) -> str:
    """Return where a file of the repository is on the site."""
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{COPIES}/{path}"


# --- the reference --------------------------------------------------------------------------------


def describe_configuration() -> str:
    """Return the page of all settings, from the models that validate them."""
    from deployments.config.named_models import ModelsConfig
    from deployments.config.serve_config import ServeConfig

    page = [
        "# Configuration\n",
        "Every key under `args` of a configuration file, from the models that validate it. Unknown "
        "keys are refused. [Operations](../operations.md) says what to set.\n",
    ]
    waiting: list[type[BaseModel]] = [ServeConfig, ModelsConfig]
    for model in waiting:
        page.append(f"\n## {model.__name__}\n\n{_first_paragraph(model)}\n")
        told = attributes_of(model)
        rows = [
            (
                f"`{name}`",
                describe_type(field.annotation),
                _default_of(field),
                told.get(name) or field.description or "",
            )
            for name, field in model.model_fields.items()
        ]
        page.append(_table(("key", "type", "default", "meaning"), rows))
        for field in model.model_fields.values():
            waiting += [each for each in _models_in(field.annotation) if each not in waiting]
    return "\n".join(page)


def attributes_of(model: type[BaseModel]) -> dict[str, str]:
    """Return what the docstrings of a model and its bases say of each attribute."""
    told: dict[str, str] = {}
    for each in reversed(model.__mro__):
        text = inspect.cleandoc(each.__dict__.get("__doc__") or "").partition("Attributes:\n")[2]
        for name, what in re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", text, flags=re.MULTILINE):
            told[name] = " ".join(what.split()).replace("``", "`")
    return told


def describe_commands() -> str:
    """Return the page of all commands, as their ``--help`` says it."""
    import click
    from typer.main import get_command

    from deployments.cli import app

    page = ["# Commands\n", "As `rapid COMMAND --help` says it.\n"]

    def add(command: Any, words: str) -> None:
        children = getattr(command, "commands", None)
        page.append(f"\n## {words}\n\n{inspect.cleandoc(command.help or '')}\n")
        context = click.Context(command, info_name=words)
        rows = [
            (f"`{'`, `'.join(each.opts)}`", getattr(each, "help", None) or "")
            for each in command.get_params(context)
            if each.name != "help"
        ]
        if rows:
            page.append(_table(("option", "meaning"), rows))
        for name, child in (children or {}).items():
            add(child, f"{words} {name}")

    add(get_command(app), "rapid")
    return "\n".join(page)


def describe_metrics() -> str:
    """Return the page of all metrics, from their definitions."""
    from deploy.watching import list_metrics

    rows = [
        (f"`{each.name}`", each.kind, ", ".join(f"`{x}`" for x in each.labels), each.what)
        for each in list_metrics()
    ]
    return (
        "# Metrics\n\nAs Prometheus sees them; a histogram has `_bucket`, `_sum` and `_count`. "
        "[Watch](../operations.md#watch) says where, and what to look at.\n\n"
        + _table(("metric", "kind", "labels", "meaning"), rows)
    )


def describe_api() -> str:
    """Return the page of all routes: what a server shows at ``/docs``, within the site."""
    from deployments.api.ingress import Ingress
    from deployments.api.reference.openapi import describe
    from deployments.api.reference.reference_page import render_page
    from deployments.config.api_config import ApiConfig

    nobody: Any = None  # routes are described and none is called
    page = render_page(describe(Ingress(nobody, ApiConfig(model="any"))._app.routes))
    return f'# HTTP routes\n\n<div markdown="0">{page.partition("</h1>")[2]}</div>\n'


REFERENCE: dict[str, Callable[[], str]] = {
    "reference/configuration.md": describe_configuration,
    "reference/commands.md": describe_commands,
    "reference/metrics.md": describe_metrics,
    "reference/api.md": describe_api,
}


def _first_paragraph(model: type[BaseModel]) -> str:
    text = inspect.cleandoc(model.__doc__ or "").partition("Attributes:")[0]
    return " ".join(text.split()).replace("``", "`")


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for each in get_args(annotation):
        yield from _models_in(each)


def describe_type(annotation: Any) -> str:
    """Return what a value may be; settings of their own are links to their section."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return describe_type(parts[0])
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(describe_type, parts)))
    if origin is Literal:
        return " or ".join(f"`{each}`" for each in parts)
    if origin is not None:
        inner = [describe_type(each) for each in parts if each is not Ellipsis]
        return f"{origin.__name__} of {' to '.join(dict.fromkeys(inner))}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"[{annotation.__name__}](#{annotation.__name__.lower()})"
    return "none" if annotation is NoneType else str(getattr(annotation, "__name__", annotation))


def _default_of(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True, validated_data={})
    return "its own" if isinstance(default, BaseModel) else f"`{default}`"


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "".join(
        f"| {' | '.join(' '.join(cell.split()).replace('|', chr(92) + '|') for cell in line)} |\n"
        for line in lines
    )


# --- what MkDocs calls ----------------------------------------------------------------------------


def on_files(files: Any, config: Any) -> Any:
    """Add the reference and the copies."""
    from mkdocs.structure.files import File

    pages = {
        f"docs/{each.src_uri}": each.content_string
        for each in files
        if each.is_documentation_page()
    }
    copied = frozenset(
        path for page, text in pages.items() for path in find_linked_files(page, text)
    )
    config.extra["copied"] = copied
    for path in sorted(copied):
        content = (ROOT / path).read_bytes()
        files.append(File.generated(config, _place(path), content=content))
    for path, describe in REFERENCE.items():
        files.append(File.generated(config, path, content=describe()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Make the links of a page lead to what is on the site."""
    uri = page.file.src_uri
    path = uri.removeprefix(f"{COPIES}/") if uri.startswith(f"{COPIES}/") else f"docs/{uri}"
    return move_links(path, markdown, config.extra["copied"])
