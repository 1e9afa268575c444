"""From the command to the first token: what a start reads, imports and waits for."""

import json
import subprocess
import sys

import pytest

from cli_helpers import environment

COUNT = """if True:
    import collections, json, sys
    opened = collections.Counter()
    def hook(event, args):
        if event == "open" and isinstance(args[0], str) and args[0].endswith((".json", ".jinja")):
            opened[args[0].rsplit("/", 1)[1]] += 1
    sys.addaudithook(hook)
    from nanokv.cli import main
    code = main(sys.argv[1:])
    heavy = [name for name in ("transformers", "sympy", "torch._dynamo", "matplotlib") if name in sys.modules]
    print(json.dumps([code, opened, heavy]), file=sys.stderr)
"""


@pytest.mark.parametrize("argv", [["generate", "Hi", "-n", "1"], ["chat", "-n", "1"]], ids=lambda argv: argv[0])
def test_a_start_reads_each_file_once_and_imports_no_compiler(tiny_folder, argv):
    """config.json was read 5 times and tokenizer.json 3 times: 11 MB for Qwen3."""
    done = subprocess.run(
        [sys.executable, "-c", COUNT, *argv, "-m", str(tiny_folder)], input=b"Hi\n", env=environment(), check=True,
        capture_output=True, timeout=120,
    )  # fmt: skip
    code, opened, heavy = json.loads(done.stderr.splitlines()[-1])
    expected = {path.name for path in tiny_folder.glob("*.json")} - {"special_tokens_map.json"}
    assert code == 0 and opened == dict.fromkeys(expected, 1) and heavy == []
