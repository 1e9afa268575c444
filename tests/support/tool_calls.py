"""Tools that tests offer, a small template that takes them, and what was called."""

import copy
import json

HERMES = (  # a template in few tokens, as models of this kind have it
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}Call by <tool_call>"
    "<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


def tool(name, **more):
    return {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {}}} | more,
    }


WEATHER = tool("weather", parameters={"type": "object", "properties": {"city": {"type": "string"}}})
TOOLS = {"tools": [WEATHER, tool("time")]}


def written(name="weather", **arguments) -> str:
    return (
        "<tool_call>\n"
        + json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        + "\n</tool_call>"
    )


OSLO, TIME = written(city="Oslo"), written("time")


def with_template(tokenizer, template):
    other = copy.copy(tokenizer)
    other.chat_template, other._compiled = template, None
    return other


def said(choice) -> tuple:
    """(content, [(name, arguments)], finish_reason) of a choice of a whole answer."""
    calls = [
        (one["function"]["name"], json.loads(one["function"]["arguments"]))
        for one in choice["message"].get("tool_calls", [])
    ]
    return choice["message"]["content"], calls, choice["finish_reason"]
