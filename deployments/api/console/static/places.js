// Places in texts. The server counts characters as Python does; JavaScript's strings count some twice.

import { legible } from "./dom.js";

/** Returns for each number of characters where it is in a JavaScript string. */
export function offsetsIn(text, numbers) {
  if (!/[\ud800-\udbff]/.test(text)) return numbers;
  const found = new Map();
  let offset = 0;
  let count = 0;
  for (const wanted of [...new Set(numbers)].sort((a, b) => a - b)) {
    for (; count < wanted && offset < text.length; count += 1) offset += text.codePointAt(offset) > 0xffff ? 2 : 1;
    found.set(wanted, offset);
  }
  return numbers.map((each) => found.get(each));
}

const span = (unit, [first, last]) => (first === last ? `${unit} ${first}` : `${unit}s ${first} to ${last}`);

/** Says where a passage stands: by pages where its file has them, else by lines. */
export function namePlace(part) {
  const name = legible(part.document);
  if (part.pages) return `${name}, ${span("page", part.pages)}`;
  if (part.lines) return `${name}, ${span("line", part.lines)}`;
  return name;
}

const EVIDENCE = {
  copied: "these words stand there",
  needed: "the statement needs this passage",
  present: "most of its words stand there",
};

/**
 * Returns the numbered sources of an answer, `{place, why, part, start, end}` with offsets in
 * characters, and its marks, `{end, number}`: behind which character of the answer each is named.
 */
export function listSources(receipt) {
  const sources = [];
  const numbers = new Map();
  const marks = new Map();
  const cited = (receipt.citations ?? []).filter((each) => each.choice === 0);
  for (const each of cited.sort((a, b) => a.end - b.end)) {
    const key = `${each.document}:${each.document_start}:${each.document_end}`;
    if (!numbers.has(key)) {
      const { document_start: start, document_end: end } = each;
      sources.push({ place: namePlace(each), why: EVIDENCE[each.evidence], quote: each.quote, part: each, start, end });
      numbers.set(key, sources.length);
    }
    marks.set(`${each.end}:${key}`, { end: each.end, number: numbers.get(key) });
  }
  if (!sources.length) {
    for (const each of receipt.chunks ?? []) {
      const { start, end } = each;
      sources.push({ place: namePlace(each), why: "found for the question", part: each, start, end });
    }
  }
  return { sources, marks: [...marks.values()] };
}
