// The AI SDK with the provider of a vendor, "openai" or "anthropic": prints what tests/serve/test_serve_clients.py compares.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, isStepCount, jsonSchema, streamText, tool } from "ai";

const [url, key, vendor, whole_items] = process.argv.slice(2);
const create = { openai: createOpenAI, anthropic: createAnthropic }[vendor];
const provider = (apiKey) => create({ baseURL: `${url}/v1`, apiKey });
const model = provider(key)("tiny");
const request = { model, prompt: "Who are you?", maxOutputTokens: 100, maxRetries: 0 };
const usage = (found) => [found.inputTokens, found.outputTokens];
const status = (more) => generateText({ ...request, ...more }).then(() => 200, (error) => error.statusCode);

const whole = await generateText(request);
const stream = streamText(request);
let streamed = "";
for await (const text of stream.textStream) streamed += text;

const numbers = [];
const look = tool({
  inputSchema: jsonSchema({ type: "object", properties: { number: { type: "integer" } }, additionalProperties: false }),
  execute: async ({ number }) => { numbers.push(number); return `Found ${number}.`; },
});
// By default the provider of OpenAI refers to earlier items in the second step.
const providerOptions = whole_items ? { openai: { store: false } } : {};
const loop = streamText({ ...request, providerOptions, prompt: "Look.", tools: { look }, stopWhen: isStepCount(20) });
const end = await loop.text;
console.log(JSON.stringify({
  whole: whole.text, usage: usage(whole.usage), streamed, stream_usage: usage(await stream.usage), numbers, end,
  no_model: await status({ model: provider(key)("gpt-9") }), no_key: await status({ model: provider("wrong")("tiny") }),
}));
