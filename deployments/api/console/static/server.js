// Calls of the API beside which this page lies. The key is kept in memory alone.

/** Why a call did not succeed. `status` is 0 where the server was not reached or the connection broke. */
export class Failure extends Error {
  constructor(status, message, { code = null, retryable = false, waitS = null } = {}) {
    super(message);
    Object.assign(this, { status, code, retryable, waitS });
  }

  static async of(response) {
    return Failure.read(response.status, await response.text(), response.headers.get("retry-after"));
  }

  static read(status, text, retryAfter) {
    let error = null;
    try {
      error = JSON.parse(text).error;
    } catch {
      // A proxy in front speaks its own language.
    }
    const waitS = Number(retryAfter) || null;
    const retryable = error?.retryable ?? (status === 429 || status === 503);
    const said = error?.message ?? `The server answered with status ${status}.`;
    return new Failure(status, said, { code: error?.code, retryable, waitS });
  }

  static get lost() {
    return new Failure(0, "The connection to the server was lost.", { retryable: true });
  }
}

export class Server {
  constructor(base = new URL(".", document.baseURI)) {
    this.base = base;
    this.key = "";
  }

  url(path) {
    return new URL(path, this.base);
  }

  get headers() {
    return this.key ? { authorization: `Bearer ${this.key}` } : {};
  }

  /** Returns the response of a call that succeeded. */
  async open(method, path, { body, headers = {}, signal } = {}) {
    const sent = { method, signal, cache: "no-store", headers: { ...this.headers, ...headers } };
    if (body !== undefined) {
      sent.body = JSON.stringify(body);
      sent.headers["content-type"] = "application/json";
    }
    let response;
    try {
      response = await fetch(this.url(path), sent);
    } catch (error) {
      throw error.name === "AbortError" ? error : Failure.lost;
    }
    if (!response.ok) throw await Failure.of(response);
    return response;
  }

  async call(method, path, options) {
    const response = await this.open(method, path, options);
    try {
      return await response.json();
    } catch {
      throw Failure.lost;
    }
  }

  /** Returns whether questions would be answered, and if not, why. */
  async ready() {
    try {
      const response = await fetch(this.url("ready"), { cache: "no-store" });
      return await response.json();
    } catch {
      return { ready: false, reason: "the server cannot be reached" };
    }
  }

  /** Sends a file; `tell(sent, of)` hears of its bytes. `fetch` says nothing of these. */
  upload(file, name, tell) {
    const form = new FormData();
    form.append("purpose", "user_data");
    form.append("file", file, name);
    return new Promise((resolve, reject) => {
      const request = new XMLHttpRequest();
      request.open("POST", this.url("v1/files"));
      for (const [header, value] of Object.entries(this.headers)) request.setRequestHeader(header, value);
      request.upload.onprogress = (event) => tell(event.loaded, event.total);
      // A server that refuses a large file before its end closes the connection, and is not heard.
      const lost = "The connection was lost, or the file is larger than the server takes.";
      request.onerror = () => reject(new Failure(0, lost));
      request.onload = () => {
        if (request.status === 200) resolve(JSON.parse(request.responseText));
        else reject(Failure.read(request.status, request.responseText, request.getResponseHeader("retry-after")));
      };
      request.send(form);
    });
  }
}

/** Yields the events of a stream: `{comment}` or `{data}`, one a line as this server writes them. */
export async function* readEvents(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith(": ")) yield { comment: line.slice(2).trim() };
        else if (line.startsWith("data: ")) yield { data: line.slice(6).trim() };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
