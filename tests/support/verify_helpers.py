"""The fixture `verify`, which runs `nanokv verify` in this process, and readers of what it prints."""

import json

import pytest

from nanokv.apps.cli import main


@pytest.fixture(name="verify")
def verify_command(capsys):
    """Run the command in this process → (exit code, stdout, stderr)."""

    def run(*argv):
        capsys.readouterr()
        code = main(["verify", *map(str, argv)])
        return code, *capsys.readouterr()

    return run


def rows(out: str) -> dict:
    """{check: status} of the printed table."""
    lines = (line.split(maxsplit=1) for line in out.splitlines())
    found = {}
    for words in lines:
        if len(words) == 2 and words[0] in ("ok", "differs", "skipped"):
            found[words[1][:36].strip()] = words[0]
    return found


def report_of(verify, *argv) -> dict:
    code, out, err = verify(*argv, "--json", "-q")
    assert code in (0, 1) and err == "", err
    report = json.loads(out)
    assert (report["verdict"] == "equal") == (code == 0)
    return report | {"status": {check["name"]: check["status"] for check in report["checks"]}}
