"""The pages link to what there is, in the repository and on the site, whose reference is whole."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml

from deploy.watching import list_metrics
from deployments.config.serve_config import ServeConfig
from rapid.config import SpeculationConfig

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs"))
import site_pages  # noqa: E402

PAGES = [
    *("README.md", "CONTRIBUTING.md", "benchmarks/README.md"),
    *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")),
]


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", each).strip().lower() for each in headings]
    return {re.sub(r"[^\w\- ]", "", each).replace(" ", "-") for each in plain}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_a_file_and_a_heading(page: str) -> None:
    text = site_pages._CODE.sub("", (ROOT / page).read_text())
    for path, anchor in site_pages.LINK.findall(text):
        target = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert target.exists(), path
        if anchor and target.suffix == ".md":
            assert anchor[1:] in anchors_of(target), f"{path}{anchor}"


def test_the_site_has_every_page_once() -> None:
    site = yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)
    places = [
        place
        for part in site["nav"]
        for entries in part.values()
        for e in entries
        for place in e.values()
    ]
    written = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert sorted(places) == sorted(written | site_pages.REFERENCE.keys())


class _Loader(yaml.SafeLoader):
    """Reads the file without the function that makes anchors."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def test_links_out_of_the_pages_lead_to_copies_on_the_site() -> None:
    page = "[a](../README.md#ask), [b](../examples), [c](api.md), `[d](../x)` [e](https://e.org)"
    moved = site_pages.move_links("docs/own-rule.md", page, frozenset({"README.md"}))
    assert moved == ("[a](files/README.md#ask), b, [c](api.md), `[d](../x)` [e](https://e.org)")
    back = site_pages.move_links("README.md", "[a](docs/api.md) [b](x)", frozenset())
    assert back == "[a](../api.md) b"
    assert list(site_pages.find_linked_files("docs/x.md", page)) == ["README.md"]


def test_the_reference_names_every_setting_metric_and_command() -> None:
    configuration = site_pages.describe_configuration()
    for model in (ServeConfig, SpeculationConfig):
        for name in model.model_fields:
            assert f"\n| `{name}` |" in configuration
    assert "| `eta` | float | `10.0` | Strength of the move; 0 samples" in configuration
    described = set(re.findall(r"^\| `(ray_\w+)` ", site_pages.describe_metrics(), re.MULTILINE))
    assert described == {each.name for each in list_metrics()}
    commands = site_pages.describe_commands()
    assert "\n## rapid documents add\n" in commands
    assert "\n| `--rules` | Python file" in commands
    assert 'id="ChatRequest"' in site_pages.describe_api()


@pytest.mark.parametrize(
    ("annotation", "told"),
    [
        (float | None, "float or none"),
        (Annotated[int, "x"], "int"),
        (Literal["a", "b"], "`a` or `b`"),
        (dict[str, tuple[int, ...]], "dict of str to tuple of int"),
        (SpeculationConfig | None, "[SpeculationConfig](#speculationconfig) or none"),
        (
            Annotated[Annotated[ServeConfig, 1] | Literal["t"], 2],
            "[ServeConfig](#serveconfig) or `t`",
        ),
    ],
)
def test_a_type_is_told_in_words(annotation: Any, told: str) -> None:
    assert site_pages.describe_type(annotation) == told


def test_settings_are_described_but_for_those_whose_names_say_it() -> None:
    page = site_pages.describe_configuration()
    undescribed = re.findall(r"^\| `(\w+)` .* \|  \|$", page, re.MULTILINE)
    plain = {"kind", "engine", "pool", "retrieval", "embedder", "store", "api_key", "timeout_s"}
    assert set(undescribed) <= plain | {"min_replicas", "max_replicas", "chunk_tokens"}
