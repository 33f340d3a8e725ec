// The operators' tab: pools, leases, tiers of KV, queue and acceptance, looked at while it is shown.

import { byId, button, make, number, plural } from "./dom.js";

const LOOK_MS = 2000; // between two looks at the state, which the server has in memory
const LOOKS_OF_USAGE = 15; // after which the ledger is summed again, as its database has other work
const RECENT_MS = 60_000; // "lately", of the acceptance

const percent = (part, whole) => `${Math.round((100 * part) / whole)} %`;
const sum = (each, field) => each.reduce((total, one) => total + (one[field] ?? 0), 0);

/** Says how a pool stands, in a word for its colour and a sentence. */
export function describePool({ replicas = 0, starting = 0, status }, engines) {
  const answering = engines.filter((each) => each.status === "ok");
  const isFull = answering.length > 0 && answering.every((each) => each.leases_open >= each.max_leases);
  if (!replicas && starting) return ["starting", "Starting: its model is loading."];
  if (!replicas && ["HEALTHY", "UPSCALING"].includes(status)) return ["resting", "At rest: a question starts it."];
  if (!replicas) return ["down", "Down: nothing here takes requests."];
  if (engines.length && !answering.length) return ["down", "No engine answers."];
  if (isFull) return ["full", "Full: the next question waits."];
  if (starting) return ["starting", `Takes requests; ${number(starting)} more starting.`];
  return ["ready", "Takes requests."];
}

/** Returns rows of a pool: a name, a text, and where there is one the share that is used. */
export function listPoolFacts(pool, engines) {
  const answering = engines.filter((each) => each.status === "ok");
  const moving = ["starting", "stopping"].filter((each) => pool[each]).map((each) => `, ${pool[each]} ${each}`);
  const rows = [["Replicas", `${number(pool.replicas ?? 0)}${moving.join("")}`]];
  if (answering.length) {
    const [open, most] = [sum(answering, "leases_open"), sum(answering, "max_leases")];
    const tokens = (field) => answering.reduce((total, each) => total + each[field] * each.page_tokens, 0);
    const [used, room] = [tokens("kv_pages_in_use"), tokens("kv_pages_total")];
    if (most) rows.push(["Leases", `${number(open)} of ${number(most)} open`, open / most]);
    if (room) rows.push(["KV", `${percent(used, room)} of ${plural(room, "token")} in use`, used / room]);
    const waiting = sum(answering, "leases_waiting");
    const unread = sum(answering, "tokens_waiting");
    rows.push(["Queue", `${plural(waiting, "lease")} waiting, ${plural(unread, "token")} to read`]);
    for (const [name, held, back] of [
      ["KV in host memory", "host_tokens", "host_tokens_restored"],
      ["KV on disk", "disk_tokens", "disk_tokens_read"],
    ]) {
      const [kept, came] = [sum(answering, held), sum(answering, back)];
      if (kept || came) rows.push([name, `${plural(kept, "token")}, ${number(came)} came back so far`]);
    }
  }
  if (answering.length > 1) {
    for (const each of answering) {
      const used = percent(each.kv_pages_in_use, each.kv_pages_total || 1);
      rows.push([each.name.split("/").at(-1), `${each.leases_open} of ${each.max_leases} leases, ${used} of KV`]);
    }
  }
  const silent = engines.length - answering.length;
  if (silent) rows.push(["No answer", `from ${plural(silent, "engine")}: loading, ending or busy`]);
  return rows;
}

/** A card of named facts, which are changed where they are, so that a reader keeps the place. */
class Card {
  constructor(title) {
    this.state = make("p", { class: "state" });
    this.facts = make("dl");
    this.rows = new Map();
    this.node = make("section", { class: "card", "aria-label": title }, make("h3", {}, title), this.state, this.facts);
  }

  show([kind, sentence], rows) {
    this.node.dataset.state = kind;
    if (this.state.textContent !== sentence) this.state.textContent = sentence;
    const names = rows.map(([name]) => name);
    for (const [name, row] of this.rows) {
      if (names.includes(name)) continue;
      row.node.remove();
      this.rows.delete(name);
    }
    for (const [name, text, share] of rows) {
      const row = this.rows.get(name) ?? this.add(name);
      if (row.text.data !== text) row.text.data = text;
      row.meter.hidden = share === undefined;
      row.meter.value = share ?? 0;
    }
  }

  add(name) {
    const row = { text: document.createTextNode("") };
    row.meter = make("meter", { min: 0, max: 1, "aria-label": name, hidden: true });
    row.node = make("div", {}, make("dt", {}, name), make("dd", {}, row.text, row.meter));
    this.rows.set(name, row);
    this.facts.append(row.node);
    return row;
  }
}

export class Operators {
  /** `askForKey()` shows where a key is entered. */
  constructor(server, askForKey) {
    Object.assign(this, { server, askForKey });
    this.isShown = false;
    this.list = byId("cards");
    document.addEventListener("visibilitychange", () => this.look());
    this.forget();
  }

  /** Begins anew, as for another key. */
  forget() {
    this.cards = new Map();
    this.counts = []; // `[time, counts]` of the latest looks
    this.usage = this.version = null;
    this.num_looks = 0;
    this.seenAt = null;
    this.list.replaceChildren();
    this.say("");
    this.look();
  }

  show(isShown) {
    this.isShown = isShown;
    this.num_looks = 0;
    this.look();
  }

  /** Looks now, and again and again while the tab is shown and nothing needs a person first. */
  async look() {
    clearTimeout(this.timer);
    if (!this.isShown || document.hidden) return;
    const round = (this.round = {}); // a later call takes the place of one that is under way
    const goesOn = await this.read(() => this.round === round);
    if (goesOn && this.round === round) this.timer = setTimeout(() => this.look(), LOOK_MS);
  }

  async read(isWanted) {
    try {
      const state = await this.server.call("GET", "v1/admin/state");
      this.version ??= (await this.server.call("GET", "version")).version;
      const usage = this.num_looks % LOOKS_OF_USAGE === 0 ? await this.readUsage("&tenant=*") : this.usage;
      if (!isWanted()) return false;
      this.num_looks += 1;
      this.usage = usage;
      this.seenAt = new Date();
      this.say("");
      this.showState(state);
      return true;
    } catch (failure) {
      return isWanted() && this.showTrouble(failure, isWanted);
    }
  }

  /** Returns the ledger's sums of today, of all tenants or of the key's; null where none are kept. */
  async readUsage(whose = "") {
    const today = new Date().toISOString().slice(0, 10);
    try {
      return (await this.server.call("GET", `v1/usage?group_by=tenant&start_date=${today}${whose}`)).data;
    } catch (failure) {
      if (failure.status === 404 || failure.status === 503) return null;
      throw failure;
    }
  }

  showState({ ready, reason, models, pools, engines, metrics, requests }) {
    const state = ready ? ["ready", "Ready: questions are answered."] : ["down", `Not ready: ${reason ?? "unknown"}.`];
    const each = Object.entries(models).map(([name, isReady]) => [name, isReady ? "ready" : "not ready"]);
    this.card("Server").show(state, [...each, ["Release", this.version], ...(metrics.length ? [["Metrics", metrics.join(", ")]] : [])]);
    const now = performance.now();
    if (this.counts.length && requests.drafted < this.counts.at(-1)[1].drafted) this.counts = []; // it began anew
    this.counts = [...this.counts.filter(([at]) => now - at <= RECENT_MS), [now, requests]];
    this.showRequests(requests, this.counts[0][1], pools.ingress?.replicas ?? 1);
    const names = new Set([...Object.keys(pools), ...engines.map((engine) => engine.pool)]);
    for (const name of names) {
      const own = engines.filter((engine) => engine.pool === name);
      const pool = pools[name] ?? {};
      this.card(`Pool ${name}`).show(describePool(pool, own), listPoolFacts(pool, own));
    }
    for (const title of this.cards.keys()) {
      if (title.startsWith("Pool ") && !names.has(title.slice(5))) this.drop(title);
    }
    this.showUsage("Used today");
  }

  showRequests(now, before, numIngresses) {
    const { waiting, answering, ok, refused, failed, left, drafted, accepted } = now;
    const sentence = waiting ? `${plural(waiting, "question")} waiting.` : "Nobody waits.";
    const recent = [drafted - before.drafted, accepted - before.accepted];
    const kept = ([of, some]) => (of ? `${number(some)} of ${plural(of, "token")}, ${percent(some, of)}` : "nothing drafted");
    this.card("Questions").show([waiting ? "full" : "ready", sentence], [
      ["Now", `${number(answering)} being answered, ${number(waiting)} waiting`],
      ["Answered", number(ok)],
      ["Not answered", `${number(refused)} refused, ${number(failed)} failed, ${number(left)} cancelled`],
      ...(numIngresses > 1 ? [] : [["Drafts kept, last minute", kept(recent)]]), // another one answers each look
      ["Drafts kept in all", kept([drafted, accepted]), ...(drafted ? [accepted / drafted] : [])],
      ...(numIngresses > 1 ? [["Counted by", `one of ${numIngresses} ingress replicas, since its start`]] : []),
    ]);
  }

  showUsage(title) {
    if (!this.usage) return this.drop(title);
    const rows = this.usage.map((row) => [
      row.tenant,
      `${plural(row.num_requests, "question")}, ${plural(row.prompt_tokens, "token")} read, ` +
        `${number(row.completion_tokens)} written`,
    ]);
    this.card(title).show(["ready", rows.length ? "By tenant." : "Nothing yet."], rows);
  }

  /** Says why nothing is seen; returns whether to look again. */
  async showTrouble(failure, isWanted) {
    if (failure.status === 401) {
      this.clear();
      this.say(failure.message, button("Enter a key", this.askForKey));
      return false;
    }
    if (failure.status === 403) {
      const { ready, reason } = await this.server.ready();
      const usage = await this.readUsage().catch(() => null);
      if (!isWanted()) return false;
      this.clear();
      this.usage = usage;
      const needs = `${failure.message} So what you see is whether it answers, and your own usage.`;
      this.say(needs, button("Enter another key", this.askForKey));
      const state = ready ? ["ready", "Ready: questions are answered."] : ["down", `Not ready: ${reason ?? "unknown"}.`];
      this.card("Server").show(state, []);
      this.showUsage("Your usage today");
      return false;
    }
    const since = this.seenAt && ` What stands here is from ${this.seenAt.toLocaleTimeString()}.`;
    this.say(`${failure.message}${since ?? ""} Trying again.`);
    return true;
  }

  clear() {
    for (const title of [...this.cards.keys()]) this.drop(title);
  }

  /** Says what is the matter, once: the note is read aloud when it changes. */
  say(text, ...more) {
    const note = byId("operators-note");
    const said = note.firstChild?.textContent ?? "";
    if (said !== text) note.replaceChildren(...(text ? [make("p", {}, text), ...more] : []));
  }

  card(title) {
    if (!this.cards.has(title)) {
      const card = new Card(title);
      this.cards.set(title, card);
      this.list.append(card.node);
    }
    return this.cards.get(title);
  }

  drop(title) {
    this.cards.get(title)?.node.remove();
    this.cards.delete(title);
  }
}
