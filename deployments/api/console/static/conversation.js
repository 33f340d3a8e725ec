// The conversation in the middle: questions, each with an answer, or with three beside each other.

import { Answer } from "./answer.js";
import { byId, make } from "./dom.js";

const COMPARED = ["plain", "rag", "auto"];
const SEED = 1; // of compared answers, so that chance does not tell them apart
const NEAR = 80; // pixels from the end within which the page follows a growing answer

export class Conversation {
  /** `actions` has `openSource(source)`, `showFirst(source)`, `showCode(body)`, `askForKey(failure)` and `settings()`. */
  constructor(server, documents, actions) {
    Object.assign(this, { server, documents, actions });
    this.list = byId("turns");
    this.speeds = new Map(); // tokens a second of the last plain answer, by model
    this.follows = true;
    this.list.onscroll = () => {
      this.follows = this.list.scrollHeight - this.list.scrollTop - this.list.clientHeight < NEAR;
    };
    this.hint = make("div", { class: "hint" });
    this.clear();
  }

  clear() {
    this.stop();
    this.messages = [];
    this.list.replaceChildren(this.hint);
  }

  get isAsking() {
    return Boolean(this.stopping);
  }

  stop() {
    this.stopping?.abort();
  }

  ask(question) {
    return this.add(question, [this.body(question)]);
  }

  compare(question) {
    const body = this.body(question);
    const bodies = COMPARED.map((mode) => ({ ...body, seed: SEED, rapid: { ...body.rapid, mode } }));
    return this.add(question, bodies);
  }

  /** Returns the body of a request: what was said, the question, and the chosen documents. */
  body(question) {
    const { model, mode, temperature } = this.actions.settings();
    const { chosen, keeps } = this.documents;
    const rapid = { mode, citations: true, explain: "writers", progress: true, truncation: "auto" };
    if (keeps && chosen.length) rapid.file_ids = chosen.map((each) => each.id);
    if (!keeps && chosen.length) rapid.documents = chosen.map(({ name, text }) => ({ name, text }));
    return {
      model,
      messages: [...this.messages, { role: "user", content: question }],
      ...(temperature === null ? {} : { temperature }),
      stream: true,
      stream_options: { include_usage: true },
      rapid,
    };
  }

  /** Asks a question once for each body, one after the other, so that their times are their own. */
  async add(question, bodies) {
    this.hint.remove();
    const isCompared = bodies.length > 1;
    const answers = bodies.map((body) => this.answer(question, body, isCompared ? body.rapid.mode : null));
    const nodes = answers.map((each) => each.node);
    const columns = make("div", { class: isCompared ? "answers compared" : "answers" }, ...nodes);
    this.list.append(make("article", { class: "turn" }, make("h3", {}, question), columns));
    this.follows = true;
    this.followEnd();
    const stopping = (this.stopping = new AbortController());
    this.actions.changed();
    const { messages } = this;
    let said = null;
    for (const answer of answers) said = await answer.run(this.server, stopping.signal);
    if (said && this.messages === messages) {
      const asked = { role: "user", content: question };
      this.messages = [...messages, asked, { role: "assistant", content: said }];
    }
    if (this.stopping === stopping) this.stopping = null;
    this.actions.changed();
  }

  answer(question, body, title) {
    return new Answer(body, title, {
      ...this.actions,
      speeds: this.speeds,
      followEnd: () => this.followEnd(),
      askAgain: (changes) => {
        if (!this.isAsking) this.add(question, [{ ...body, rapid: { ...body.rapid, ...changes } }]);
      },
    });
  }

  followEnd() {
    if (this.follows) this.list.scrollTop = this.list.scrollHeight;
  }
}
