// What applications do with the openai package for Node. Arguments: the server's address, the package's folder.
import assert from "node:assert/strict";
import { createRequire } from "node:module";

const [url, folder] = process.argv.slice(2);
const OpenAI = createRequire(`${folder}/`)("openai");
const MODEL = "tiny";
const TEXT = "Hello 😀 wörld\nand on";
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0, timeout: 20000 });
const told = (say = TEXT, order = {}) => `@@${JSON.stringify({ say, ...order })}@@`;
const messages = (text) => [{ role: "system", content: "Be kind." }, { role: "user", content: text }];

const checks = {
  async completion() {
    const answer = await client.completions.create({ model: MODEL, prompt: told(), max_tokens: 100 });
    assert.equal(answer.choices[0].text, TEXT);
    assert.equal(answer.choices[0].finish_reason, "stop");
    assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
  },

  async chat() {
    const answer = await client.chat.completions.create({ model: MODEL, messages: messages(told()) });
    assert.equal(answer.choices[0].message.content, TEXT);
  },

  async streams() {
    const options = { stream: true, stream_options: { include_usage: true } };
    const stream = await client.chat.completions.create({ model: MODEL, messages: messages(told()), n: 2, ...options });
    const texts = ["", ""];
    let usage = null;
    for await (const event of stream) {
      for (const choice of event.choices) texts[choice.index] += choice.delta.content ?? "";
      usage = event.usage ?? usage;
    }
    assert.deepEqual(texts, [TEXT, TEXT]);
    assert.ok(usage.completion_tokens > 0);
    let text = "";
    const plain = await client.completions.create({ model: MODEL, prompt: told(), max_tokens: 100, stream: true });
    for await (const event of plain) text += event.choices[0].text;
    assert.equal(text, TEXT);
  },

  async stream_helper() {
    const runner = client.chat.completions.stream({ model: MODEL, messages: messages(told("helped", { every: 0.002 })) });
    assert.equal(await runner.finalContent(), "helped");
  },

  async logprobs() {
    const asked = { model: MODEL, messages: messages(told("abc")), logprobs: true, top_logprobs: 2 };
    const { content } = (await client.chat.completions.create(asked)).choices[0].logprobs;
    assert.equal(content.map((entry) => entry.token).join(""), "abc");
    assert.equal(content[0].top_logprobs.length, 2);
  },

  async errors() {
    const wrong = client.completions.create({ model: MODEL, prompt: "x", temperature: 3 });
    await assert.rejects(wrong, (error) => {
      assert.ok(error instanceof OpenAI.BadRequestError);
      return error.param === "temperature" && error.code === "invalid_value";
    });
    const missing = client.chat.completions.create({ model: "none", messages: messages("x") });
    await assert.rejects(missing, (error) => error instanceof OpenAI.NotFoundError && error.code === "model_not_found");
  },

  async an_error_within_a_stream() {
    const prompt = told("some text", { finish: "error", every: 0.02 });
    const stream = await client.completions.create({ model: MODEL, prompt, max_tokens: 100, stream: true });
    await assert.rejects(async () => {
      for await (const event of stream) assert.ok(event.choices);
    }, OpenAI.APIError);
  },

  async timeout() {
    const late = client.completions.create({ model: MODEL, prompt: told("x", { delay: 5 }) }, { timeout: 300 });
    await assert.rejects(late, OpenAI.APIConnectionTimeoutError);
  },

  async leaving_a_stream() {
    const prompt = told("a b c d e f g ".repeat(50), { every: 0.02 });
    const stream = await client.completions.create({ model: MODEL, prompt, max_tokens: 900, stream: true });
    for await (const event of stream) {
      assert.ok(event.choices[0].text);
      break;
    }
  },

  async models() {
    assert.deepEqual((await client.models.list()).data.map((model) => model.id), [MODEL]);
    assert.equal((await client.models.retrieve(MODEL)).object, "model");
  },
};

for (const [check, run] of Object.entries(checks)) {
  let error = "";
  try {
    await run();
  } catch (caught) {
    error = String(caught.stack);
  }
  console.log(`{"check":${JSON.stringify(check)},"error":${JSON.stringify(error)}}`);
}
