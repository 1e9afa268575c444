// openai for Node and /v1/responses: prints what tests/serve/test_serve_clients.py compares.
import OpenAI from "openai";

const [url, key] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0 });
const request = { model: "tiny", input: "Who are you?" };
const usage = (found) => [found.input_tokens, found.output_tokens];
const status = (promise) => promise.then(() => 200, (error) => error.status);

const whole = await client.responses.create(request);
const stream = client.responses.stream(request);
let streamed = "";
for await (const event of stream) if (event.type === "response.output_text.delta") streamed += event.delta;
const final = await stream.finalResponse();

const parameters = { type: "object", properties: { number: { type: "integer" } }, additionalProperties: false };
const tools = [{ type: "function", name: "look", parameters, strict: false }];
const input = [{ role: "user", content: "Look." }], numbers = [];
let answer, calls;
do {
  answer = await client.responses.stream({ model: "tiny", input, tools }).finalResponse();
  calls = answer.output.filter((item) => item.type === "function_call");
  input.push(...answer.output);
  for (const call of calls) {
    const { number } = JSON.parse(call.arguments);
    numbers.push(number);
    input.push({ type: "function_call_output", call_id: call.call_id, output: `Found ${number}.` });
  }
} while (calls.length);
console.log(JSON.stringify({
  whole: whole.output_text, usage: usage(whole.usage), streamed, stream_usage: usage(final.usage),
  numbers, end: answer.output_text,
  no_model: await status(client.responses.create({ ...request, model: "gpt-9" })),
  no_key: await status(new OpenAI({ baseURL: `${url}/v1`, apiKey: "wrong", maxRetries: 0 }).responses.create(request)),
}));
