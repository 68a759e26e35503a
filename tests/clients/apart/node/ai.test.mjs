// The AI SDK: ai with @ai-sdk/openai-compatible.
import assert from "node:assert/strict";
import test from "node:test";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, embedMany, generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import * as asked from "./asked.mjs";

const told = { name: "pagemesh", baseURL: asked.baseURL, includeUsage: true, supportsStructuredOutputs: true };
const provider = createOpenAICompatible({ ...told, apiKey: asked.apiKey });
const ASK = { model: provider(asked.MODEL), temperature: 0, maxOutputTokens: 24, maxRetries: 0 };

test("the stream gives what the whole answer says", async () => {
  const whole = await generateText({ ...ASK, prompt: asked.CAPITAL });
  const stream = streamText({ ...ASK, prompt: asked.CAPITAL });
  assert.match(whole.text, /Paris/);
  assert.equal(await stream.text, whole.text);
  assert.equal(await stream.finishReason, whole.finishReason);
  const usage = await stream.usage;
  assert.equal(usage.inputTokens, whole.usage.inputTokens);
  assert.equal(usage.outputTokens, whole.usage.outputTokens);
});

test("completions", async () => {
  const model = provider.completionModel(asked.MODEL);
  const { text } = await generateText({ ...ASK, model, prompt: "The capital of France is" });
  assert.match(text, /Paris/);
});

test("embeddings", async () => {
  const model = provider.embeddingModel(asked.MODEL);
  const { embeddings, usage } = await embedMany({ model, values: ["A cat.", "Interest rates."] });
  assert.deepEqual(embeddings.map((row) => row.length), [576, 576]);
  assert.ok(usage.tokens > 0);
});

for (const run of [generateText, streamText]) {
  test(`tools are run and the answer goes on: ${run.name}`, async () => {
    const cities = [];
    const get_weather = tool({
      description: "Get the current weather in a city",
      inputSchema: asked.City,
      execute: ({ city }) => {
        cities.push(city);
        return "Sunny, 21 degrees";
      },
    });
    const answer = run({
      ...ASK,
      maxOutputTokens: 200,
      prompt: asked.WEATHER,
      tools: { get_weather },
      toolChoice: { type: "tool", toolName: "get_weather" },
      prepareStep: ({ stepNumber }) => (stepNumber > 0 ? { toolChoice: "none" } : {}),
      stopWhen: stepCountIs(2),
    });
    const [first, second] = await (await answer).steps;
    assert.equal(first.finishReason, "tool-calls");
    assert.deepEqual(first.toolCalls.map((call) => call.input.city), cities);
    assert.ok(second.text);
  });
}

test("a nested schema, whole and streamed", async () => {
  const ask = { ...ASK, temperature: 1, maxOutputTokens: asked.ROOM_TOKENS, prompt: asked.INVENT, schema: asked.Person };
  asked.Person.parse((await generateObject(ask)).object);
  const stream = streamObject(ask);
  const parts = [];
  for await (const part of stream.partialObjectStream) parts.push(part);
  assert.ok(parts.length > 3);
  asked.Person.parse(await stream.object);
});

test("errors are told apart, and are not tried again", async () => {
  const failing = async (fields, status) => {
    const ask = { ...ASK, prompt: asked.CAPITAL, maxRetries: 2, ...fields };
    await assert.rejects(generateText(ask), (error) => {
      assert.ok(APICallError.isInstance(error), error);
      assert.equal(error.statusCode, status);
      assert.equal(error.isRetryable, false);
      return true;
    });
  };
  await failing({ model: provider("no-such-model") }, 404);
  await failing({ prompt: asked.TOO_LONG }, 400);
  await failing({ model: createOpenAICompatible({ ...told, apiKey: "wrong" })(asked.MODEL) }, 401);
});

test("an aborted stream ends its request", async () => {
  const abort = new AbortController();
  const ask = { ...ASK, prompt: asked.STORY, maxOutputTokens: 1500, abortSignal: abort.signal };
  const kinds = [];
  for await (const part of streamText(ask).fullStream) {
    kinds.push(part.type);
    if (part.type === "text-delta") abort.abort();
  }
  assert.equal(kinds.at(-1), "abort");
  await asked.becomesIdle();
});
