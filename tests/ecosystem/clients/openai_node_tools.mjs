// Tools with the openai package for Node, whose helpers put calls together. Arguments: address, the package's folder.
import assert from "node:assert/strict";
import { createRequire } from "node:module";

const [url, folder] = process.argv.slice(2);
const OpenAI = createRequire(`${folder}/`)("openai");
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0, timeout: 20000 });
const told = (say, order = {}) => [{ role: "user", content: `@@${JSON.stringify({ say, ...order })}@@` }];
const args = '{"city": "Zürich 😀"}';
const call = `<tool_call>\n{"name": "weather", "arguments": ${args}}\n</tool_call>`;
const parameters = { type: "object", properties: { city: { type: "string" } } };
const common = { model: "tiny", tools: [{ type: "function", function: { name: "weather", parameters } }] };

function check_choice(choice, content) {
  assert.equal(choice.finish_reason, "tool_calls");
  assert.equal(choice.message.content, content);
  assert.deepEqual(choice.message.tool_calls.map((one) => [one.type, one.function.name, one.function.arguments]), [
    ["function", "weather", args],
    ["function", "weather", args],
  ]);
}

const checks = {
  async calls() {
    const answer = await client.chat.completions.create({ ...common, messages: told(`${call}\n${call}`) });
    check_choice(answer.choices[0], null);
  },

  async stream_helper() {
    const messages = told(`Well.\n${call}\n${call}`, { every: 0.001 });
    const runner = client.chat.completions.stream({ ...common, messages });
    check_choice((await runner.finalChatCompletion()).choices[0], "Well.\n");
  },

  async forced_call() {
    const messages = told(` ${args}}\n</tool_call>`);
    const tool_choice = { type: "function", function: { name: "weather" } };
    const runner = client.chat.completions.stream({ ...common, messages, tool_choice });
    assert.equal((await runner.finalFunctionToolCall()).arguments, args);
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
