"""llm with two entries of extra-openai-models.yaml: prints what tests/serve/test_serve_clients.py compares."""

import json
import sys

import llm
import openai

url, key, stop = sys.argv[1:]
entry = {"api_base": f"{url}/v1", "api_key_name": "nanokv"}
models = [entry | {"model_id": name, "model_name": name} for name in ("tiny", "gpt-9")]
# JSON is YAML.
(llm.user_dir() / "extra-openai-models.yaml").write_text(json.dumps(models), encoding="utf-8")


def ask(model="tiny", key=key, stream=False, **options):
    return llm.get_model(model).prompt(
        "Who are you?", key=key, stream=stream, max_tokens=12, **options
    )


def status(**more) -> int:
    try:
        ask(**more).text()
    except openai.APIStatusError as error:
        return error.status_code
    return 200


def reason(response) -> str:
    found = response.response_json
    return found.get("choices", [found])[0]["finish_reason"]  # llm keeps less of a stream


def usage(response) -> list[int]:
    return [response.usage().input, response.usage().output]


whole, stopped, stream = ask(), ask(stop=stop), ask(stream=True)
print(
    json.dumps(
        {
            "whole": whole.text(),
            "reason": reason(whole),
            "usage": usage(whole),
            "streamed": "".join(stream),
            "stream_reason": reason(stream),
            "stream_usage": usage(stream),
            "stopped": stopped.text(),
            "stop_reason": reason(stopped),
            "no_model": status(model="gpt-9"),
            "no_key": status(key="wrong"),
        }
    )
)
