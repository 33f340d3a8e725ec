"""A page as one file of HTML, with its pictures inside, from which nothing else is loaded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape
from pathlib import Path

from markdown_it import MarkdownIt

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem;
color: #222; background: #fff }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto }
td, th { text-align: left; white-space: nowrap; padding: .2rem .7rem;
border-bottom: 1px solid #ddd }
svg { max-width: 100%; height: auto } code { background: #eee }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # a browser would refuse to load more
_IMAGE = re.compile(r'<img src="([^"]*)" alt="([^"]*)">')


def render_page(markdown: str, title: str, pictures: Mapping[str, Path]) -> str:
    """Return a page of Markdown as HTML; `pictures` has the SVG files by their links in it."""
    body = MarkdownIt("js-default").render(markdown)
    body = _IMAGE.sub(lambda found: _inline(pictures[found[1]], found[2]), body)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta http-equiv="content-security-policy" content="{_POLICY}">'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>{body}</html>\n'
    )


def _inline(path: Path, title: str) -> str:
    """Return a picture whose ids are its own, as those of several pictures meet in one page."""
    picture = path.read_text(encoding="utf-8")
    picture = picture[picture.index("<svg") :]
    own = path.stem
    picture = re.sub(r'\bid="', f'id="{own}-', picture)
    picture = re.sub(r'href="#', f'href="#{own}-', picture)
    picture = picture.replace("url(#", f"url(#{own}-")
    return picture.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)
