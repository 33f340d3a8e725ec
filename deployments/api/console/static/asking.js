// One question: it waits where the server is busy, and goes on where a connection broke.

import { Failure, readEvents } from "./server.js";

const MOST_TRIES = 6; // of one question, before a person is asked
const BROKEN_S = 1; // before the first new try after a lost connection; then twice as long each time

/** Says what a comment of a stream means: `{what, done, of}`, or null for one that says nothing. */
export function readProgress(comment) {
  const found = /^(reading|embedding passages) ([\d,]+) of ([\d,]+)/.exec(comment);
  if (!found) return null;
  const [done, of] = found.slice(2).map((each) => Number(each.replaceAll(",", "")));
  return { what: found[1] === "reading" ? "Reading the documents" : "Finding passages", done, of };
}

/**
 * Asks, and returns `{receipt, usage, metrics, finish}`; `finish` says why the answer ended.
 *
 * `tell` has `progress({what, done, of})`, `text(piece)`, `thinking(piece)`, `restart()`, and
 * `wait(seconds, failure)`, which returns a promise that lasts until it may be tried again.
 */
export async function ask(server, body, tell, signal) {
  const result = {};
  let after = null; // the id of the last event that came
  for (let tries = 1; ; tries += 1) {
    try {
      const headers = after === null ? {} : { "last-event-id": after };
      const response = await server.open("POST", "v1/chat/completions", { body, headers, signal });
      for await (const event of read(response.body)) {
        if (event.data === "[DONE]") return result;
        after = take(event, result, tell) ?? after;
      }
      throw Failure.lost;
    } catch (error) {
      if (signal.aborted) throw error;
      const failure = error instanceof Failure ? error : Failure.lost;
      if (failure.code === "cannot_continue") {
        after = null;
        tell.restart();
      }
      if (!failure.retryable || tries === MOST_TRIES) throw failure;
      await tell.wait(failure.waitS ?? BROKEN_S * 2 ** (tries - 1), failure);
    }
  }
}

/** Yields events; a stream that breaks is a lost connection, whatever the browser calls it. */
async function* read(stream) {
  try {
    yield* readEvents(stream);
  } catch (error) {
    throw error.name === "AbortError" ? error : Failure.lost;
  }
}

function take({ comment, data }, result, tell) {
  if (comment !== undefined) {
    const progress = readProgress(comment);
    if (progress) tell.progress(progress);
    return null;
  }
  const chunk = JSON.parse(data);
  if (chunk.error) {
    const { message, code, retryable } = chunk.error;
    throw new Failure(500, message, { code, retryable });
  }
  const { delta = {}, finish_reason: finish } = chunk.choices[0] ?? {};
  if (finish) result.finish = finish;
  if (delta.reasoning_content) tell.thinking(delta.reasoning_content);
  if (delta.content) tell.text(delta.content);
  if (chunk.rapid) result.receipt = chunk.rapid;
  if (chunk.usage) Object.assign(result, { usage: chunk.usage, metrics: chunk.metrics });
  return chunk.rapid_event_id ?? null;
}
