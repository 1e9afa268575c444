"""langchain-openai: prints what tests/serve/test_serve_clients.py compares."""

import json
import sys

import openai
from langchain_openai import ChatOpenAI

url, key, stop = sys.argv[1:]
settings = {
    "base_url": f"{url}/v1",
    "api_key": key,
    "model": "tiny",
    "max_tokens": 12,
    "max_retries": 0,
}


def status(**more) -> int:
    try:
        ChatOpenAI(**settings | more).invoke("Who are you?")
    except openai.APIStatusError as error:
        return error.status_code
    return 200


def usage(found) -> list[int]:
    return [found["input_tokens"], found["output_tokens"]]


model = ChatOpenAI(**settings, stream_usage=True)
whole, stopped = model.invoke("Who are you?"), model.invoke("Who are you?", stop=[stop])
chunks = list(model.stream("Who are you?"))
streamed = sum(chunks[1:], start=chunks[0])
print(
    json.dumps(
        {
            "whole": whole.content,
            "reason": whole.response_metadata["finish_reason"],
            "usage": usage(whole.usage_metadata),
            "streamed": "".join(chunk.content for chunk in chunks),
            "stream_reason": streamed.response_metadata["finish_reason"],
            "stream_usage": usage(streamed.usage_metadata),
            "stopped": stopped.content,
            "stop_reason": stopped.response_metadata["finish_reason"],
            "no_model": status(model="gpt-9"),
            "no_key": status(api_key="wrong"),
        }
    )
)
