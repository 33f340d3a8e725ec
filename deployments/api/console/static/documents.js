// The documents that one may ask about: files that the server keeps, or, where it keeps none, texts in this page.

import { Failure } from "./server.js";

const AT_ONCE = 2; // files on their way; a librarian of the server reads as many at once
const LOOK_MS = 700; // between two looks at a file that is being read
const MOST_TRIES = 6; // of one file that is sent to a busy server
const PAGE = 200; // files listed at once
const STORE = { name: "Console", metadata: { made_by: "console" } };
const QUESTIONED = ["user_data", "assistants"]; // purposes of files that one asks about

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

/**
 * A document: `state` is `waiting`, `sending`, `working`, `ready` or `failed`; `progress` is
 * `{what, done, of}` or null; `detail` says why it failed, or how long it is.
 */
export class Documents {
  constructor(server, changed) {
    this.server = server;
    this.changed = changed;
    this.queue = [];
    this.working = 0;
    this.forget();
  }

  /** Begins anew, as for another key. */
  forget() {
    this.all = [];
    this.keeps = true; // whether the server keeps files
    this.after = null; // where the list goes on
    this.storeId = null;
    this.texts = new Map();
  }

  get chosen() {
    return this.all.filter((each) => each.chosen && each.state === "ready");
  }

  get unready() {
    return this.all.filter((each) => each.chosen && !["ready", "failed"].includes(each.state));
  }

  /** Lists the files that the server keeps, newest first, and more with each call. */
  async load() {
    const after = this.after ? `&after=${encodeURIComponent(this.after)}` : "";
    let page;
    try {
      page = await this.server.call("GET", `v1/files?limit=${PAGE}${after}`);
    } catch (error) {
      if (![403, 404].includes(error.status)) throw error; // as for a key that may only ask
      this.keeps = false;
      return;
    }
    this.after = page.has_more ? page.last_id : null;
    const known = new Set(this.all.map((each) => each.id));
    for (const file of page.data) {
      if (known.has(file.id) || !QUESTIONED.includes(file.purpose)) continue;
      const entry = { id: file.id, name: file.filename, chosen: false, progress: null };
      this.all.push(entry);
      settle(entry, file);
      if (entry.state === "working") this.enqueue(() => this.follow(entry));
    }
    this.changed();
  }

  add(file, name = file.name) {
    const entry = { id: null, name, chosen: true, state: "waiting", progress: null, detail: "" };
    this.all.unshift(entry);
    this.enqueue(() => (this.keeps ? this.send(entry, file) : this.hold(entry, file)), entry);
  }

  enqueue(work, entry = null) {
    this.queue.push(async () => {
      try {
        await work();
      } catch (failure) {
        if (entry) fail(entry, failure);
      }
      this.changed(entry);
    });
    this.changed();
    this.advance();
  }

  async advance() {
    if (this.working >= AT_ONCE || !this.queue.length) return;
    this.working += 1;
    const work = this.queue.shift();
    await work();
    this.working -= 1;
    this.advance();
  }

  async send(entry, file) {
    entry.state = "sending";
    entry.progress = { what: "Sending", done: 0, of: file.size };
    this.changed(entry);
    entry.id = (await this.upload(entry, file)).id;
    await this.index(entry.id);
    await this.follow(entry);
  }

  /** Sends a file, again and again where the server is busy. */
  async upload(entry, file) {
    for (let tries = 1; ; tries += 1) {
      try {
        return await this.server.upload(file, entry.name, (done, of) => {
          entry.progress = { what: "Sending", done, of };
          this.changed(entry);
        });
      } catch (failure) {
        if (![429, 503].includes(failure.status) || tries === MOST_TRIES) throw failure;
        entry.progress = { what: "Waiting for the server, which is busy", done: 0, of: 0 };
        this.changed(entry);
        await pause(1000 * (failure.waitS ?? 1));
      }
    }
  }

  /** Looks at a file until it is read, and its passages indexed where that was begun. */
  async follow(entry) {
    for (;; await pause(LOOK_MS)) {
      const [file, stored] = await this.look(entry.id);
      if (file === null) continue;
      if (file.status !== "processed" || stored?.status !== "in_progress") {
        settle(entry, file);
        if (entry.state !== "working") return;
      }
      const what = file.status === "processed" ? "Finding passages" : "Reading";
      const { done = 0, of = 0 } = stored?.rapid ?? {};
      Object.assign(entry, { state: "working", progress: { what, done, of } });
      this.changed(entry);
    }
  }

  /** Returns what the server says of a file, and of its passages; nulls where it is away or busy. */
  async look(id) {
    try {
      return [await this.server.call("GET", `v1/files/${id}`), await this.stored(id)];
    } catch (failure) {
      if (failure.retryable) return [null, null];
      throw failure;
    }
  }

  /** Keeps a text in this page, for a server that keeps none. */
  async hold(entry, file) {
    const bytes = await file.arrayBuffer();
    try {
      const text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
      entry.text = text;
      // The names of texts are all that tells them apart, so the newest of a name takes its place.
      this.all = this.all.filter((each) => each === entry || each.name !== entry.name);
      Object.assign(entry, { id: entry.name, state: "ready", detail: length(text.length) });
    } catch {
      throw new Failure(400, "This server keeps no files, so only texts in UTF-8 can be asked about.");
    }
  }

  /** Puts a file into this page's vector store, which indexes it before its first question. */
  async index(id) {
    this.storeId ??= this.findStore();
    await this.server.call("POST", `v1/vector_stores/${await this.storeId}/files`, { body: { file_id: id } });
  }

  async stored(id) {
    if (this.storeId === null) return null;
    try {
      return await this.server.call("GET", `v1/vector_stores/${await this.storeId}/files/${id}`);
    } catch (failure) {
      if (failure.status === 404) return null;
      throw failure;
    }
  }

  async findStore() {
    const listed = await this.server.call("GET", "v1/vector_stores?limit=100");
    const ours = listed.data.find((each) => each.metadata?.made_by === STORE.metadata.made_by);
    return (ours ?? (await this.server.call("POST", "v1/vector_stores", { body: STORE }))).id;
  }

  /** Returns the text of a document, as the models read it, and where its pages begin: `{text, pages}`. */
  async read(entry) {
    if (entry.text !== undefined) return { text: entry.text, pages: [] };
    if (!this.texts.has(entry.id)) {
      this.texts.clear(); // one at a time, as they may be long
      this.texts.set(entry.id, await this.fetchText(entry));
    }
    return this.texts.get(entry.id);
  }

  async fetchText(entry) {
    this.storeId ??= this.findStore();
    const path = `v1/vector_stores/${await this.storeId}/files/${entry.id}`;
    if ((await this.stored(entry.id)) === null) await this.index(entry.id);
    await this.follow(entry);
    const page = await this.server.call("GET", `${path}/content`);
    return { text: page.data.map((each) => each.text).join(""), pages: page.rapid?.pages ?? [] };
  }

  async remove(entry) {
    if (entry.id !== null && entry.text === undefined) {
      await this.server.call("DELETE", `v1/files/${entry.id}`);
    }
    this.all = this.all.filter((each) => each !== entry);
    this.texts.delete(entry.id);
    this.changed();
  }

  /** Returns the document that a part of a receipt is about. */
  find(part) {
    return this.all.find((each) => (part.file_id ? each.id === part.file_id : each.name === part.document));
  }
}

function settle(entry, file) {
  if (file.status === "error") return fail(entry, { message: file.status_details });
  const state = file.status === "processed" ? "ready" : "working";
  const { characters, pages } = file.rapid;
  const detail = state === "ready" ? length(characters, pages) : "";
  Object.assign(entry, { state, detail, progress: null });
}

function fail(entry, failure) {
  Object.assign(entry, { state: "failed", detail: failure.message, progress: null, chosen: false });
}

function length(characters, pages) {
  const text = `${characters.toLocaleString("en-US")} characters`;
  return pages ? `${pages.toLocaleString("en-US")} pages, ${text}` : text;
}

const MOST_DROPPED = 500; // files of one folder: more is likely a mistake, such as a whole disk

/** Returns `[file, name]` of all that was dropped, with folders walked through. */
export async function listDropped(transfer) {
  const entries = [...transfer.items].map((each) => each.webkitGetAsEntry?.()).filter(Boolean);
  const found = [];
  for (const entry of entries) await walk(entry, found);
  return entries.length ? found : [...transfer.files].map((file) => [file, file.name]);
}

async function walk(entry, found) {
  if (entry.name.startsWith(".") || found.length >= MOST_DROPPED) return;
  if (entry.isFile) {
    const file = await new Promise((resolve, reject) => entry.file(resolve, reject));
    found.push([file, inFolder(entry.fullPath)]);
    return;
  }
  const reader = entry.createReader();
  for (;;) {
    const some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (!some.length) return; // it gives a hundred at most each time
    for (const each of some) await walk(each, found);
  }
}

/** Returns `[file, name]` of the files of a chosen folder. */
export function listChosen(files) {
  return [...files]
    .filter((file) => !/(^|\/)\./.test(file.webkitRelativePath)) // as of version control
    .map((file) => [file, inFolder(file.webkitRelativePath || file.name)])
    .slice(0, MOST_DROPPED);
}

/** Names a file with its folders, which the server takes for no part of a name. */
const inFolder = (path) => path.replace(/^\//, "").replaceAll("/", " › ");
