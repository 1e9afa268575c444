// @anthropic-ai/sdk and /v1/messages: prints what tests/serve/test_serve_clients.py compares.
import Anthropic from "@anthropic-ai/sdk";

const [url, key] = process.argv.slice(2);
const client = new Anthropic({ baseURL: url, apiKey: key, maxRetries: 0 });
const request = { model: "tiny", max_tokens: 100, messages: [{ role: "user", content: "Who are you?" }] };
const usage = (found) => [found.input_tokens + found.cache_read_input_tokens, found.output_tokens];
const status = (promise) => promise.then(() => 200, (error) => error.status);

const whole = await client.messages.create(request);
const { model, messages: asked } = request;
const { input_tokens } = await client.messages.countTokens({ model, messages: asked });
if (input_tokens !== usage(whole.usage)[0]) throw new Error(`${input_tokens} tokens are counted`);
const stream = client.messages.stream(request);
let streamed = "";
stream.on("text", (text) => { streamed += text; });
const final = await stream.finalMessage();

const input_schema = { type: "object", properties: { number: { type: "integer" } } };
const tools = [{ name: "look", input_schema }], messages = [{ role: "user", content: "Look." }], numbers = [];
let answer;
do {
  answer = await client.messages.stream({ ...request, messages, tools }).finalMessage();
  messages.push({ role: "assistant", content: answer.content });
  const calls = answer.content.filter((block) => block.type === "tool_use");
  numbers.push(...calls.map((call) => call.input.number));
  messages.push({ role: "user", content: calls.map((call) => (
    { type: "tool_result", tool_use_id: call.id, content: `Found ${call.input.number}.` })) });
} while (answer.stop_reason === "tool_use");
console.log(JSON.stringify({
  whole: whole.content[0].text, usage: usage(whole.usage), streamed, stream_usage: usage(final.usage),
  numbers, end: answer.content[0].text,
  no_model: await status(client.messages.create({ ...request, model: "gpt-9" })),
  no_key: await status(new Anthropic({ baseURL: url, apiKey: "wrong", maxRetries: 0 }).messages.create(request)),
}));
