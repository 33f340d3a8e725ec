// Who wrote an answer: its tokens told apart, and of the chosen one how likely it was and its passage.

import { button, make, number, plural } from "./dom.js";
import { namePlace } from "./places.js";

const WRITERS = {
  drafted: "drafted, and kept by the target",
  corrected: "written in place of a draft",
  bonus: "added by the target to a whole draft",
  target: "the target's own",
  drafter: "the drafter's own",
};
const MOVES = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -1, ArrowDown: 1, Home: -Infinity, End: Infinity };

/** Says of a text that cannot be seen what it is. */
const name = (text) => text.trim() || (text.includes("\n") ? "line break" : "space");

function percent(prob) {
  if (prob === null) return "not computed";
  if (prob > 0 && prob < 0.0001) return "below 0.01 %";
  return `${(100 * prob).toFixed(prob < 0.1 ? 2 : 1)} %`;
}

export class WhoWrote {
  /** `receipt` explains `text`, the answer; `openSource(source)` shows a passage. */
  constructor(receipt, text, openSource) {
    Object.assign(this, { receipt, openSource });
    const { tokens, truncated } = receipt.explain;
    this.tokens = tokens[0].filter((each) => each.text && !each.is_thinking);
    this.options = this.tokens.map((token, index) => this.option(token, index));
    this.list = make("div", {
      class: "tokens",
      role: "listbox",
      "aria-label": "Tokens of the answer",
      "aria-orientation": "horizontal",
      onkeydown: (event) => this.move(event),
      onclick: (event) => this.choose(this.options.indexOf(event.target.closest("[role=option]"))),
    });
    const rest = text.slice(this.tokens.reduce((end, each) => end + each.text.length, 0));
    this.list.append(...this.options);
    this.details = make("div", { class: "token-details", role: "status" });
    this.node = make("div", { class: "who-wrote" }, this.legend(), this.list);
    if (truncated) {
      this.node.append(make("p", { class: "detail" }, `Only ${plural(tokens[0].length, "token")} are explained. ${rest}`));
    }
    this.node.append(this.details);
    if (this.options.length) this.choose(0, { moves: false });
  }

  option({ text, writer }, index) {
    const given = { role: "option", class: `token ${writer}`, tabindex: -1, "aria-selected": "false" };
    return make("span", { ...given, "aria-label": `${name(text)}, ${WRITERS[writer]}`, "data-index": index }, text);
  }

  legend() {
    const counts = new Map();
    for (const { writer } of this.tokens) counts.set(writer, (counts.get(writer) ?? 0) + 1);
    const items = Object.keys(WRITERS).filter((each) => counts.has(each));
    const says = (writer) => make("li", {}, make("span", { class: `token ${writer}` }, number(counts.get(writer))), ` ${WRITERS[writer]}`);
    return make("ul", { class: "legend", "aria-label": "Who wrote how many tokens" }, ...items.map(says));
  }

  move(event) {
    const step = MOVES[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const last = this.options.length - 1;
    this.choose(Math.min(last, Math.max(0, this.chosen + step)));
  }

  choose(index, { moves = true } = {}) {
    if (index < 0) return;
    const before = this.options[this.chosen];
    before?.setAttribute("aria-selected", "false");
    before?.setAttribute("tabindex", "-1");
    this.chosen = index;
    const option = this.options[index];
    option.setAttribute("aria-selected", "true");
    option.setAttribute("tabindex", "0");
    if (moves) option.focus();
    this.tell(this.tokens[index]);
  }

  tell({ text, writer, target, drafter, sampled, passage }) {
    const isFused = this.receipt.eta > 0;
    const rows = [
      ["Target, p", percent(target)],
      ["Drafter, q", percent(drafter)],
      [isFused ? "Both, fused" : "Sampled", percent(sampled)],
    ];
    const part = this.receipt.chunks.find((each) => each.id === passage);
    const numbers = make("dl", {}, ...rows.map(([term, value]) => make("div", {}, make("dt", {}, term), make("dd", {}, value))));
    const source = part && { place: namePlace(part), part, start: part.start, end: part.end };
    const where = source
      ? make("p", {}, "Its words stand in ", button(source.place, () => this.openSource(source), { class: "source" }))
      : make("p", { class: "detail" }, "Its words stand in no passage that was retrieved.");
    this.details.replaceChildren(make("p", {}, make("q", {}, name(text)), ` ${WRITERS[writer]}`), numbers, where);
  }
}
