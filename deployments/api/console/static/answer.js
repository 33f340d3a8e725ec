// One answer in the conversation: how far it is, its text, its sources, what it cost, and its troubles.

import { ask } from "./asking.js";
import { button, duration, GrowingText, make, number, plural, Progress } from "./dom.js";
import { listSources, offsetsIn } from "./places.js";
import { WhoWrote } from "./who_wrote.js";

/** Parts of a receipt's reason that say that the documents are not about the question. */
export const SAYS_NOTHING = [
  "retrieval found nothing above its floor",
  "the retrieved passages are not about the question",
  "the drafter does not find the answer in what was retrieved",
];

const LEAST_TOKENS = 5; // of an answer whose speed says something

/** Returns the tokens a second after the first, or null for an answer that is too short to tell. */
function speedOf({ usage, metrics }) {
  const isLong = usage.completion_tokens >= LEAST_TOKENS && metrics.generation_time_ms > 0;
  return isLong ? (1000 * (usage.completion_tokens - 1)) / metrics.generation_time_ms : null;
}

/**
 * Returns the line that says what an answer cost: mode, tokens read, drafted tokens kept, seconds,
 * and its speed beside that of the last `plain` answer of this page, which `speeds` keeps by model.
 */
export function describeCost(result, model, speeds) {
  const { receipt, usage, metrics } = result;
  const speed = speedOf(result);
  const plain = speeds.get(model);
  if (receipt.mode === "plain" && speed) speeds.set(model, speed);
  const beside = receipt.mode !== "plain" && speed && plain ? `about ${(speed / plain).toFixed(1)} of plain's speed` : null;
  const before = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const read = `read ${plural(usage.prompt_tokens, "token")}${before ? `, ${number(before)} from before` : ""}`;
  const kept = `${number(receipt.accepted)} of ${plural(receipt.drafted, "drafted token")} kept`;
  const seconds = (metrics.time_to_first_token_ms + metrics.generation_time_ms) / 1000;
  const parts = [receipt.mode, read, receipt.drafted ? kept : null, `${seconds.toFixed(1)} s`, beside];
  return parts.filter(Boolean).join(" · ");
}

/** Returns sentences that a reader of the answer must know. */
export function listWarnings({ receipt, finish }, hasDocuments) {
  const { reason, is_fallback, left_out, sections, citations, unsupported } = receipt;
  const isAbout = !SAYS_NOTHING.some((each) => reason.includes(each));
  const without = (unsupported ?? []).filter((each) => each.choice === 0).length;
  const isCited = (citations ?? []).some((each) => each.choice === 0);
  const nowhere = isCited
    ? `${plural(without, "statement")} without a source: check ${without === 1 ? "it" : "them"}.`
    : "The answer's words do not stand in the passages that were found: check the answer.";
  return [
    hasDocuments && !isAbout && "Nothing in the documents is about this question: check the answer.",
    isAbout && is_fallback && `Answered with less than the mode asks for: ${reason}.`,
    sections && `The documents did not fit, so the model read ${plural(sections.length, "passage")} of them.`,
    left_out && `Left out, as it did not fit: ${plural(left_out.length, "earlier message")}.`,
    finish === "length" && "The answer ended at its length limit.",
    hasDocuments && isAbout && without && nowhere,
  ].filter(Boolean);
}

const shorten = (quote) => (quote.length > 160 ? `${quote.slice(0, 160)}…` : quote); // two lines

function countUp(tell) {
  const began = performance.now();
  const tick = () => tell(Math.floor((performance.now() - began) / 1000));
  tick();
  return setInterval(tick, 1000);
}

export class Answer {
  /**
   * `actions` has `openSource(source)`, `showFirst(source)`, `followEnd()`, `showCode(body)`, `askForKey(failure)`,
   * `speeds` and `askAgain(changes)`, with changes of the body's `rapid`.
   */
  constructor(body, title, actions) {
    Object.assign(this, { body, actions });
    const { documents, file_ids } = body.rapid;
    this.hasDocuments = Boolean(documents?.length || file_ids?.length);
    this.state = make("div", { class: "state" });
    this.thoughts = make("details", { class: "thinking", hidden: true }, make("summary", {}, "Thinking"));
    this.text = make("div", { class: "text", "aria-live": "polite", "aria-busy": "true" });
    this.after = make("div", { class: "after" });
    const heading = title === null ? null : make("h4", {}, title);
    this.node = make("section", { class: "answer", "aria-label": `Answer, ${title ?? body.rapid.mode}` });
    this.node.append(...[heading, this.thoughts, this.text, this.state, this.after].filter(Boolean));
    this.growing = new GrowingText(this.text, actions.followEnd);
    this.thinking = new GrowingText(this.thoughts, actions.followEnd);
    this.showState(make("p", { class: "waiting" }, "Waiting"));
  }

  showState(...nodes) {
    this.state.replaceChildren(...nodes);
    this.actions.followEnd();
  }

  /** Asks, shows what comes, and returns the text; null if it did not come to its end. */
  async run(server, signal) {
    const began = make("p", { class: "waiting" });
    this.showState(began);
    const clock = countUp((seconds) => {
      began.textContent = `The server has the question${seconds ? `; waiting for ${duration(seconds)}` : ""}`;
    });
    let progress = null;
    const tell = {
      progress: ({ what, done, of }) => {
        if (progress === null || !progress.node.isConnected) {
          progress = new Progress(what);
          this.showState(progress.node);
        }
        progress.show(what, done, of);
      },
      text: (piece) => {
        if (this.state.firstChild) this.showState();
        this.growing.add(piece);
      },
      thinking: (piece) => {
        this.thoughts.hidden = false;
        this.thinking.add(piece);
      },
      restart: () => [this.growing, this.thinking].forEach((each) => each.clear()),
      wait: async (seconds, failure) => {
        await this.wait(seconds, failure, signal);
        this.showState(began);
      },
    };
    try {
      const result = await ask(server, this.body, tell, signal);
      this.showState();
      this.growing.flush();
      this.showEnd(result);
      return this.growing.text;
    } catch (failure) {
      this.growing.flush();
      this.showFailure(failure, signal.aborted);
      return null;
    } finally {
      clearInterval(clock);
      this.thinking.flush();
      this.text.setAttribute("aria-busy", "false");
      this.actions.followEnd();
    }
  }

  /** Counts down to the next try; ends sooner when a person says so, and fails when it is stopped. */
  wait(seconds, failure, signal) {
    const why = failure.status === 0 ? failure.message : `The server is busy: ${failure.message}`;
    const left = make("span", { "aria-hidden": "true" });
    return new Promise((resolve, reject) => {
      const until = performance.now() + 1000 * seconds;
      const settle = (how) => {
        clearInterval(timer);
        signal.removeEventListener("abort", stop);
        how();
      };
      const stop = () => settle(() => reject(new DOMException("stopped", "AbortError")));
      const tick = () => {
        const rest = Math.ceil((until - performance.now()) / 1000);
        if (rest <= 0) settle(resolve);
        else left.textContent = ` Trying again in ${duration(rest)}.`;
      };
      const timer = setInterval(tick, 250);
      signal.addEventListener("abort", stop);
      const now = button("Try now", () => settle(resolve));
      this.showState(make("div", { class: "note busy", role: "status" }, why, left, now));
      tick();
    });
  }

  showEnd(result) {
    const warnings = listWarnings(result, this.hasDocuments);
    this.after.append(...warnings.map((each) => make("p", { class: "note" }, each)));
    const { sources, marks } = listSources(result.receipt);
    this.markText(marks, sources);
    if (sources.length) {
      this.after.append(this.listOf(sources));
      this.actions.showFirst(sources[0]);
    }
    const code = button("Copy as code", () => this.actions.showCode(this.body));
    const who = this.explains(result.receipt);
    this.after.append(make("p", { class: "cost" }, describeCost(result, this.body.model, this.actions.speeds)), make("div", { class: "actions" }, ...who, code));
  }

  /** Returns the switch that shows who wrote each token in place of the text; none if nobody knows. */
  explains(receipt) {
    if (!receipt.explain?.tokens?.[0]?.some((each) => each.text && !each.is_thinking)) return [];
    let shown = null;
    const turn = () => {
      const isOn = this.text.hidden;
      shown ??= new WhoWrote(receipt, this.growing.text, this.actions.openSource);
      if (!shown.node.isConnected) this.text.after(shown.node);
      shown.node.hidden = isOn;
      this.text.hidden = !isOn;
      who.setAttribute("aria-pressed", String(!isOn));
    };
    const who = button("Who wrote this", turn, { "aria-pressed": "false" });
    return [who];
  }

  /** Puts the numbers of sources behind the statements of the answer. */
  markText(marks, sources) {
    if (!marks.length) return;
    const ends = offsetsIn(this.growing.text, marks.map((each) => each.end));
    const buttons = marks.map(({ number: which }, index) => {
      const source = sources[which - 1];
      const open = () => this.actions.openSource(source);
      const name = `Source ${which}: ${source.place}`;
      return [ends[index], button(`[${which}]`, open, { class: "mark", "aria-label": name })];
    });
    this.growing.insert(buttons);
  }

  listOf(sources) {
    const items = sources.map((source, index) => {
      const open = button(`[${index + 1}] ${source.place}`, () => this.actions.openSource(source), { class: "source" });
      const quote = source.quote ? make("q", {}, shorten(source.quote)) : null;
      return make("li", {}, open, make("span", { class: "why" }, ` ${source.why}`), quote);
    });
    return make("ol", { class: "sources", "aria-label": "Sources" }, ...items);
  }

  showFailure(failure, isStopped) {
    if (isStopped) return this.showState(make("p", { class: "note" }, "Stopped."));
    const note = make("div", { class: "note trouble", role: "alert" });
    const again = (text, changes = {}) => button(text, () => this.actions.askAgain(changes));
    if (failure.status === 401) {
      note.append(`${failure.message} Enter a key above, and ask again.`);
      this.actions.askForKey(failure);
    } else if (failure.status === 413) {
      note.append(`This is too large for the server: ${failure.message}`);
    } else if (failure.code === "context_length_exceeded") {
      const what = this.hasDocuments ? "The documents are" : "This is";
      note.append(make("strong", {}, `${what} too long for this model.`), make("p", {}, failure.message));
      if (this.hasDocuments) {
        note.append(
          again("Read the best passages that fit", { too_long: "sections" }),
          again("Answer from retrieval alone", { mode: "rag" }),
        );
      }
      return this.showState(note);
    } else if (failure.status === 0) {
      const rest = this.growing.text ? " What came before stands above." : "";
      note.append(`${failure.message} It could not be taken up again.${rest}`);
    } else {
      note.append(failure.message ?? String(failure));
    }
    note.append(again("Ask again"));
    this.showState(note);
  }
}
