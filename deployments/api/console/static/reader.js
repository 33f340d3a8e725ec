// The text of a document on the right, with the cited passage marked.

import { byId, make } from "./dom.js";
import { offsetsIn } from "./places.js";

const BLOCK = 4000; // characters of a block, of which only those on the screen are laid out

/** Returns where the blocks of a text begin: at line ends, where there are any. */
export function cutBlocks(text) {
  const starts = [];
  for (let start = 0; start < text.length; ) {
    starts.push(start);
    const line = text.indexOf("\n", start + BLOCK);
    const end = line < 0 || line > start + 2 * BLOCK ? start + 2 * BLOCK : line + 1;
    // Not between the two halves of a character.
    start = /[\udc00-\udfff]/.test(text[end] ?? "") ? end + 1 : end;
  }
  return starts;
}

export class Reader {
  constructor(documents, changeView) {
    Object.assign(this, { documents, changeView });
    this.shown = null; // the document whose text is shown
    this.text = "";
    this.blocks = [];
    this.opener = null;
    byId("back").onclick = () => this.goBack();
  }

  /** Shows a document, and marks the characters from `start` to `end` where there is a source. */
  async open(document_, source = null) {
    this.opener = source && document.activeElement;
    this.changeView("reader");
    byId("reader-place").textContent = source?.place ?? document_.name;
    byId("back").hidden = this.opener === null;
    try {
      if (this.shown !== document_) await this.load(document_);
      this.mark(source);
    } catch (failure) {
      this.clear(`The text cannot be shown: ${failure.message}`);
    }
  }

  async load(document_) {
    this.clear("Loading the text…");
    const wanted = (this.wanted = document_);
    const text = await this.documents.read(document_);
    if (this.wanted !== wanted) return;
    this.text = text;
    const starts = cutBlocks(text);
    this.blocks = starts.map((start, index) => {
      const node = make("div", { class: "block" });
      const block = { node, start, end: starts[index + 1] ?? text.length };
      this.fill(block, null);
      return block;
    });
    byId("reader-text").replaceChildren(...this.blocks.map((each) => each.node));
    this.shown = document_;
  }

  mark(source) {
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
    first.focus({ preventScroll: true });
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
    Object.assign(this, { shown: null, text: "", blocks: [], wanted: null });
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
