"""The text of an HTML page as it is seen: without scripts, styles and hidden parts."""

from __future__ import annotations

import re
from collections.abc import Mapping

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
    html, _ = decode_text(data, declared[1].decode() if declared else None)
    # A target, because lxml's trees end silently at 2,048 elements inside each other.
    parser = etree.HTMLParser(encoding="utf-8", huge_tree=True, target=_SeenText())
    return str(etree.fromstring(html.encode() or b" ", parser))


class _SeenText:
    """What lxml tells of a page's elements as it meets them."""

    def __init__(self) -> None:
        self._blocks = Blocks()
        self._num_pre = 0
        self._num_unseen = 0  # open elements that are not seen or stand in one

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        if tag in _BLOCKS and not self._num_unseen:
            self._end_block()
        if self._num_unseen or tag in _UNSEEN or _is_hidden(attributes):
            self._num_unseen += 1
        elif tag == "br":
            self._blocks.write("\n")
        elif tag in ("td", "th", "tr"):
            self._blocks.open_frame()
        elif tag == "pre":
            self._num_pre += 1
        elif tag == "li":
            self._blocks.mark = ITEM
        elif tag in _BLOCKS and tag[1:].isdigit():
            self._blocks.mark = "#" * int(tag[1]) + " "

    def data(self, text: str) -> None:
        if not self._num_unseen:
            self._blocks.write(text if self._num_pre else re.sub(r"[ \t\n]+", " ", text))

    def end(self, tag: str) -> None:
        if self._num_unseen:
            self._num_unseen -= 1
        elif tag == "tr":
            self._blocks.close_row()
        elif tag in ("td", "th"):
            self._blocks.close_cell()
        elif tag in _BLOCKS:
            self._end_block()
            self._num_pre -= tag == "pre"
            self._blocks.mark = ""

    def close(self) -> str:
        return self._blocks.finish()

    def _end_block(self) -> None:
        self._blocks.end_block(keep_spaces=self._num_pre > 0)


def _is_hidden(attributes: Mapping[str, str]) -> bool:
    style = attributes.get("style", "").replace(" ", "").lower()
    return "hidden" in attributes or "display:none" in style
