"""`nanokv reuse`: the tokens of the next prompt that are had, by hand, by the two indexes and by an engine.

The tokenizer of the first tests has a token per character, so that every number can be counted in the line above it.
"""

import json
import shutil

import pytest
import torch

from nanokv.engine import Engine
from nanokv.errors import ContextError, NanoKVError
from nanokv.lab.replay.changes import (
    CHANGES,
    RECORDED,
    REMOVED,
    Requests,
    Talk,
    Writer,
    changes_of,
    left_out,
    read_talk,
    reused,
    spelled_out,
)
from nanokv.lab.replay.served import measure
from nanokv.text.ids import common_prefix
from nanokv.text.template import LeftOut
from nanokv.text.tokenizer import Tokenizer
from oracle import HYBRID, tiny_config
from small_model import small
from tiny_checkpoint import write_tokenizer

END = 3  # "#"


class Letters:
    """A token per character; `#` ends a turn. Thoughts are shown in the newest answer only."""

    control_ids = frozenset({END})

    def encode(self, text):
        return [{"\n": 95}.get(letter, ord(letter) - 32) for letter in text]

    def render(self, messages, tools=None, ask=True):
        text = "".join(tools or ())
        for one in messages:
            thought = ""
            if one is messages[-1] and one["role"] == "assistant":
                thought = one.get("reasoning_content", "")
            text += one["role"][0] + thought + one["content"] + "#"
        return text + "a" * ask


def talk(**more) -> Talk:
    said = (
        {"role": "system", "content": "Be"},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yo", "reasoning_content": "?!"},
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "Two", "reasoning_content": "??"},
        {"role": "user", "content": "And"},
    )
    return Talk(said, **more)


def counts(name: str, given: Talk, page: int = 1) -> tuple[int, int]:
    """(tokens of the next prompt, reused ones), by both indexes."""
    found = Writer(Letters()).requests(CHANGES[name], given)
    tokens = {reused(found, page, index) for index in ("hash", "radix")}
    assert len(tokens) == 1
    return len(found.prompt), tokens.pop()


def test_the_numbers_of_each_change_by_hand():
    #           sBe#uHi#aYo#uOne#aTwo        was held; the end token is never fed
    #           sBe#uHi#aYo#uOne#aTwo#uAnd#a
    assert counts("messages appended", talk()) == (28, 21)
    assert counts("messages appended", talk(), page=4) == (28, 20)
    #           sBe#uHi#aYo#uOne#a??Two      thoughts of the newest answer
    assert counts("thinking dropped", talk()) == (28, 18)
    #           sIt is 10:41.\nBe#…
    #           sIt is 10:42.\nBe#…
    assert counts("clock, in the first line", talk()) == (28 + 13, 11)
    # Three clocks of 13 characters, of which the last is new.
    assert counts("clock, in each message", talk()) == (28 + 39, 21 + 26)
    #           sBe#u(removed)#aYo#uOne…     the second of three
    assert counts("a turn edited in the middle", talk()) == (28 + len(REMOVED) - 3, 13)
    #           sBe#uSummary of the conversation so far: SUM#aTwo#uAnd#a
    words = len("Summary of the conversation so far: SUM")
    assert counts("compaction", talk(summary="SUM")) == (4 + 1 + words + 1 + 11, 5)


def test_tools_come_before_everything_else():
    """ABsBe#… becomes BAsBe#…: nothing is left."""
    assert counts("tools in another order", talk(tools=("A", "B"))) == (30, 0)
    found = Writer(Letters()).requests(CHANGES["messages appended"], talk(tools=("A", "B")))
    assert reused(found, 1, "hash") == 23
    assert set(CHANGES) - set(changes_of(talk())) == {
        "one more tool",
        "tools in another order",
        "compaction",
    }
    one = talk(tools=("A",))
    assert left_out(one) == {
        "tools in another order": "at most one tool",
        "compaction": "no summary",
    }
    assert set(changes_of(one)) | set(left_out(one)) == set(CHANGES)


def test_the_longest_of_all_earlier_requests_counts():
    found = Requests([[1, 2, 3, 4, 5], [1, 9]], [1, 2, 3, 4, 9])
    assert {reused(found, 1, index) for index in ("hash", "radix")} == {4}
    assert reused(found._replace(held=[]), 1, "hash") == 0


def test_thoughts_that_a_template_never_shows_were_drawn_all_the_same():
    class Silent(Letters):
        def render(self, messages, tools=None, ask=True):
            hidden = [one | {"reasoning_content": ""} for one in messages]
            return super().render(hidden, tools, ask)

    writer = Writer(Silent())
    held = writer.held(Talk(talk().messages[:3]))
    assert held == Letters().encode("sBe#uHi#a<think>\n?!\n</think>\n\nYo")


def test_a_template_that_shows_an_answer_in_another_form_is_refused():
    class Other(Letters):
        def render(self, messages, tools=None, ask=True):
            return super().render(messages, tools, False) + "A" * ask

    with pytest.raises(NanoKVError, match="another form"):
        Writer(Other()).requests(CHANGES["messages appended"], talk())


def test_tools_without_a_place_are_written_into_the_messages():
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    said = ({"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]})
    messages = spelled_out(Talk(said, ({"name": "f"},)))
    assert [one["content"] for one in messages] == [
        '\n{"name": "f"}',
        "Hi",
        '{"name": "f", "arguments": {}}',
    ]

    class NoPlace(Letters):
        def render(self, messages, tools=None, ask=True):
            if tools:
                raise LeftOut("tools", "no place")
            return super().render(messages, tools, ask)

    given = talk(tools=({"name": "A"}, {"name": "B"}))
    found = Writer(NoPlace()).requests(CHANGES["tools in another order"], given)
    assert reused(found, 1, "hash") == len('sBe\n{"name": "')


# --- recorded talks ------------------------------------------------------------------------------------------------


def table(tokenizer, name: str, page: int = 16) -> dict[str, tuple[int, int]]:
    given = read_talk(RECORDED / f"{name}.json")
    found = {}
    for change, how in changes_of(given).items():
        requests = Writer(tokenizer).requests(how, given)
        found[change] = len(requests.prompt), reused(requests, page, "hash")
        assert reused(requests, page, "radix") == found[change][1]
        # Pages of the longest common beginning with anything that was held.
        alike = max(common_prefix(held, requests.prompt) for held in requests.held)
        assert found[change][1] == min(alike, len(requests.prompt) - 1) // page * page
    return found


def test_a_recorded_talk_in_the_bundled_model():
    import weights_loader

    tokenizer = Tokenizer.from_folder(weights_loader.resolve("tiny"))
    assert table(tokenizer, "agent") == {
        "messages appended": (1180, 1136),
        "thinking dropped": (1180, 1104),
        "clock, in the first line": (1190, 0),
        "clock, in each message": (1239, 1200),
        "one more tool": (1269, 608),
        "tools in another order": (1180, 80),
        "a turn edited in the middle": (1096, 832),
        "compaction": (802, 608),
    }
    assert table(tokenizer, "chat")["thinking dropped"] == (341, 272)


def test_a_recorded_talk_in_qwen3(qwen3_files):
    """Its template keeps thoughts until the next question, then drops all; and it shows an empty one in the newest
    answer of a model that did not think."""
    tokenizer = Tokenizer.from_folder(qwen3_files / "tokenizer")
    assert table(tokenizer, "agent") == {
        "messages appended": (708, 656),
        "thinking dropped": (708, 368),
        "clock, in the first line": (717, 0),
        "clock, in each message": (762, 704),
        "one more tool": (747, 304),
        "tools in another order": (708, 80),
        "a turn edited in the middle": (659, 496),
        "compaction": (476, 352),
    }


# --- the engine ----------------------------------------------------------------------------------------------------


def forced(ids: list[int]):
    """A `constrain` that lets the engine draw these ids."""

    def constrain(logits, tokens):
        only = torch.full_like(logits, -torch.inf)
        only[0, ids[len(tokens)]] = 0
        return only

    return constrain


@pytest.mark.parametrize("index", ["hash", "radix"])
def test_an_engine_that_has_drawn_the_answers_finds_the_same(index):
    model, _ = small()
    given = talk(summary="SUM")
    for change in changes_of(given).values():
        requests = Writer(Letters()).requests(change, given)
        engine = Engine(model, 64, 4, prefix=index)
        for held in requests.held:
            place = len(held) - held[::-1].index(END)  # behind the last message; then "a"
            answer = [*held[place + 1 :], END]
            engine.submit(
                held[: place + 1], len(answer), constrain=forced(answer), eos_token_ids=END
            )
            engine.run()
        request = engine.submit(requests.prompt, 1)
        engine.run()
        assert request.reused_tokens == reused(requests, 4, index)


def test_the_measured_tokens_are_the_counted_ones():
    model, _ = small()
    given = talk(summary="SUM")
    requests = {
        name: Writer(Letters()).requests(change, given)
        for name, change in changes_of(given).items()
    }
    found = measure(model, requests, 4, ("hash", "radix"), 2)
    for name, one in requests.items():
        for index, served in found[name].items():
            assert served.reused == reused(one, 4, index), name
            assert len(served.seconds) == 2 and served.median > 0
    long = {"long": Requests([[1] * 600], [1, 2])}
    with pytest.raises(ContextError, match="a request of 600 tokens, and the context has 512"):
        measure(model, long, 4, ("hash",), 1)


# --- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture
def said(tmp_path):
    path = tmp_path / "said.json"
    messages = [{"role": role, "content": "Hi."} for role in ("user", "assistant", "user")]
    path.write_text(json.dumps({"messages": messages}))
    return path


def test_the_command_prints_tables_of_80_columns_and_json(cli, said):
    code, out, err = cli("reuse")
    assert (code, err) == (0, "") and max(map(len, out.splitlines())) <= 80
    assert "tools in another order        1,180      80     1,100        93.2" in out
    code, out, err = cli("reuse", said, "--page", "1", "--time", "1", "-q")
    assert (code, err) == (0, "") and "radix" in out
    code, out, err = cli("reuse", said, "--page", "1", "--json")
    rows = json.loads(out)["talks"]["said"]
    assert (code, err) == (0, "")
    assert [row["change"] for row in rows][:2] == ["(nothing held)", "messages appended"]
    assert rows[0]["reused"] == {"hash": 0, "radix": 0} and rows[0]["prompt"] == rows[0]["computed"]


@pytest.mark.parametrize(
    ("family", "layers"), [("qwen35-G2", "layers of Qwen3.5"), ("lfm2-G2", "layers of LFM2")]
)
def test_a_model_with_states_reuses_less_than_its_tokens_say(cli, said, tmp_path, family, layers):
    write_tokenizer(tmp_path)
    fields = tiny_config(**HYBRID[family]).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(fields))
    code, out, err = cli("reuse", said, "-m", tmp_path, "--page", "1")
    assert code == 0 and "messages appended" in out
    assert layers in err and "resumes at snapshots. --time N counts the tokens" in err
    (tmp_path / "config.json").write_text(json.dumps(fields | {"model_type": "mamba2"}))
    assert cli("reuse", said, "-m", tmp_path, "--page", "1") == (0, out, "")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "is not valid JSON"),
        ("{}", "is not a talk"),
        ('{"messages": ["a"]}', "is not a talk"),
        ('{"messages": []}', "none of its messages is an answer"),
        ('{"messages": [{"role": "user", "content": "Hi."}]}', "none of its messages is an answer"),
        ('{"messages": [{"role": "assistant", "content": ""}]}', "ends with a message"),
        ('{"messages": [{"role": "user", "content": 5}]}', "message 1 (user): content is 5"),
        (
            '{"messages": [{"role": "bot"}, {"role": "assistant"}, {"role": "user"}]}',
            "the role 'bot'",
        ),
    ],
)
def test_a_file_that_is_no_talk_is_one_line_and_a_hint(cli, tmp_path, text, told):
    path = tmp_path / "talk.json"
    path.write_text(text)
    code, out, err = cli("reuse", path)
    assert (code, out) == (2, "") and told in err and len(err.splitlines()) <= 2
    assert f"error: {path}" in err


def test_each_file_has_a_table(cli, said):
    """Files of the same name too; `agent` is bundled, and a talk without tools says what it lacks."""
    other = said.parent / "other" / said.name
    other.parent.mkdir()
    other.write_text(said.read_text().replace("Hi.", "Hello."))
    code, out, err = cli("reuse", said, other, "agent")
    titles = [block.split("\n")[0] for block in out.split("\n\n")]
    assert (code, err, titles) == (0, "", [str(said), str(other), "agent"])
    assert out.count("left out: ") == 2 and "left out: thinking dropped (no thoughts)" in out
    code, out, err = cli("reuse", "agnt")
    assert (code, out) == (2, "") and "agnt does not exist" in err and "agent, chat" in err


def test_a_folder_without_weights_is_enough(cli, said, qwen3_files, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(qwen3_files / "tokenizer", folder)
    (folder / "config.json").write_text('{"vocab_size": 151936}')
    code, out, err = cli("reuse", said, "-m", folder)
    assert (code, err) == (0, "") and "messages appended" in out
