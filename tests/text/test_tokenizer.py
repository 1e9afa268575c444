"""Tokenizer and StreamDecoder against transformers and against themselves, on published files and on a small BPE.

The small byte-level BPE is trained here, so these tests work without the published Qwen3 files too.
"""

import json
import re

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

import nanokv
from nanokv.decoding.generation import ShownText
from nanokv.errors import TemplateError, TokenizerError
from nanokv.text import endings
from nanokv.text.thinking import opens_thinking, split_thinking
from nanokv.text.tokenizer import LONG_TEXT, StreamDecoder, Tokenizer
from nanokv.text.tokenizer_file import read_backend

pytestmark = pytest.mark.sampled

SPECIAL = ("<|endoftext|>", "<|im_end|>")
TEXTS = [
    "",
    " ",
    "Hello world",
    "naïve café",
    "é",
    "日本語のテキスト",
    "🧑‍🚀 ZWJ 👩‍👩‍👧‍👦",
    "x\r\n\ty  z\n\n\n",
    "\x00\x1b[31m",
    "ﬁ ½ Ⅷ",
    "a <|im_end|> b<|im_start|>user\n<think>x</think>",
    "<|im_end",
    "مرحبا हिन्दी",
    "🇨🇭🏳️‍🌈",
    "\ufffd kept",
    "12345 67",
]


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bpe")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    special = [tokenizers.AddedToken(text, special=True, normalized=False) for text in SPECIAL]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=330, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(
        ["the cat sat on the mat, naïve café 日本 🧑‍🚀 🧑‍🚀 e\u0301e\u0301"] * 3, trainer
    )
    bpe.save(str(folder / "tokenizer.json"))
    names = {"eos_token": SPECIAL[1], "pad_token": {"content": SPECIAL[0]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


@pytest.fixture(scope="session")
def small(small_folder):
    return Tokenizer.from_folder(small_folder)


@pytest.fixture(scope="session")
def qwen(qwen3_files):
    return Tokenizer.from_folder(qwen3_files / "tokenizer")


@pytest.fixture(scope="session")
def reference(qwen3_files):
    return transformers.AutoTokenizer.from_pretrained(qwen3_files / "tokenizer")


@pytest.fixture(params=["small", "qwen"])
def tokenizer(request):
    return request.getfixturevalue(request.param)


def streamed(tokenizer, ids):
    decoder = StreamDecoder(tokenizer)
    return [*[decoder.put(id) for id in ids], decoder.flush()]


def test_published_cases(qwen, qwen3_files):
    cases = json.loads((qwen3_files / "tokenizer" / "encode_cases.json").read_text())
    assert len(cases) == 46
    assert [case["text"] for case in cases if qwen.encode(case["text"]) != case["ids"]] == []


@pytest.mark.parametrize("text", TEXTS)
def test_encode_and_decode_equal_transformers(qwen, reference, text):
    ids = qwen.encode(text)
    assert ids == reference.encode(text, add_special_tokens=False)
    assert qwen.decode(ids) == reference.decode(ids)
    assert qwen.text_of(ids) == reference.decode(ids, skip_special_tokens=True)


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, 151_668), max_size=30))
def test_decode_of_any_ids_equals_transformers(qwen, reference, ids):
    """Ids in any order: cut characters, control tokens in the middle of one, bytes that are no UTF-8."""
    assert qwen.decode(ids) == reference.decode(ids)
    assert qwen.text_of(ids) == reference.decode(ids, skip_special_tokens=True)


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_survives_the_small_tokenizer(small, text):
    assert small.decode(small.encode(text)) == text


def test_names_and_sizes(qwen, small):
    assert (qwen.vocab_size, qwen.eos_token, qwen.eos_token_id, qwen.pad_token, qwen.bos_token) == (
        151_669,
        "<|im_end|>",
        151_645,
        "<|endoftext|>",
        None,
    )
    assert (
        qwen.special_tokens["<think>"] == 151_667
        and 151_667 not in qwen.control_ids
        and 151_645 in qwen.control_ids
    )
    assert (small.eos_token_id, small.pad_token) == (1, "<|endoftext|>")


def test_typed_control_tokens_are_reported(qwen):
    """The chat asks before a stranger's <|im_end|> ends the turn; each once, in order, ordinary text not at all."""
    assert qwen.special_tokens_in("a <|im_end|> <think> <|im_end|>") == ["<|im_end|>", "<think>"]
    assert qwen.special_tokens_in("<|im_end | > <|im_end| <b>") == []


def test_padding_rows_decode_to_nothing_and_ids_beyond_them_raise(small_folder, tmp_path):
    """A random model samples ids in the embedding's padding; transformers shows nothing for them."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((small_folder / name).read_bytes())
    size = Tokenizer.from_folder(tmp_path).rows
    assert size < 340
    (tmp_path / "config.json").write_text('{"vocab_size": 340}')
    padded = Tokenizer.from_folder(tmp_path)
    assert (padded.vocab_size, padded.decode([339, *padded.encode("the")])) == (size, "the")
    with pytest.raises(TokenizerError, match=r"id 340 at position 1 .* 0 … 339"):
        padded.decode([5, 340])


@pytest.mark.parametrize(
    ("ids", "words"),
    [([3, -1], "id -1 at position 1"), ([True], "position 0"), ([1.5], "1.5"), (["a"], "'a'")],
)
def test_ids_that_are_none(small, ids, words):
    with pytest.raises(TokenizerError, match=re.escape(words)):
        small.decode(ids)


def test_bytes_that_are_not_utf8_are_refused_with_their_position(tokenizer):
    """An argument byte 0xff reaches Python as a lone surrogate, on which the library raises TypeError."""
    with pytest.raises(TokenizerError, match="position 2: byte 0xff"):
        tokenizer.encode("ab\udcff")
    with pytest.raises(TokenizerError, match=r"position 0: U\+D800"):
        tokenizer.encode("\ud800")
    with pytest.raises(TokenizerError, match="bytes"):
        tokenizer.encode(b"ab")


ADDED = ["<a 日>", "é", "Ġx", "ø", "ÿ", "[x]", "Ċ"]  # "ø" and "ÿ": DeepSeek's tokenizers have them


@pytest.mark.parametrize("special", [True, False])
def test_every_added_token_stands_for_its_own_characters(special, small_folder, tmp_path):
    """Also where these are GPT-2's stand-ins for bytes ("é" for 0xe9, "Ġx" for " x"), and where the vocabulary has the
    string already. The library's own decode gives U+FFFD for such a token."""
    bpe = tokenizers.Tokenizer.from_file(str(small_folder / "tokenizer.json"))
    (bpe.add_special_tokens if special else bpe.add_tokens)(ADDED)
    bpe.save(str(tmp_path / "tokenizer.json"))
    loaded = Tokenizer.from_folder(tmp_path)
    assert {"é", "Ċ"} <= set(
        json.loads((small_folder / "tokenizer.json").read_text())["model"]["vocab"]
    )
    for text in [*ADDED, "1<a 日>2[x]é", "".join(ADDED), "the" + "é".join(ADDED)]:
        ids = loaded.encode(text)
        assert (
            loaded.decode(ids)
            == "".join(streamed(loaded, ids))
            == text
            == "".join(loaded.pieces(ids))
        )
    assert loaded.backend.decode(loaded.encode("ø"), skip_special_tokens=False) == "\ufffd"


TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def marked(folder, target, special: bool, *tokens) -> Tokenizer:
    """The tokenizer of a folder with these added tokens marked special, or not."""
    fields = json.loads((folder / "tokenizer.json").read_text())
    for token in fields["added_tokens"]:
        token["special"] = special if token["content"] in tokens else token["special"]
    (target / "tokenizer.json").write_text(json.dumps(fields))
    (target / "tokenizer_config.json").write_bytes((folder / "tokenizer_config.json").read_bytes())
    return Tokenizer.from_folder(target)


@pytest.mark.parametrize("special", [True, False])
def test_tags_have_text_whatever_they_are_marked(special, qwen3_files, tmp_path):
    """text_of is for a reader; decode with skip_special_tokens is the library's."""
    loaded = marked(qwen3_files / "tokenizer", tmp_path, special, *TAGS)
    text = "<think>\nHm.\n</think>\n\n<tool_call>\n{}\n</tool_call>"
    ids = loaded.encode(text + "<|im_end|>")
    shown = ShownText(loaded)  # of generate, chat and batch
    assert "".join(map(shown.put, ids)) + shown.flush() == text
    assert split_thinking(loaded.text_of(ids))[0] == "\nHm.\n" and opens_thinking(loaded, ids[:1])
    assert (
        loaded.text_of(ids) == text
        and not {loaded.special_tokens[tag] for tag in TAGS} & loaded.control_ids
    )
    assert loaded.decode(ids, skip_special_tokens=True) == loaded.backend.decode(
        ids, skip_special_tokens=True
    )
    assert (loaded.decode(ids, skip_special_tokens=True) == text) is not special


def test_a_token_that_ends_a_turn_is_a_control_token_whatever_it_is_marked(qwen3_files, tmp_path):
    loaded = marked(qwen3_files / "tokenizer", tmp_path, False, "<|im_end|>", "<|im_start|>")
    assert 151_645 in loaded.control_ids and 151_644 not in loaded.control_ids
    decoder = StreamDecoder(loaded, skip=loaded.control_ids)
    assert (decoder.put(151_645), decoder.hidden(151_645), decoder.hidden(151_644)) == (
        "",
        "<|im_end|>",
        "",
    )


# --- where an answer ends ---------------------------------------------------------------------------------------------


@pytest.fixture
def with_template(small_folder, tmp_path):
    """with_template(source, added tokens, names) → the small tokenizer with them."""

    def make(source, *added, **names):
        bpe = tokenizers.Tokenizer.from_file(str(small_folder / "tokenizer.json"))
        bpe.add_tokens(list(added))
        bpe.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer_config.json").write_text(
            json.dumps(names | {"chat_template": source})
        )
        return Tokenizer.from_folder(tmp_path)

    return make


CHAT = "{%% for m in messages %%}%s{%% endfor %%}{%% if add_generation_prompt %%}%s{%% endif %%}"
NEW = ("<|turn_end|>", "<|user|>", "<|assistant|>", "<sep>")


NO_LONE_QUESTION = (
    "{{ raise_exception('no') if loop.last and m.role == 'user' and not add_generation_prompt }}"
)
SYSTEM_FIRST = "{{ raise_exception('no') if loop.first and m.role != 'system' }}"


@pytest.mark.parametrize(
    ("each", "opening", "ends"),
    [
        ("<|{{ m.role }}|>\n{{ m.content }}<|turn_end|>\n", "<|assistant|>\n", ["<|turn_end|>"]),
        (
            "{{ '<|' + m.role + '|>' }}{{ m.content }}{{ '<|turn' + '_end|>' }}",
            "<|assistant|>",
            ["<|turn_end|>"],
        ),
        ("<|endoftext|>{{ m.role }}: {{ m.content | trim }}\n<|turn_end|>", "", ["<|turn_end|>"]),
        (
            "{{ m.role }}: {{ m.content }}{% if not loop.last %}<sep>{% endif %}",
            "assistant: ",
            ["<sep>"],
        ),
        (
            "{{ m.role }}: {{ m.content }}{% if not loop.last %}<sep>{% endif %}",
            "<sep>assistant: ",
            ["<sep>"],
        ),
        (
            "<|user|>{{ m.content }}{% if not loop.last %}<sep>{% endif %}",
            "<sep><|user|>",
            ["<sep>"],
        ),
        (
            "{{ m.role }}: {{ m.content }}{% if m.role == 'assistant' %} <sep><|user|>{% endif %}",
            "",
            ["<sep>"],
        ),
        ("<|{{ m.role }}|>{{ m.content }}", "<|assistant|>", []),  # only beginnings
        ("<sep>{{ m.role }}: {{ m.content }}", "<sep>assistant: ", []),
        ("<|user|><sep>{{ m.role }}: {{ m.content }}", "<|user|><sep>assistant: ", []),
        (
            "{% if loop.first %}<|turn_end|>{% endif %}<|user|><sep>{{ m.content }}",
            "<|user|><sep>",
            [],
        ),
        (
            "{{ m.role }}: {{ m.content }}{{ '<sep>' if loop.last else '<|turn_end|>' }}",
            "",
            ["<sep>", "<|turn_end|>"],
        ),
        ("{{ m.role }}: {{ m.content }}\n", "assistant: ", []),
        ("{{ m.role }}", "", []),
        ("{{ m.content }}{{ raise_exception('no') if m.role == 'assistant' }}<|turn_end|>", "", []),
        ("{{ raise_exception('no') }}", "", []),
        ("{{ m.content", "", []),
        (
            "{{ m.content }}{{ raise_exception('no') if loop.index == 3 }}<|turn_end|>",
            "",
            ["<|turn_end|>"],
        ),
        (
            NO_LONE_QUESTION + "<|{{ m.role }}|>{{ m.content }}<|turn_end|>",
            "<|assistant|>",
            ["<|turn_end|>"],
        ),
        (NO_LONE_QUESTION + "<|{{ m.role }}|>{{ m.content }}", "<|assistant|>", []),
        (
            NO_LONE_QUESTION
            + "{{ '<|user|>Be brief.<|turn_end|>' if loop.first }}<|user|>{{ m.content }}<|turn_end|>",
            "<|user|>",
            ["<|turn_end|>"],
        ),
        ("<|user|><sep>{{ m.content }}", "", []),
        (SYSTEM_FIRST + "{{ m.role }}: {{ m.content }}<sep>", "assistant: ", ["<sep>"]),
        (
            SYSTEM_FIRST + "<|{{ m.role }}|>{{ m.content }}<|turn_end|>",
            "<|assistant|>",
            ["<|turn_end|>"],
        ),
        (SYSTEM_FIRST + "<|{{ m.role }}|>{{ m.content }}", "<|assistant|>", []),
        ("{{ m.role }}: {{ m.content }}{{ eot_token }}", "assistant: ", ["<|turn_end|>"]),
        ("{{ m.role }}: {{ m.content }}{{ '</think>' if loop.last }}", "", []),
    ],
)
def test_the_template_says_what_ends_a_turn(each, opening, ends, with_template):
    """The tokens after what the assistant says, never one that begins a turn; a template that fails says nothing."""
    loaded = with_template(
        CHAT % (each, opening),
        *NEW,
        "</think>",
        extra_special_tokens={"eot_token": "<|turn_end|>"} if "eot_token" in each else None,
    )
    known = {"<|endoftext|>", "<|im_end|>"}
    found = {
        one.text: one.sources
        for one in endings.ends(loaded, generation=[loaded.special_tokens["<|endoftext|>"]])
    }
    assert found.keys() == known | set(ends)
    assert all(found[end][-1] == "chat template" for end in ends)


@pytest.mark.parametrize(
    "end",
    [
        "<|{{ 'turn_end' }}|>",
        "{{ tok('turn_end') }}",
        "{{ '<|%s|>' | format('turn_end') }}",
        "{{ ['<|turn_', 'end|>'] | join }}",
        "{{ '<|turn_' ~ 'end|>' }}",
        "{{ '<|TURN_END|>' | lower }}",
    ],
)
def test_an_end_that_the_template_puts_together_is_found(end, with_template):
    """Though all that is written in it is known."""
    macro = "{% macro tok(name) %}<|{{ name }}|>{% endmacro %}{# <|endoftext|> #}"
    loaded = with_template(
        macro + CHAT % ("<|im_start|>{{ m.role }}\n{{ m.content }}" + end, ""), "<|turn_end|>"
    )
    found = {one.text: one.sources for one in endings.ends(loaded)}
    assert found["<|turn_end|>"] == ("chat template",)


@pytest.mark.slow
def test_each_of_the_templates_brings_its_end(with_template):
    """Whatever it is called; one that is stopped is the last that is tried, but those before it count."""
    each = ("{{ m.role }}: {{ m.content }}", "{{ m.content }}<sep>", "{{ m.content }}<|turn_end|>")
    plain, sep, turn_end = (CHAT % (one, "") for one in each)
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    for sources, ends in (
        ({"default": plain, "rag": sep, "tool_use": turn_end}, {"<sep>", "<|turn_end|>"}),
        ({"chat": sep}, {"<sep>"}),
        ({"default": sep, "more": endless, "rag": turn_end}, {"<sep>"}),
    ):
        listed = [{"name": name, "template": source} for name, source in sources.items()]
        found = {one.text for one in endings.ends(with_template(listed, *NEW))}
        assert found - {"<|endoftext|>", "<|im_end|>"} == ends


def test_every_source_is_named_once_and_an_empty_list_means_no_end(qwen, small, with_template):
    assert endings.ends(qwen, [151_645, 151_643], [151_645]) == (
        endings.End(
            151_645,
            "<|im_end|>",
            (
                "generation_config.json",
                "config.json",
                "tokenizer's eos_token",
                "known text",
                "chat template",
            ),
        ),
        endings.End(151_643, "<|endoftext|>", ("generation_config.json", "known text")),
    )
    assert endings.ends(qwen, []) == ()
    assert [end.id for end in endings.ends(qwen, [5], [7, 151_645])] == [5, 151_645, 151_643], (
        "7 is a word"
    )
    assert [end.id for end in endings.ends(qwen, None, [7])] == [7, 151_645, 151_643], (
        "and here the only one named"
    )
    assert endings.ends(small, [10**6])[0] == endings.End(10**6, "", ("generation_config.json",))
    named = with_template(
        "", *NEW, eot_token={"content": "<sep>"}, eos_token="<|user|>", eom_token="<|none|>"
    )
    assert {end.text for end in endings.ends(named)} == {
        "<sep>",
        "<|user|>",
        "<|im_end|>",
        "<|endoftext|>",
    }
    named = with_template("", *NEW, "<think>", extra_special_tokens={"eot_token": "<sep>"})
    stale = [named.special_tokens[text] for text in ("<|user|>", "<think>")]
    found = {end.text: end.sources for end in endings.ends(named, [0], stale)}
    assert found["<sep>"] == ("tokenizer's eot_token",)
    assert found["<|user|>"] == ("config.json",) and "<think>" not in found, "it begins something"


def test_where_call_and_return_end_a_turn_the_end_of_a_message_does_not(with_template):
    """gpt-oss, as in llama.cpp; Phi's <|end|> ends a turn."""
    pair = ["<|call|>", "<|return|>"]
    for tokens, ends in (
        (["<|end|>"], {"<|end|>"}),
        (["<|end|>", *pair], {*pair}),
        (["</s>", "<|tool_response>"], {"<|tool_response>"}),
    ):
        between = "</s>" if "</s>" in tokens else "<|end|>"
        each = "{{ m.content }}" + f"{{{{ '{tokens[-1]}' if loop.last else '{between}' }}}}"
        template = CHAT % (each, "")
        found = {end.text for end in endings.ends(with_template(template, *tokens))}
        assert found - {"<|endoftext|>", "<|im_end|>"} == ends


def test_pieces_show_every_byte(small):
    ids = small.encode("a中")
    assert "".join(small.pieces(ids)) == r"a\xe4\xb8\xad"
    assert b"".join(map(small.token_bytes, ids)) == "a中".encode()


EMOJI = ["🧑‍🚀", "👩‍👩‍👧‍👦", "日本語", "e\u0301\u0323", "𝔘𝔫𝔦", "🇨🇭", "हिन्दी"]


@pytest.mark.parametrize("text", EMOJI)
def test_no_replacement_character_in_between(tokenizer, text):
    """Emoji and CJK are split over tokens: half of one must wait, not appear as U+FFFD."""
    chunks = streamed(tokenizer, tokenizer.encode(text))
    assert "\ufffd" not in "".join(chunks) and chunks[-1] == ""
    assert "".join(chunks) == tokenizer.decode(tokenizer.encode(text))


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_chunks_join_to_the_whole_decode_small(small, data):
    ids = data.draw(
        st.lists(st.integers(0, small.vocab_size - 1), max_size=40) | st.text().map(small.encode)
    )
    assert (
        "".join(streamed(small, ids))
        == small.decode(ids)
        == small.backend.decode(ids, skip_special_tokens=False)
    )


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_chunks_join_to_the_whole_decode_published(qwen, data):
    ids = data.draw(
        st.lists(st.integers(0, qwen.vocab_size - 1), max_size=40) | st.text().map(qwen.encode)
    )
    assert (
        "".join(streamed(qwen, ids))
        == qwen.decode(ids)
        == qwen.backend.decode(ids, skip_special_tokens=False)
    )


def test_a_tail_cut_by_the_limit_comes_out_once(tokenizer):
    """tokenizers' own DecodeStream drops it."""
    ids = tokenizer.encode("ok 🦙")[:-1]
    decoder = StreamDecoder(tokenizer)
    assert "".join(map(decoder.put, ids)) + decoder.flush() == "ok \ufffd" == tokenizer.decode(ids)
    assert decoder.flush() == "" and decoder.put(tokenizer.encode("a")[0]) == "a"


def test_a_real_replacement_character_passes(tokenizer):
    assert "".join(streamed(tokenizer, tokenizer.encode("a\ufffdb"))) == "a\ufffdb"


def test_skipped_ids_have_no_text(small):
    decoder = StreamDecoder(small, skip=small.control_ids)
    ids = small.encode("the<|im_end|> cat")
    assert "".join(map(decoder.put, ids)) + decoder.flush() == "the cat" == small.text_of(ids)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", "{", "is not valid JSON"),
        ("tokenizer_config.json", "[1]", "holds a JSON list"),
        ("tokenizer_config.json", "{", "is not valid JSON"),
        ("tokenizer_config.json", '{"chat_template": 3}', "chat_template in .* is a int"),
    ],
)
def test_broken_files_are_named(small_folder, tmp_path, name, content, words):
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((small_folder / file).read_bytes())
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(TokenizerError, match=words):
        Tokenizer.from_folder(tmp_path)


OLD = [" ".join(pair) for pair in (["h", "e"], ["he", "l"])]
FORMS = {  # changes of a tokenizer.json that the library reads; fields of its model, then others
    "as written": ({}, {}),
    "merges before 2024": ({"merges": OLD}, {}),
    "with the first line of merges.txt": ({"merges": ["#version: 0.2", *OLD]}, {}),
    "no options": ({"dropout": None, "unk_token": None, "fuse_unk": None}, {}),
    "all options": (
        {"unk_token": "!", "fuse_unk": True, "byte_fallback": True, "ignore_merges": True},
        {"normalizer": {"type": "NFC"}},
    ),
    "no vocabulary": ({"vocab": {}, "merges": []}, {"added_tokens": []}),
}


@pytest.mark.parametrize(("model", "others"), FORMS.values(), ids=FORMS)
def test_the_backend_is_the_one_that_the_library_reads(model, others, small_folder, tmp_path):
    """Vocabulary and merges are handed over without a second parse of the file."""
    fields = json.loads((small_folder / "tokenizer.json").read_text()) | others
    fields["model"] |= model
    if None in model.values():
        fields["model"] = {k: v for k, v in fields["model"].items() if v is not None}
    for name in {"h", "e", "he", "l", "hel"} if OLD[0] in model.get("merges", []) else ():
        fields["model"]["vocab"].setdefault(name, len(fields["model"]["vocab"]) + 1000)
    if fields["added_tokens"]:
        fields["added_tokens"][0] |= {"normalized": True, "lstrip": True}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(fields))
    theirs = tokenizers.Tokenizer.from_file(str(path))
    ours, last = read_backend(path)
    assert json.loads(ours.to_str()) == json.loads(theirs.to_str())
    assert last == max(theirs.get_vocab().values(), default=-1)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"vocab": {"a": 1.0}}, "model.vocab is no object of whole numbers"),
        ({"vocab": {"a": True}}, "model.vocab is no object of whole numbers"),
        ({"vocab": ["a"]}, "model.vocab is no object of whole numbers"),
        ({"vocab": {"a": -1}}, "an id below 0"),
        ({"vocab": {"a": 1 << 32}}, "an id below 0 or above 4,294,967,295"),
        ({"merges": None}, "model.merges is no list"),
        ({"merges": [["a", "b", "c"]]}, "model.merges is no list of pairs"),
        ({"merges": ["a b c"]}, "model.merges is no list of pairs"),
        ({"merges": ["a b", ["a", "b"]]}, "model.merges is no list of pairs"),
        ({"merges": [["a", 1]]}, "model.merges is no list of pairs"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_vocabulary_that_is_none(model, words, small_folder, tmp_path):
    fields = json.loads((small_folder / "tokenizer.json").read_text())
    fields["model"] |= model
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(fields))
    with pytest.raises(TokenizerError, match=words) as caught:
        read_backend(path)
    assert str(path) in str(caught.value)


def test_other_decoders_are_refused(tmp_path):
    """A Metaspace tokenizer would stream without its spaces."""
    other = tokenizers.Tokenizer(tokenizers.models.BPE())
    other.decoder = tokenizers.decoders.Metaspace()
    other.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match='"Metaspace", only ByteLevel'):
        Tokenizer.from_folder(tmp_path)


def test_other_models_are_refused(tmp_path):
    """A WordLevel tokenizer would turn every unknown word into one token and never say so."""
    other = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    other.decoder = tokenizers.decoders.ByteLevel()
    other.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match='model "WordLevel", only BPE'):
        Tokenizer.from_folder(tmp_path)


def test_a_list_of_templates_with_other_things_in_it(small_folder, tmp_path):
    for entries, expected in (([1, {"name": "default", "template": "x"}], "x"), ([1, "x"], None)):
        (tmp_path / "tokenizer.json").write_bytes((small_folder / "tokenizer.json").read_bytes())
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": entries}))
        assert Tokenizer.from_folder(tmp_path).chat_template == expected


def test_truncation_and_padding_of_the_file_do_not_apply(small_folder, tmp_path):
    """Some published tokenizer.json files carry a training-time truncation to 512 tokens; prompts must stay whole."""
    bpe = tokenizers.Tokenizer.from_file(str(small_folder / "tokenizer.json"))
    bpe.enable_truncation(4)
    bpe.enable_padding(length=16)
    bpe.save(str(tmp_path / "tokenizer.json"))
    loaded = Tokenizer.from_folder(tmp_path)
    assert loaded.decode(loaded.encode("the cat sat on the mat")) == "the cat sat on the mat"
    assert loaded.encode("a") == loaded.encode("a")[:1]


TYPED = {
    "__type": "AddedToken",
    "content": "<sep>",
    "special": True,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "single_word": False,
}
UNTYPED = {name: value for name, value in TYPED.items() if name != "__type"}
DECODER = {"added_tokens_decoder": {"0": UNTYPED | {"content": "<|endoftext|>"}}}


@pytest.mark.parametrize(
    ("config", "old"),
    [
        ({"eos_token": "<|im_end|>", "pad_token": None}, None),
        (
            {
                "eos_token": TYPED,
                "eot_token": TYPED,
                "eom_token": UNTYPED,
                "image_token": "<sep>",
                "boi_token": "",
            },
            None,
        ),
        (
            {
                "extra_special_tokens": {
                    "eot_token": "<sep>",
                    "image": TYPED,
                    "eos_token": "<sep>",
                },
                "eot_token": "a",
            },
            None,
        ),
        (
            {
                "extra_special_tokens": ["<sep>"],
                "additional_special_tokens": {"eot_token": "<sep>"},
            },
            None,
        ),
        ({"extra_special_tokens": [], "additional_special_tokens": {"eot_token": "<sep>"}}, None),
        ({"model_specific_special_tokens": {"eot_token": "<sep>", "image": "<sep>"}}, None),
        ({"model_specific_special_tokens": {"eot_token": "<sep>"}, "image_token": "<sep>"}, None),
        (
            {
                "model_specific_special_tokens": {"eot_token": "<sep>"},
                "extra_special_tokens": {"image": "<sep>"},
            },
            None,
        ),
        (
            {"pad_token": "<sep>"},
            {"eos_token": "<|im_end|>", "pad_token": None, "sep_token": UNTYPED},
        ),
        (DECODER, {"eos_token": "<|im_end|>"}),
        ({"added_tokens_decoder": {}}, {"eos_token": "<|im_end|>"}),
        (
            {"eot_token": "a", "image_token": TYPED},
            {"eot_token": "<sep>", "eom_token": UNTYPED, "image_token": "a"},
        ),
        ({"extra_special_tokens": {"a": "b", "c": "d"}}, {"extra_special_tokens": {"a": "<sep>"}}),
        ({"eos_token": "<sep>", "add_bos_token": False}, {"eos_token": None}),
        (
            {"extra_special_tokens": {"a": "b"}},
            {"extra_special_tokens": ["<sep>"], "additional_special_tokens": ["b"]},
        ),
    ],
)
def test_named_tokens_are_those_of_transformers(config, old, small_folder, tmp_path):
    """Wherever the files name them, after they were written again too; the template sees them."""
    show = "{{ eos_token }} {{ eot_token }} {{ eom_token }} {{ image }} {{ image_token }}"
    (tmp_path / "tokenizer.json").write_bytes((small_folder / "tokenizer.json").read_bytes())
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": show} | config
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    if old is not None:
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(old))
    theirs, ours = (
        transformers.AutoTokenizer.from_pretrained(tmp_path),
        Tokenizer.from_folder(tmp_path),
    )
    assert ours.names == theirs.special_tokens_map
    messages = [{"role": "user", "content": "hi"}]
    assert ours.render(messages) == theirs.apply_chat_template(messages, tokenize=False)
    (tmp_path / "again").mkdir()
    ours.write_files(tmp_path / "again")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")
    assert Tokenizer.from_folder(tmp_path / "again").names == again.special_tokens_map == ours.names
    written = json.loads((tmp_path / "again" / "tokenizer_config.json").read_text())
    assert written.get("add_bos_token") == config.get("add_bos_token")


def test_chat_template_file_wins(small_folder, tmp_path):
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((small_folder / file).read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}{{ eos_token }}")
    assert (
        Tokenizer.from_folder(tmp_path).render([{"role": "user", "content": "hi"}])
        == "hi<|im_end|>"
    )


# --- several chat templates -------------------------------------------------------------------------------------------

TURN = [{"role": "user", "content": "hi"}]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "tide", "parameters": {"type": "object", "properties": {}}},
    }
]
NAMED = {
    "default": "d{{ messages[0].content }}",
    "tool_use": "t{{ tools }}",
    "rag": "r{{ documents }}",
}


def listed(*names):
    return [{"name": name, "template": NAMED[name]} for name in names]


def filed(*names):
    """{path: text}, as transformers writes them."""
    paths = {"default": "chat_template.jinja"}
    return {
        paths.get(name, f"additional_chat_templates/{name}.jinja"): NAMED[name] for name in names
    }


STORED = {  # chat_template of tokenizer_config.json, files
    "one": (NAMED["default"], {}),
    "a list": (listed("default", "tool_use", "rag"), {}),
    "a list of one": (listed("default"), {}),
    "a list without a default": (listed("tool_use", "rag"), {}),
    "files": (None, filed("default", "tool_use", "rag")),
    "files beside another list": (listed("default", "rag"), filed("tool_use")),
    "a file beside a list": (listed("tool_use", "rag"), filed("default")),
    "a file named default": (None, {"additional_chat_templates/default.jinja": NAMED["default"]}),
}


@pytest.fixture(params=STORED.values(), ids=STORED)
def stored(request, small_folder, tmp_path):
    config, files = request.param
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "tokenizer.json").write_bytes((small_folder / "tokenizer.json").read_bytes())
    fields = {"tokenizer_class": "PreTrainedTokenizerFast"} | (
        {"chat_template": config} if config else {}
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    for path, text in files.items():
        (tmp_path / path).write_text(text)
    return tmp_path


@pytest.mark.parametrize("tools", [None, [], TOOLS], ids=["no tools", "[]", "tools"])
@pytest.mark.parametrize("name", [None, *NAMED, "{{ messages|length }}"])
def test_the_template_that_transformers_takes(stored, name, tools):
    """Where it takes none, or takes a name that it does not know for the template itself, ours says which there are. A
    template that is alone has no name there; here it is default."""
    reference, ours = (
        transformers.AutoTokenizer.from_pretrained(stored),
        Tokenizer.from_folder(stored),
    )
    try:
        expected = reference.apply_chat_template(TURN, tools, chat_template=name, tokenize=False)
    except ValueError as error:
        assert "no default specified" in str(error)
        expected = name = None
    if name == expected == "default" and list(ours.chat_templates) == ["default"]:
        assert ours.template(name, tools) is ours.template(None, tools)
    elif name == expected:  # theirs is either refused, or the name itself as a text
        with pytest.raises(
            TemplateError, match=", ".join(f'"{one}"' for one in ours.chat_templates)
        ):
            ours.template(name, tools)
    else:
        assert (
            ours.template(name, tools).render(TURN, tools, add_generation_prompt=False) == expected
        )


def test_all_templates_are_written(stored, tmp_path):
    own = Tokenizer.from_folder(stored)
    (tmp_path / "new").mkdir()
    own.write_files(tmp_path / "new")
    assert Tokenizer.from_folder(tmp_path / "new").chat_templates == own.chat_templates
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "new").chat_template
    assert ({"default": theirs} if isinstance(theirs, str) else theirs) == own.chat_templates


def test_the_template_of_a_tokenizer(stored):
    own = Tokenizer.from_folder(stored)
    assert own.chat_template == own.chat_templates.get("default", NAMED["tool_use"])
    own.chat_template = "other"
    assert own.render(TURN) == "other" and own.chat_templates == {"default": "other"}
    own.chat_template = None
    with pytest.raises(TemplateError, match="no chat template"):
        own.render(TURN)


def test_more_templates_than_a_checkpoint_has(small_folder, tmp_path):
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "tokenizer.json").write_bytes((small_folder / "tokenizer.json").read_bytes())
    for number in range(33):
        (tmp_path / "additional_chat_templates" / f"{number}.jinja").write_text("x")
    with pytest.raises(TokenizerError, match="33 chat templates, at most 32"):
        Tokenizer.from_folder(tmp_path)


def test_a_long_text_has_the_ids_of_its_usual_call(monkeypatch):
    """From LONG_TEXT on another call of the library is used, which lets other threads run."""
    _, tokenizer = nanokv.load("tiny")
    text = "My name is Zorbla, I live in Quito. Ünïcode 🙂 <|im_end|> 123\n" * 200
    assert len(text) > LONG_TEXT and tokenizer.encode(text) == tokenizer.backend.encode(text).ids
    with pytest.raises(TokenizerError, match="cannot be encoded"):
        tokenizer.encode("\ud800" * LONG_TEXT)
