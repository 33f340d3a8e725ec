// The AI SDK: text, objects and tools of several steps, over chat and over responses.

import assert from "node:assert/strict";

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import {
  Output,
  ToolLoopAgent,
  generateObject,
  generateText,
  stepCountIs,
  streamText,
  tool,
} from "ai";

import { KEY, LIGHT, MODEL, PLACE, QUESTION, TELLS, URL, lightOf, run } from "./tries.mjs";

const baseURL = `${URL}/v1`;
const openai = createOpenAI({ baseURL, apiKey: KEY });
const compatible = createOpenAICompatible({
  name: "rapid",
  baseURL,
  apiKey: KEY,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const tools = { lightOf: tool({ description: TELLS, inputSchema: PLACE, execute: lightOf }) };
const FORMS = {
  compatible: compatible(MODEL),
  chat: openai.chat(MODEL),
  responses: openai(MODEL), // its default
};

function tryWith(name, model) {
  const asked = { model, prompt: QUESTION, maxRetries: 0, maxOutputTokens: 16 };
  // The second step must answer: a small model would call on and on.
  const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" });
  const stepping = { tools, prepareStep, stopWhen: stepCountIs(2) };
  // One call, each provider's own way.
  const single = {
    providerOptions: {
      openai: { parallelToolCalls: false },
      rapid: { parallel_tool_calls: false },
    },
  };
  const calling = { ...asked, ...stepping, ...single, maxOutputTokens: 60 };

  const check = ({ steps, text, usage }) => {
    assert.equal(steps.length, 2);
    const [called] = steps[0].toolResults;
    assert.equal(called.output, lightOf(called.input));
    assert(text);
    assert(usage.outputTokens);
  };

  return Object.entries({
    async generates() {
      const { text, usage, finishReason } = await generateText(asked);
      assert(text && usage.totalTokens && ["stop", "length"].includes(finishReason));
    },
    async streams() {
      const result = streamText(asked);
      let told = "";
      for await (const delta of result.textStream) told += delta;
      assert.equal(await result.text, told);
      assert(told && (await result.usage).outputTokens);
    },
    async hasHistory() {
      const { prompt, ...rest } = asked;
      const { response } = await generateText(asked);
      const messages = [
        { role: "user", content: prompt },
        ...response.messages,
        { role: "user", content: "And now?" },
      ];
      assert((await generateText({ ...rest, system: "Be brief.", messages })).text);
    },
    async generatesAnObject() {
      const { object } = await generateObject({ ...asked, maxOutputTokens: 100, schema: LIGHT });
      LIGHT.parse(object);
    },
    async streamsAnObject() {
      const output = Output.object({ schema: LIGHT });
      const result = streamText({ ...asked, maxOutputTokens: 100, output });
      let last;
      for await (const partial of result.partialOutputStream) last = partial;
      LIGHT.parse(last);
    },
    async callsToolsInSteps() {
      check(await generateText(calling));
    },
    async streamsToolsInSteps() {
      const { steps, text, usage, fullStream } = streamText(calling);
      const kinds = new Set();
      for await (const part of fullStream) kinds.add(part.type);
      assert(kinds.has("tool-input-delta") && kinds.has("tool-result"));
      check({ steps: await steps, text: await text, usage: await usage });
    },
    async isAnAgent() {
      const agent = new ToolLoopAgent({ model, ...stepping, ...single, maxOutputTokens: 60 });
      check(await agent.generate({ prompt: QUESTION }));
    },
  }).map(([what, each]) => Object.defineProperty(each, "name", { value: `${name} ${what}` }));
}

async function responsesGoOn() {
  const asked = { model: openai(MODEL), maxRetries: 0, maxOutputTokens: 16 };
  const { providerMetadata } = await generateText({ ...asked, prompt: QUESTION });
  const previousResponseId = providerMetadata.openai.responseId;
  const providerOptions = { openai: { previousResponseId } };
  assert((await generateText({ ...asked, prompt: "And now?", providerOptions })).text);
}

async function completions() {
  const model = compatible.completionModel(MODEL);
  assert((await generateText({ model, prompt: "The code of", maxOutputTokens: 8 })).text);
}

await run(
  ...Object.entries(FORMS).flatMap(([name, model]) => tryWith(name, model)),
  responsesGoOn,
  completions,
);
