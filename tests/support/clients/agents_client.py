"""OpenAI's Agents SDK with its default model class: prints what tests/serve/test_serve_clients.py compares."""

import asyncio
import json
import sys

import openai
from agents import Agent, Runner, function_tool, set_default_openai_client, set_tracing_disabled

url, key = sys.argv[1:]
set_tracing_disabled(True)
numbers = []


@function_tool
def look(number: int) -> str:
    """Look at the place with this number."""
    numbers.append(number)
    return f"Found {number}."


def use(key: str) -> None:
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    set_default_openai_client(client, use_for_tracing=False)


def agent(model: str = "tiny", **fields) -> Agent:
    return Agent("Looker", model=model, **fields)


async def status(model: str = "tiny") -> int:
    try:
        await Runner.run(agent(model), "Who are you?")
    except openai.APIStatusError as error:
        return error.status_code
    return 200


def usage(found) -> list[int]:
    total = found.context_wrapper.usage
    return [total.input_tokens, total.output_tokens]


async def main() -> dict:
    use(key)
    whole = await Runner.run(agent(), "Who are you?")
    stream = Runner.run_streamed(agent(), "Who are you?")
    streamed = ""
    async for event in stream.stream_events():
        if getattr(getattr(event, "data", None), "type", "") == "response.output_text.delta":
            streamed += event.data.delta
    loop = await Runner.run(agent(tools=[look]), "Look.", max_turns=20)
    found = {
        "whole": whole.final_output,
        "usage": usage(whole),
        "streamed": streamed,
        "stream_usage": usage(stream),
        "numbers": numbers,
        "end": loop.final_output,
        "no_model": await status("gpt-9"),
    }
    use("wrong")
    return found | {"no_key": await status()}


print(json.dumps(asyncio.run(main())))
