// OpenAI's SDK for Node: chat, forms, tools, responses, conversations, completions, files.

import assert from "node:assert/strict";

import OpenAI, { toFile } from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

import { KEY, LIGHT, MODEL, PLACE, QUESTION, TELLS, URL, lightOf, run } from "./tries.mjs";

const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: KEY, maxRetries: 0, timeout: 300_000 });
const messages = [{ role: "user", content: QUESTION }];
const chatted = { model: MODEL, messages };
const light = {
  type: "function",
  name: "light_of",
  description: TELLS,
  parameters: z.toJSONSchema(PLACE),
  strict: true,
};

async function chat() {
  const answer = await client.chat.completions.create({ ...chatted, max_tokens: 16 });
  assert(answer.choices[0].message.content);
}

async function chatStreamWithUsage() {
  const stream = await client.chat.completions.create({
    ...chatted,
    max_tokens: 16,
    stream: true,
    stream_options: { include_usage: true },
  });
  let last;
  for await (const chunk of stream) last = chunk;
  assert(last.usage.completion_tokens);
}

async function chatStreamHelper() {
  const stream = client.chat.completions.stream({ ...chatted, max_tokens: 16 });
  let text = "";
  stream.on("content", (delta) => (text += delta));
  assert.equal(await stream.finalContent(), text);
}

async function chatStreamIsLeft() {
  const stream = await client.chat.completions.create({ ...chatted, stream: true });
  for await (const _ of stream) break;
  stream.controller.abort();
}

async function chatChoicesAndLogprobs() {
  const answer = await client.chat.completions.create({
    ...chatted,
    max_tokens: 8,
    n: 3,
    logprobs: true,
    top_logprobs: 2,
    temperature: 1,
  });
  assert.equal(answer.choices.length, 3);
  assert(answer.choices[2].logprobs.content.length);
}

async function chatParse() {
  const answer = await client.chat.completions.parse({
    ...chatted,
    max_tokens: 100,
    response_format: zodResponseFormat(LIGHT, "light"),
  });
  LIGHT.parse(answer.choices[0].message.parsed);
}

async function chatTools() {
  const { type, ...named } = light;
  const asked = { ...chatted, max_tokens: 100, tools: [{ type, function: named }] };
  const called = await client.chat.completions.create({
    ...asked,
    tool_choice: "required",
    parallel_tool_calls: false,
  });
  const { message } = called.choices[0];
  const [call] = message.tool_calls;
  assert.equal(call.function.name, "light_of");
  const content = lightOf(JSON.parse(call.function.arguments));
  const result = { role: "tool", tool_call_id: call.id, content };
  const answer = await client.chat.completions.create({
    ...asked,
    messages: [...messages, message, result],
    tool_choice: "none",
  });
  assert(answer.choices[0].message.content);
}

async function chatToolsStream() {
  const stream = client.chat.completions.stream({
    ...chatted,
    max_tokens: 100,
    tools: [zodFunction({ name: "light_of", parameters: PLACE })],
    tool_choice: "required",
    parallel_tool_calls: false,
  });
  let told = "";
  stream.on("tool_calls.function.arguments.delta", (event) => (told += event.arguments_delta));
  const [call] = (await stream.finalMessage()).tool_calls;
  assert.equal(call.function.arguments, told);
  PLACE.parse(call.function.parsed_arguments);
}

async function completions() {
  const prompt = ["The code of", "A door"];
  const answer = await client.completions.create({ model: MODEL, prompt, max_tokens: 8 });
  assert.equal(answer.choices.length, 2);
}

async function responses() {
  const asked = { model: MODEL, max_output_tokens: 16 };
  const first = await client.responses.create({ ...asked, input: QUESTION });
  assert(first.output_text);
  const second = await client.responses.create({
    ...asked,
    input: "And now?",
    previous_response_id: first.id,
  });
  const { data } = await client.responses.inputItems.list(second.id);
  assert.equal(data[0].content[0].text, "And now?");
  const again = await client.responses.retrieve(second.id);
  assert.equal(again.output_text, second.output_text);
  await client.responses.delete(first.id);
}

async function responsesStream() {
  const asked = { model: MODEL, input: QUESTION, max_output_tokens: 16 };
  const stream = client.responses.stream(asked);
  let text = "";
  const numbers = [];
  for await (const event of stream) {
    numbers.push(event.sequence_number);
    if (event.type === "response.output_text.delta") text += event.delta;
  }
  const response = await stream.finalResponse();
  assert.equal(response.output_text, text);
  const told = [];
  const resumed = await client.responses.retrieve(response.id, { stream: true, starting_after: 2 });
  for await (const event of resumed) told.push(event.sequence_number);
  assert.deepEqual(told, numbers.slice(3));
}

async function responsesParse() {
  const answer = await client.responses.parse({
    model: MODEL,
    input: QUESTION,
    max_output_tokens: 100,
    text: { format: zodTextFormat(LIGHT, "light") },
  });
  LIGHT.parse(answer.output_parsed);
}

async function responsesTools() {
  const asked = { model: MODEL, max_output_tokens: 100, tools: [light] };
  const called = await client.responses.create({
    ...asked,
    input: QUESTION,
    tool_choice: "required",
    parallel_tool_calls: false,
  });
  const [call] = called.output;
  assert.equal(call.name, "light_of");
  const output = lightOf(JSON.parse(call.arguments));
  const answer = await client.responses.create({
    ...asked,
    input: [{ type: "function_call_output", call_id: call.call_id, output }],
    previous_response_id: called.id,
    tool_choice: "none",
  });
  assert(answer.output_text);
}

async function responsesAreCompacted() {
  const first = await client.responses.create({ model: MODEL, input: QUESTION });
  const compacted = await client.responses.compact({
    model: MODEL,
    previous_response_id: first.id,
  });
  assert.deepEqual(compacted.output.map((each) => each.type), ["message", "compaction"]);
  const input = [...compacted.output, { role: "user", content: "And now?" }];
  assert((await client.responses.create({ model: MODEL, input })).output_text);
}

async function conversations() {
  const kept = await client.conversations.create();
  const asked = { model: MODEL, input: QUESTION, max_output_tokens: 16 };
  await client.responses.create({ ...asked, conversation: kept.id });
  assert.equal((await client.conversations.items.list(kept.id)).data.length, 2);
  await client.conversations.delete(kept.id);
}

async function filesAndSearch() {
  const text = "The code of the harbour door is 4711. The bridge is closed in winter.\n".repeat(4);
  const uploaded = await toFile(Buffer.from(text), "doors.txt");
  const file = await client.files.create({ file: uploaded, purpose: "user_data" });
  const store = await client.vectorStores.create({ name: "doors" });
  const read = await client.vectorStores.files.createAndPoll(store.id, { file_id: file.id });
  assert.equal(read.status, "completed");
  const found = await client.vectorStores.search(store.id, { query: "harbour door" });
  assert(found.data[0].content[0].text.includes("4711"));
  const answer = await client.responses.create({
    model: MODEL,
    input: "Which code opens the harbour door?",
    max_output_tokens: 16,
    tools: [{ type: "file_search", vector_store_ids: [store.id] }],
    include: ["file_search_call.results"],
  });
  assert(answer.output.some((each) => each.type === "file_search_call" && each.results.length));
  assert.equal(await (await client.files.content(file.id)).text(), text);
  await client.vectorStores.delete(store.id);
  await client.files.delete(file.id);
}

async function refusals() {
  const refused = client.chat.completions.create({ ...chatted, temperature: 3 });
  await assert.rejects(refused, (error) => {
    return error instanceof OpenAI.BadRequestError && error.param === "temperature";
  });
  await assert.rejects(client.responses.retrieve("resp_0"), OpenAI.NotFoundError);
}

async function models() {
  assert.deepEqual((await client.models.list()).data.map((each) => each.id), [MODEL]);
}

await run(
  chat,
  chatStreamWithUsage,
  chatStreamHelper,
  chatStreamIsLeft,
  chatChoicesAndLogprobs,
  chatParse,
  chatTools,
  chatToolsStream,
  completions,
  responses,
  responsesStream,
  responsesParse,
  responsesTools,
  responsesAreCompacted,
  conversations,
  filesAndSearch,
  refusals,
  models,
);
