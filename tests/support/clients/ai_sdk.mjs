// The AI SDK with its OpenAI-compatible provider: prints what tests/serve/test_serve_clients.py compares.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";

const [url, key, stop] = process.argv.slice(2);
const provider = (apiKey) => createOpenAICompatible({ name: "nanokv", baseURL: `${url}/v1`, apiKey, includeUsage: true });
const request = { model: provider(key)("tiny"), prompt: "Who are you?", maxOutputTokens: 12, maxRetries: 0 };
const usage = (found) => [found.inputTokens, found.outputTokens];
const status = (more) => generateText({ ...request, ...more }).then(() => 200, (error) => error.statusCode);

const whole = await generateText(request);
const stopped = await generateText({ ...request, stopSequences: [stop] });
const stream = streamText(request);
let streamed = "";
for await (const text of stream.textStream) streamed += text;
console.log(JSON.stringify({
  whole: whole.text, reason: whole.finishReason, usage: usage(whole.usage),
  streamed, stream_reason: await stream.finishReason, stream_usage: usage(await stream.usage),
  stopped: stopped.text, stop_reason: stopped.finishReason,
  no_model: await status({ model: provider(key)("gpt-9") }), no_key: await status({ model: provider("wrong")("tiny") }),
}));
