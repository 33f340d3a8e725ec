"""The text of an HTML page as it is seen: without scripts, styles and hidden parts."""

from __future__ import annotations

import re
from typing import Any

from lxml import etree

from library.parsing.blocks import ITEM, Blocks
from library.parsing.plain_text import decode_text

_UNSEEN = {
    *("audio", "canvas", "embed", "iframe", "noscript", "object", "script", "style"),
    *("svg", "template", "video"),
}
_BLOCKS = {
    *("address", "article", "aside", "blockquote", "body", "caption", "dd", "details", "dialog"),
    *("div", "dl", "dt", "fieldset", "figcaption", "figure", "footer", "form", "header", "hr"),
    *("legend", "li", "main", "nav", "ol", "option", "p", "pre", "section", "summary", "table"),
    *("title", "ul", "h1", "h2", "h3", "h4", "h5", "h6"),
}
_DECLARED = re.compile(rb"""<meta[^>]{1,200}charset\s*=\s*["']?([\w-]{1,40})""", re.IGNORECASE)
_HEAD_BYTES = 1024  # HTML requires the encoding's declaration within them


def read_html(data: bytes) -> str:
    """Return a page's text: blocks apart, headings and lists marked as in Markdown."""
    declared = _DECLARED.search(data[:_HEAD_BYTES])
    html = decode_text(data, declared[1].decode() if declared else None)
    parser = etree.HTMLParser(
        encoding="utf-8", remove_comments=True, remove_pis=True, huge_tree=True, no_network=True
    )
    root = etree.fromstring(html.encode() or b" ", parser)
    blocks = Blocks()
    num_pre = 0
    if root is None:
        return ""
    walk = etree.iterwalk(root, events=("start", "end"))
    for event, element in walk:
        tag = element.tag if isinstance(element.tag, str) else ""
        is_start = event == "start"
        if tag == "pre":
            blocks.end_block(keep_spaces=num_pre > 0)
            num_pre += 1 if is_start else -1
        elif tag in _BLOCKS:
            blocks.end_block(keep_spaces=num_pre > 0)
            if tag == "li":
                blocks.mark = ITEM if is_start else ""
            elif tag[1:].isdigit():
                blocks.mark = "#" * int(tag[1]) + " " if is_start else ""
        elif tag in ("td", "th", "tr"):
            if is_start:
                blocks.open_frame()
            elif tag == "tr":
                blocks.close_row()
            else:
                blocks.close_cell()
        elif tag == "br" and is_start:
            blocks.write("\n")
        is_unseen = tag in _UNSEEN or (is_start and _is_hidden(element))
        if is_start and is_unseen:
            walk.skip_subtree()
        elif is_start:
            _write(blocks, element.text, num_pre)
        if not is_start:
            _write(blocks, element.tail, num_pre)
    return blocks.finish()


def _write(blocks: Blocks, text: str | None, num_pre: int) -> None:
    if text:
        blocks.write(text if num_pre else re.sub(r"[ \t\n]+", " ", text))


def _is_hidden(element: Any) -> bool:
    style = element.get("style", "").replace(" ", "").lower()
    return element.get("hidden") is not None or "display:none" in style
