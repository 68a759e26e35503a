// openai-node: chat, streams, helpers, errors.
import assert from "node:assert/strict";
import test from "node:test";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import * as asked from "./asked.mjs";

const client = new OpenAI({ baseURL: asked.baseURL, apiKey: asked.apiKey, maxRetries: 0 });
const user = (content) => [{ role: "user", content }];
const ASK = { model: asked.MODEL, messages: user(asked.CAPITAL), temperature: 0, max_tokens: 24 };

test("the stream gives what the whole answer says", async () => {
  const whole = await client.chat.completions.create(ASK);
  const stream = client.chat.completions.stream({ ...ASK, stream_options: { include_usage: true } });
  const streamed = await stream.finalChatCompletion();
  assert.match(whole.choices[0].message.content, /Paris/);
  assert.equal(streamed.choices[0].message.content, whole.choices[0].message.content);
  assert.equal(streamed.choices[0].finish_reason, whole.choices[0].finish_reason);
  assert.equal((await stream.totalUsage()).completion_tokens, whole.usage.completion_tokens);
  assert.ok(whole._request_id);
});

test("completions, models and logprobs", async () => {
  const ask = { model: asked.MODEL, prompt: "The capital of France is", max_tokens: 4, temperature: 0 };
  assert.match((await client.completions.create(ask)).choices[0].text, /Paris/);
  assert.deepEqual((await client.models.list()).data.map((model) => model.id), [asked.MODEL]);
  const answer = await client.chat.completions.create({ ...ASK, logprobs: true, top_logprobs: 2 });
  assert.equal(answer.choices[0].logprobs.content[0].top_logprobs.length, 2);
});

test("responses and embeddings", async () => {
  const ask = { model: asked.MODEL, input: asked.CAPITAL, temperature: 0, max_output_tokens: 24 };
  const whole = await client.responses.create(ask);
  const streamed = await client.responses.stream(ask).finalResponse();
  assert.match(whole.output_text, /Paris/);
  assert.equal(streamed.output_text, whole.output_text);
  const { data } = await client.embeddings.create({ model: asked.MODEL, input: ["A cat.", "Rates."] });
  assert.deepEqual(data.map((row) => row.embedding.length), [576, 576]);
});

test("tools are run and the answer goes on", async () => {
  const cities = [];
  const getWeather = ({ city }) => {
    cities.push(city);
    return "Sunny, 21 degrees";
  };
  const runner = client.chat.completions.runTools({
    ...ASK,
    messages: user(asked.WEATHER),
    max_tokens: asked.ROOM_TOKENS,
    parallel_tool_calls: false,
    tool_choice: { type: "function", function: { name: "get_weather" } },
    tools: [zodFunction({ name: "get_weather", parameters: asked.City, function: getWeather })],
  });
  await runner.done();
  assert.equal(cities.length, 1);
  assert.equal(JSON.parse((await runner.finalFunctionToolCall()).arguments).city, cities[0]);
  const [call, result] = runner.messages.slice(-2);
  const after = await client.chat.completions.create({
    ...ASK,
    messages: [...user(asked.WEATHER), call, result],
    tools: [zodFunction({ name: "get_weather", parameters: asked.City })],
  });
  assert.ok(after.choices[0].message.content || after.choices[0].message.tool_calls);
});

test("a nested schema is parsed, whole and streamed", async () => {
  const ask = {
    ...ASK,
    messages: user(asked.INVENT),
    temperature: 1,
    max_tokens: asked.ROOM_TOKENS,
    response_format: zodResponseFormat(asked.Person, "person"),
  };
  const whole = await client.chat.completions.parse(ask);
  asked.Person.parse(whole.choices[0].message.parsed);
  const streamed = await client.chat.completions.stream(ask).finalChatCompletion();
  asked.Person.parse(streamed.choices[0].message.parsed);
});

test("errors are told apart", async () => {
  const failing = (fields, other = client) => other.chat.completions.create({ ...ASK, ...fields });
  await assert.rejects(failing({ model: "no-such-model" }), (error) => {
    assert.ok(error instanceof OpenAI.NotFoundError);
    assert.equal(error.code, "model_not_found");
    assert.ok(error.requestID);
    return true;
  });
  await assert.rejects(failing({ messages: user(asked.TOO_LONG) }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    return error.code === "context_length_exceeded";
  });
  await assert.rejects(failing({ temperature: 9 }), { param: "temperature" });
  const wrong = new OpenAI({ baseURL: asked.baseURL, apiKey: "wrong", maxRetries: 0 });
  await assert.rejects(failing({}, wrong), OpenAI.AuthenticationError);
});

test("an aborted stream ends its request", async () => {
  const ask = { ...ASK, messages: user(asked.STORY), max_tokens: 1500, stream: true };
  const stream = await client.chat.completions.create(ask);
  for await (const chunk of stream) if (chunk.choices[0].delta.content) break;
  assert.ok(stream.controller.signal.aborted);
  await asked.becomesIdle();
});
