"""Session files: whole lines or nothing, mode 0600, torn ends repaired, full disks survived."""

import json
import os
import stat

import pytest

from nanokv.apps.cli.chat import transcript
from nanokv.errors import SessionError

TURN = {
    "user": "My name is Zorbla.",
    "answer": "Nice to meet you.",
    "finish_reason": "stop",
    "settings": {"seed": 1},
}


@pytest.fixture
def file(tmp_path):
    return transcript.Transcript(
        tmp_path / "nanokv" / "sessions" / "one.jsonl", transcript.header("tiny", "abc")
    )


def test_nothing_is_created_before_the_first_turn(file):
    assert not file.path.parent.exists()
    file.append(TURN)
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.path.parent.stat().st_mode) == 0o700


def test_turns_come_back_with_settings_and_half_answers_marked(file):
    file.append(TURN)
    file.append(
        TURN
        | {
            "user": "And\nme \u2028?",
            "answer": "\x1b[2J half",
            "finish_reason": "interrupted",
            "settings": {"seed": 2},
        }
    )
    head, messages, turns, notices = transcript.read(file.path)
    assert [m["role"] for m in messages] == ["user", "assistant"] * 2
    assert messages[2]["content"] == "And\nme \u2028?"
    assert messages[3] == {"role": "assistant", "content": "\x1b[2J half", "interrupted": True}
    assert (
        head["settings"] == {"seed": 2}
        and head["model"] == "tiny"
        and len(turns) == 2
        and notices == []
    )


def test_a_history_line_replaces_what_came_before(file):
    file.append(TURN)
    file.append(
        {"history": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    )
    file.append(TURN)
    assert [m["content"] for m in transcript.read(file.path)[1]] == [
        "a",
        "b",
        TURN["user"],
        TURN["answer"],
    ]


TORN = (
    b'{"user": "to',
    b'{"user": "whole but no newline", "answer": "x"}',
    b"\xff\xfe\x00",
    b"[1]",
)


@pytest.mark.parametrize("torn", TORN)
def test_a_torn_last_line_is_reported_and_repaired(file, torn):
    file.append(TURN)
    good = file.path.read_bytes()
    file.path.write_bytes(good + torn)
    _, messages, _, notices = transcript.read(file.path)
    assert len(messages) == 2 and notices == [
        f"one.jsonl: the last line was torn, {len(torn)} bytes dropped"
    ]
    assert file.path.read_bytes() == good + torn, "reading alone changes nothing"
    transcript.read(file.path, repair=True)
    assert file.path.read_bytes() == good
    transcript.Transcript.reopen(file.path).append(TURN)
    assert len(transcript.read(file.path)[1]) == 4


def test_a_broken_line_in_the_middle_is_refused_with_its_number(file):
    file.append(TURN)
    text = file.path.read_text()
    file.path.write_text(text + "{oops\n" + text)
    with pytest.raises(SessionError, match="line 3"):
        transcript.read(file.path)


@pytest.mark.parametrize("data", [b"", b"{}\n", b"hello\nworld\n", b'{"format": "other"}\n'])
def test_a_file_that_is_no_session_is_refused(tmp_path, data):
    (tmp_path / "x.jsonl").write_bytes(data)
    with pytest.raises(SessionError, match="not a"):
        transcript.read(tmp_path / "x.jsonl")


@pytest.mark.parametrize(
    "entry",
    [
        {"history": "text"},
        {"history": [{"role": "user"}]},
        {"user": 7, "answer": "x"},
        {"user": "x"},
        {"history": [1]},
    ],
)
def test_wrong_types_inside_a_line_are_refused(file, entry):
    file.append(TURN)
    file.append(entry)
    with pytest.raises(SessionError, match="line 3"):
        transcript.read(file.path)


def full_after(monkeypatch, room):
    """os.write that takes `room` bytes in all and then says that the disk is full."""
    left, write = [room], os.write

    def limited(descriptor, data):
        if left[0] <= 0:
            raise OSError(28, "No space left on device")
        count = write(descriptor, bytes(data[: left[0]]))
        left[0] -= count
        return count

    monkeypatch.setattr(os, "write", limited)


@pytest.mark.parametrize("room", [0, 1, 50, 90])
def test_full_disk_takes_a_half_written_line_back_and_tries_again(file, monkeypatch, room):
    file.append(TURN)
    good = file.path.read_bytes()
    with monkeypatch.context() as patch:
        full_after(patch, room)
        with pytest.raises(SessionError, match=r"session not saved: no space \(need \d+ B\)"):
            file.append(TURN | {"user": "Two."})
    assert file.path.read_bytes() == good
    file.append(TURN | {"user": "Three."})
    users = [m["content"] for m in transcript.read(file.path)[1][::2]]
    assert users == [TURN["user"], "Two.", "Three."], (
        "what could not be saved came with the next turn"
    )


def test_dev_full(tmp_path):
    with pytest.raises(SessionError, match="no space"):
        transcript.write_whole("/dev/full", [TURN])
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)
    (tmp_path / "full.jsonl").symlink_to("/dev/full")
    with pytest.raises(SessionError, match="no space"):
        transcript.Transcript(tmp_path / "full.jsonl", {}).append(TURN)


@pytest.mark.parametrize("fails", ["write", "replace", "fsync"])
def test_write_whole_keeps_the_old_file_on_any_failure(tmp_path, monkeypatch, fails):
    path = tmp_path / "talk.jsonl"
    transcript.write_whole(path, [{"old": True}])

    def explode(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, fails, explode)
        with pytest.raises(SessionError, match="no space"):
            transcript.write_whole(path, [{"new": True}])
    assert json.loads(path.read_text()) == {"old": True}
    assert [p.name for p in tmp_path.iterdir()] == ["talk.jsonl"], "no temporary file stays"


def test_newest_session_is_found_and_a_prefix_is_enough(tmp_path):
    for i, name in enumerate(("20260101-1-aa", "20260102-1-bb", "20260102-2-cc")):
        file = transcript.Transcript(tmp_path / f"{name}.jsonl", transcript.header("tiny", "x"))
        file.append(TURN)
        os.utime(file.path, (i, i))
    assert transcript.find(tmp_path, "").stem == "20260102-2-cc"
    assert transcript.find(tmp_path, "20260101").stem == "20260101-1-aa"
    with pytest.raises(SessionError, match="2 sessions begin with"):
        transcript.find(tmp_path, "20260102")
    with pytest.raises(SessionError, match="no saved session"):
        transcript.find(tmp_path / "empty", "")
    assert next(row[0] for row in transcript.listing(tmp_path)) == "20260102-2-cc"


def test_the_newest_session_to_resume_is_none_that_was_cleared(tmp_path):
    """The chat was left after /clear, and `--resume` brought back 0 turns instead of the talk before it."""
    told, cleared = (
        transcript.Transcript(tmp_path / f"{n}.jsonl", transcript.header("tiny", "x")) for n in "ab"
    )
    told.append(TURN)
    cleared.append(TURN)
    cleared.append({"history": []})
    for modified, file in enumerate((told, cleared)):
        os.utime(file.path, (modified, modified))
    assert transcript.find(tmp_path, "") == told.path
    assert transcript.find(tmp_path, "b") == cleared.path, "by its name it is still found"
    told.path.unlink()
    assert transcript.find(tmp_path, "") == cleared.path
    (tmp_path / "c.jsonl").write_text("no session\n")
    assert transcript.find(tmp_path, "").stem == "c", "whoever opens it says what is wrong"


WRONG = {
    "model": 5,
    "fingerprint": ["a"],
    "system": 7,
    "kv": "../other.kv",
    "settings": "hot",
    "settings.stop": 5,
    "settings.temperature": "warm",
    "settings.top_k": 1.5,
    "settings.seed": 2**64,
    "settings.top_p": 2.5,
    "settings.min_p": True,
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("where", ("header", "turn"))
def test_a_wrong_type_is_an_error_with_line_and_field(file, name, where):
    outer, _, inner = name.partition(".")
    fields = {outer: {inner: WRONG[name]} if inner else WRONG[name]}
    head, turn = transcript.header("tiny", "abc"), dict(TURN)
    (head if where == "header" else turn).update(fields)
    file.path.parent.mkdir(parents=True)
    file.path.write_text(json.dumps(head) + "\n" + json.dumps(turn) + "\n")
    with pytest.raises(
        SessionError, match=rf"one.jsonl, line {1 if where == 'header' else 2}: {name}\b.* not "
    ):
        transcript.read(file.path)


def test_settings_of_every_allowed_kind_are_read(file):
    settings = {
        "stop": ["END"],
        "temperature": 1,
        "top_p": 0.5,
        "seed": 2**62,
        "top_k": None,
        "from_tomorrow": [1],
    }
    file.append(TURN | {"settings": settings, "system": None})
    assert transcript.read(file.path)[0]["settings"] == settings


def test_nesting_without_end_is_no_line_of_a_session(file):
    file.append(TURN)
    with open(file.path, "a") as out:
        out.write("[" * 100_000 + "\n" + json.dumps(TURN) + "\n")
    with pytest.raises(SessionError, match="line 3: not a line of a session"):
        transcript.read(file.path)


def test_without_a_home_the_state_folder_says_what_to_set(monkeypatch):
    from nanokv.errors import NanoKVError

    for name in ("HOME", "XDG_STATE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    with pytest.raises(NanoKVError, match="home folder is unknown") as error:
        transcript.state_folder()
    assert error.value.hint == "set HOME"
