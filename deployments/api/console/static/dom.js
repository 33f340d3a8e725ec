// Making parts of the page. Texts become text nodes, never markup: documents and answers may hold any.

export const byId = (id) => document.getElementById(id);

/** Returns an element with attributes, listeners (`onclick`: a function) and children. */
export function make(tag, given = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (typeof value === "function") node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.filter((each) => each != null));
  return node;
}

export const button = (text, onclick, given = {}) => make("button", { type: "button", onclick, ...given }, text);

/** Returns a name with signs that turn the writing around shown as such: `\u202efdp.exe` is no PDF. */
export const legible = (name) => name.replace(/[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, "\ufffd");

export const number = (value) => value.toLocaleString("en-US");

export const plural = (count, one, many = `${one}s`) => `${number(count)} ${count === 1 ? one : many}`;

/** Says how long something will take, as a person would. */
export function duration(seconds) {
  if (seconds < 90) return `${Math.max(1, Math.round(seconds))} s`;
  return `${Math.round(seconds / 60)} min`;
}

/** A bar for something of which a share is done, with percent and the time that is left. */
export class Progress {
  constructor(what) {
    this.node = make("div", { class: "progress" });
    this.bar = make("progress", { max: 1, "aria-label": what });
    this.text = make("span", {}, what);
    this.node.append(this.bar, this.text);
    this.begin(what);
  }

  begin(what) {
    this.what = what;
    this.began = performance.now();
    this.first = null;
    this.bar.removeAttribute("value");
    this.bar.setAttribute("aria-label", what);
    this.text.textContent = what;
  }

  /** Shows that `done` of `of` is done; another `what` begins anew. */
  show(what, done, of) {
    if (what !== this.what) this.begin(what);
    const share = of ? Math.min(1, done / of) : 0;
    this.bar.value = share;
    const now = performance.now();
    this.first ??= { share, now };
    const gained = share - this.first.share;
    const left = gained > 0 ? ((1 - share) / gained) * ((now - this.first.now) / 1000) : null;
    const time = left === null || share === 1 ? "" : `, ${duration(left)} left`;
    this.text.textContent = `${what}: ${Math.floor(100 * share)} %${time}`;
  }
}

/**
 * A text that grows piece by piece; what comes within one frame of the screen is one change.
 *
 * Each paragraph is a block of its own, so that a piece has the browser lay out the last one alone.
 */
export class GrowingText {
  constructor(node, changed = () => {}) {
    Object.assign(this, { parent: node, changed, frame: null });
    this.clear();
  }

  add(piece) {
    this.text += piece;
    this.frame ??= requestAnimationFrame(() => this.flush());
  }

  flush() {
    if (this.frame !== null) cancelAnimationFrame(this.frame);
    this.frame = null;
    const end = this.text.lastIndexOf("\n\n") + 2;
    if (end > Math.max(this.shown, 1)) {
      this.show(end);
      this.last = null;
    }
    this.show(this.text.length);
    this.changed();
  }

  show(end) {
    if (end === this.shown) return;
    if (this.last === null) {
      this.last = document.createTextNode("");
      this.paragraphs.push({ start: this.shown, text: this.last });
      this.parent.append(make("div", {}, this.last));
    }
    this.last.appendData(this.text.slice(this.shown, end));
    this.shown = end;
  }

  /** Puts nodes into the text, `[offset, node]` by rising offsets; nothing may be added after that. */
  insert(places) {
    let at = this.paragraphs.length - 1;
    for (const [offset, node] of [...places].reverse()) {
      while (at > 0 && this.paragraphs[at].start >= offset) at -= 1;
      const { start, text } = this.paragraphs[at];
      text.splitText(Math.min(offset - start, text.length)).before(node);
    }
  }

  clear() {
    for (const each of this.paragraphs ?? []) each.text.parentNode.remove();
    Object.assign(this, { text: "", shown: 0, paragraphs: [], last: null });
  }
}
