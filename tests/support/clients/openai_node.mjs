// openai for Node: prints what tests/serve/test_serve_clients.py compares.
import OpenAI from "openai";

const [url, key, stop] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0 });
const request = { model: "tiny", messages: [{ role: "user", content: "Who are you?" }], max_tokens: 12 };
const usage = (found) => [found.prompt_tokens, found.completion_tokens];
const status = (promise) => promise.then(() => 200, (error) => error.status);

const whole = await client.chat.completions.create(request);
const stopped = await client.chat.completions.create({ ...request, stop: [stop] });
let streamed = "", reason, counted;
const options = { stream: true, stream_options: { include_usage: true } };
for await (const chunk of await client.chat.completions.create({ ...request, ...options })) {
  streamed += chunk.choices[0]?.delta.content ?? "";
  reason = chunk.choices[0]?.finish_reason ?? reason;
  counted = chunk.usage ?? counted;
}
console.log(JSON.stringify({
  whole: whole.choices[0].message.content, reason: whole.choices[0].finish_reason, usage: usage(whole.usage),
  streamed, stream_reason: reason, stream_usage: usage(counted),
  stopped: stopped.choices[0].message.content, stop_reason: stopped.choices[0].finish_reason,
  no_model: await status(client.chat.completions.create({ ...request, model: "gpt-9" })),
  no_key: await status(new OpenAI({ baseURL: `${url}/v1`, apiKey: "wrong", maxRetries: 0 }).models.list()),
}));
