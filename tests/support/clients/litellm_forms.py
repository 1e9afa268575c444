"""litellm and /v1/responses or /v1/messages: prints what tests/serve/test_serve_clients.py compares."""

import json
import sys

import litellm
import openai

url, key, form = sys.argv[1:]
litellm.suppress_debug_info = True
LOOK = {
    "name": "look",
    "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}},
}


def message(text: str) -> list:
    return [{"role": "user", "content": text}]


def responses(messages: list, model: str = "tiny", key: str = key, **fields):
    return litellm.responses(
        model=f"openai/{model}",
        input=messages,
        api_base=f"{url}/v1",
        api_key=key,
        max_retries=0,
        **fields,
    )


def completion(messages: list, model: str = "tiny", key: str = key, **fields):
    return litellm.completion(
        f"anthropic/{model}",
        messages,
        api_base=url,
        api_key=key,
        max_tokens=100,
        max_retries=0,
        **fields,
    )


def loop_of_responses() -> tuple[list, str]:
    """(numbers of the calls, the last text)"""
    messages, numbers = message("Look."), []
    while True:
        answer = responses(messages, tools=[{"type": "function", **LOOK}])
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return numbers, answer.output_text
        messages += [item.model_dump() for item in answer.output]
        for call in calls:
            numbers.append(json.loads(call.arguments)["number"])
            messages.append(
                {"type": "function_call_output", "call_id": call.call_id, "output": "Found."}
            )


def loop_of_messages() -> tuple[list, str]:
    """(numbers of the calls, the last text)"""
    messages, numbers = message("Look."), []
    while True:
        answer = (
            completion(messages, tools=[{"type": "function", "function": LOOK}]).choices[0].message
        )
        if not answer.tool_calls:
            return numbers, answer.content
        messages.append(answer.model_dump())
        for call in answer.tool_calls:
            numbers.append(json.loads(call.function.arguments)["number"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "Found."})


def read_responses() -> dict:
    whole, *events = (
        responses(message("Who are you?")),
        *responses(message("Who are you?"), stream=True),
    )
    end = events[-1].response.usage
    return {
        "whole": whole.output_text,
        "usage": [whole.usage.input_tokens, whole.usage.output_tokens],
        "streamed": "".join(
            event.delta for event in events if event.type == "response.output_text.delta"
        ),
        "stream_usage": [end.input_tokens, end.output_tokens],
    }


def read_messages() -> dict:
    whole = completion(message("Who are you?"))
    chunks = list(
        completion(message("Who are you?"), stream=True, stream_options={"include_usage": True})
    )
    end = next(chunk.usage for chunk in chunks if getattr(chunk, "usage", None))
    return {
        "whole": whole.choices[0].message.content,
        "usage": [whole.usage.prompt_tokens, whole.usage.completion_tokens],
        "streamed": "".join(one.delta.content or "" for chunk in chunks for one in chunk.choices),
        "stream_usage": [end.prompt_tokens, end.completion_tokens],
    }


ask = {"responses": responses, "messages": completion}[form]


def status(**fields) -> int:
    try:
        ask(message("Who are you?"), **fields)
    except openai.APIStatusError as error:
        return error.status_code
    return 200


found = {"responses": read_responses, "messages": read_messages}[form]()
numbers, end = {"responses": loop_of_responses, "messages": loop_of_messages}[form]()
print(
    json.dumps(
        found
        | {
            "numbers": numbers,
            "end": end,
            "no_model": status(model="gpt-9"),
            "no_key": status(key="wrong"),
        }
    )
)
