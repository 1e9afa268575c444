"""litellm: prints what tests/serve/test_serve_clients.py compares."""

import json
import sys

import litellm
import openai

url, key, stop = sys.argv[1:]
message = [{"role": "user", "content": "Who are you?"}]
litellm.suppress_debug_info = True


def ask(model="tiny", api_key=key, **fields):
    return litellm.completion(
        f"openai/{model}",
        message,
        api_base=f"{url}/v1",
        api_key=api_key,
        max_tokens=12,
        max_retries=0,
        **fields,
    )


def status(**fields) -> int:
    try:
        ask(**fields)
    except openai.APIStatusError as error:
        return error.status_code
    return 200


def usage(found) -> list[int]:
    return [found.prompt_tokens, found.completion_tokens]


whole, stopped = ask(), ask(stop=[stop])
chunks = list(ask(stream=True, stream_options={"include_usage": True}))
said = [choice for chunk in chunks for choice in chunk.choices]
print(
    json.dumps(
        {
            "whole": whole.choices[0].message.content,
            "reason": whole.choices[0].finish_reason,
            "usage": usage(whole.usage),
            "streamed": "".join(choice.delta.content or "" for choice in said),
            "stream_reason": next(choice.finish_reason for choice in said if choice.finish_reason),
            "stream_usage": usage(
                next(chunk.usage for chunk in chunks if getattr(chunk, "usage", None))
            ),
            "stopped": stopped.choices[0].message.content,
            "stop_reason": stopped.choices[0].finish_reason,
            "no_model": status(model="gpt-9"),
            "no_key": status(api_key="wrong"),
        }
    )
)
