// The text of a document on the right, with the cited passage marked.

import { byId, legible, make, number } from "./dom.js";
import { offsetsIn } from "./places.js";

const BLOCK = 4000; // characters of a block, of which only those on the screen are laid out

/** Returns where the blocks of a text begin: with its pages, and else at line ends, where there are any. */
export function cutBlocks(text, pages = []) {
  const starts = [];
  const limits = [...new Set(pages), text.length].filter((each) => each > 0);
  for (let start = 0, next = 0; start < text.length; ) {
    starts.push(start);
    while (limits[next] <= start) next += 1;
    const line = text.indexOf("\n", start + BLOCK);
    let end = line < 0 || line > start + 2 * BLOCK ? start + 2 * BLOCK : line + 1;
    // Not between the two halves of a character.
    if (/[\udc00-\udfff]/.test(text[end] ?? "")) end += 1;
    start = Math.min(end, limits[next]);
  }
  return starts;
}

export class Reader {
  constructor(documents, changeView) {
    Object.assign(this, { documents, changeView });
    this.shown = null; // the document whose text is shown
    this.text = "";
    this.pages = [];
    this.blocks = [];
    this.opener = null;
    byId("back").onclick = () => this.goBack();
  }

  /**
   * Shows a document, and marks the characters from `start` to `end` where there is a source. What a
   * person asked for moves the view and the focus there.
   */
  async open(document_, source = null, { moves = true } = {}) {
    this.opener = moves && source ? document.activeElement : null;
    if (moves) this.changeView("reader");
    byId("reader-place").textContent = source?.place ?? legible(document_.name);
    byId("back").hidden = this.opener === null;
    try {
      if (this.shown !== document_) await this.load(document_);
      if (this.shown !== document_) return; // another one was opened meanwhile
      if (source?.part.pages) byId("reader-place").textContent = `${source.place} of ${number(this.pages.length)}`;
      this.mark(source, moves);
    } catch (failure) {
      this.clear(`The text cannot be shown: ${failure.message}`);
    }
  }

  async load(document_) {
    this.clear("Loading the text…");
    const wanted = (this.wanted = document_);
    const { text, pages } = await this.documents.read(document_);
    if (this.wanted !== wanted) return;
    this.text = text;
    this.pages = offsetsIn(text, pages);
    const starts = cutBlocks(text, this.pages);
    this.blocks = starts.map((start, index) => {
      const node = make("div", { class: "block" });
      const block = { node, start, end: starts[index + 1] ?? text.length };
      this.fill(block, null);
      return block;
    });
    byId("reader-text").replaceChildren(...this.nodes());
    this.shown = document_;
  }

  /** Returns the blocks, with a heading before each page; one without text begins where the next does. */
  nodes() {
    const nodes = [];
    let page = 0;
    const begin = (offset) => {
      for (; this.pages[page] <= offset; page += 1) {
        const title = `Page ${number(page + 1)} of ${number(this.pages.length)}`;
        nodes.push(make("h3", { class: "page" }, title));
      }
    };
    for (const block of this.blocks) {
      begin(block.start);
      nodes.push(block.node);
    }
    begin(this.text.length);
    return nodes;
  }

  mark(source, moves) {
    for (const block of this.blocks.filter((each) => each.marked)) this.fill(block, null);
    if (!source) {
      byId("reader-text").scrollTop = 0;
      return;
    }
    const [start, end] = offsetsIn(this.text, [source.start, source.end]);
    for (const block of this.blocks) if (block.start < end && start < block.end) this.fill(block, { start, end });
    const first = byId("reader-text").querySelector("mark");
    if (!first) return;
    first.tabIndex = -1;
    if (moves) first.focus({ preventScroll: true });
    first.scrollIntoView({ block: "center" });
    // Blocks before it may have been laid out only now, and be higher than was thought.
    requestAnimationFrame(() => first.scrollIntoView({ block: "center" }));
  }

  fill(block, span) {
    const { start, end, node } = block;
    const first = span ? Math.max(start, span.start) : end;
    const last = span ? Math.min(end, span.end) : end;
    node.textContent = this.text.slice(start, first);
    if (span) node.append(make("mark", {}, this.text.slice(first, last)), this.text.slice(last, end));
    block.marked = span !== null;
  }

  clear(note) {
    Object.assign(this, { shown: null, text: "", pages: [], blocks: [], wanted: null });
    byId("reader-text").replaceChildren(make("p", {}, note));
  }

  /** Shows a document no more that is deleted. */
  forget(document_) {
    if (this.shown === document_) this.clear("This document is deleted.");
  }

  goBack() {
    this.changeView("conversation");
    this.opener?.focus();
  }
}
