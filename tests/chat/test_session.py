"""Session: the cache lives across turns, feeds only what is new, and agrees with the messages whatever happens.

Models are tiny and random; what they say is nonsense, so equality is asked of ids and logits, not of meaning.
"""

import itertools
import re
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import nanokv
from nanokv import inference
from nanokv.apps.cli.chat import commands as chat_commands
from nanokv.apps.cli.chat import inspector
from nanokv.apps.cli.common.terminal import Style
from nanokv.cache import CACHES
from nanokv.chat.history import why_broken
from nanokv.chat.session import Session
from nanokv.decoding.generation import StopStrings
from nanokv.decoding.speculative import PromptLookup, Speculation
from nanokv.errors import ContextError, NanoKVError, SessionError, UnsupportedError
from nanokv.text.ids import common_prefix
from nanokv.text.thinking import ThinkSplitter, split_thinking
from oracle import HYBRID, Press, pair


@pytest.fixture(scope="module")
def loaded(tiny_folder):
    return nanokv.load(str(tiny_folder))


@pytest.fixture
def session(loaded):
    return Session(*loaded, params={"max_new_tokens": 8})


@pytest.fixture
def fed(monkeypatch):
    """Every id that reaches the model, in order: (start_pos, ids) a forward."""
    calls = []
    forward = nanokv.Qwen3.forward

    def spy(self, tokens, cache, start_pos, attend):
        calls.append((start_pos, tokens[0].tolist()))
        return forward(self, tokens, cache, start_pos, attend)

    monkeypatch.setattr(nanokv.Qwen3, "forward", spy)
    return calls


class PlainText:
    """A tokenizer whose ids survive text (one id a character), under any template function."""

    control_ids, special_tokens = frozenset(), {}

    def __init__(self, template, base):
        self.template, self.base = template, base

    def encode(self, text):
        return [ord(c) % 256 + self.base for c in text]

    def decode(self, ids):
        return "".join(chr(i - self.base) if self.base <= i < self.base + 256 else "?" for i in ids)

    text_of = decode

    def render(self, messages, add_generation_prompt=True, **options):
        return self.template(messages, add_generation_prompt, **options)


@pytest.fixture
def decoder_of_plain_text(monkeypatch):
    class Decoder:
        def __init__(self, tokenizer, skip=()):
            self.tokenizer, self.skip = tokenizer, skip

        def put(self, token):
            return "" if token in self.skip else self.tokenizer.decode([token])

        def hidden(self, token):
            return ""

        def flush(self):
            return ""

    monkeypatch.setattr("nanokv.decoding.generation.StreamDecoder", Decoder)
    monkeypatch.setattr("nanokv.text.tokenizer.StreamDecoder", Decoder)


def consistent(session):
    """The cache holds exactly the ids that the session believes in: keys recomputed from scratch are the same."""
    assert session.cache.length == len(session.cached_ids)
    if not session.cached_ids:
        return
    fresh = nanokv.make_cache("dict", session.model.config)
    inference.prefill(session.model, torch.tensor([session.cached_ids]), fresh, start_pos=0)
    for layer, other in zip(session.cache, fresh, strict=True):
        torch.testing.assert_close(layer["key"], other["key"], atol=1e-5, rtol=0)
        torch.testing.assert_close(layer["value"], other["value"], atol=1e-5, rtol=0)


# --- reuse --------------------------------------------------------------------------------------------------------


def test_second_turn_feeds_only_what_is_new(session, fed):
    session.ask("My name is Zorbla.")
    cached = list(session.cached_ids)
    fed.clear()
    session.ask("What is my name?")
    turn, prompt = session.last, session.prompt_ids
    assert turn.reused == common_prefix(cached, prompt) > 0
    assert turn.new == len(prompt) - turn.reused
    prefilled, decoded = fed[0], fed[1:]
    assert prefilled == (turn.reused, prompt[turn.reused :])
    assert len(decoded) == turn.out - 1, "N tokens cost one prefill and N-1 decodes"
    consistent(session)


def test_the_last_token_is_never_fed(session):
    session.ask("Hello.")
    turn = session.last
    assert turn.cached == turn.new + turn.out - 1 == session.cache.length
    assert session.cached_ids == session.prompt_ids + turn.ids[:-1]
    assert turn.kv_bytes == session.cache.nbytes > 0


def test_reuse_changes_no_answer(loaded):
    """Greedy tokens over three turns equal those of a session that starts from nothing each turn, logits to 1e-5."""
    session = Session(*loaded, params={"max_new_tokens": 12})
    for text in ("My name is Zorbla.", "What is my name?", "Once upon a time"):
        history = list(session.messages)
        session.ask(text)
        assert not history or session.last.reused > 0
        fresh = Session(*loaded, params={"max_new_tokens": 12})
        fresh.replace(history)
        fresh.ask(text)
        assert fresh.last.reused == 0
        assert fresh.last.ids == session.last.ids
        model, ids = loaded[0], torch.tensor([session.prompt_ids])
        cache = session.cache.fork()
        cache.truncate(len(session.prompt_ids) - 1)
        again = inference.prefill(model, ids[:, -1:], cache, start_pos=len(session.prompt_ids) - 1)
        torch.testing.assert_close(again, inference.score(model, ids)[:, -1], atol=1e-5, rtol=0)


def test_stream_pieces_are_the_answer(session):
    pieces = list(session.stream("Tell me."))
    assert "".join(pieces) == session.last.text == session.messages[-1]["content"]


@pytest.mark.parametrize("name", sorted(CACHES))
def test_every_cache_gives_a_consistent_second_turn(loaded, name):
    model, tokenizer = loaded
    cache = nanokv.make_cache(name, model.config, batch_size=1, capacity=256)
    session = Session(model, tokenizer, cache=cache, params={"max_new_tokens": 4})
    for text in ("One.", "Two.", "Three."):
        session.ask(text)
        assert session.cache.length == len(session.cached_ids) == session.last.cached


def test_a_cache_that_cannot_truncate_starts_again(session, monkeypatch):
    session.ask("One.")
    plain = type(session.cache).truncate

    def refuse(self, n):
        if n:
            raise UnsupportedError("this cache cannot go back")
        plain(self, n)

    monkeypatch.setattr(type(session.cache), "truncate", refuse)
    for _ in session.retry():
        pass
    assert session.last.reused == 0 and "cannot go back" in session.why
    consistent(session)


# --- templates that rewrite history -------------------------------------------------------------------------------


def drops_think(messages, generation_prompt, enable_thinking=True):
    text = ""
    for i, m in enumerate(messages):
        content = m["content"] if i == len(messages) - 1 else m["content"].split("</think>")[-1]
        text += f"[{m['role']}]\n{content}\n"
    return text + (
        "[assistant]\n" + ("" if enable_thinking else "<think></think>")
        if generation_prompt
        else ""
    )


def test_template_that_drops_think_breaks_the_prefix_there(
    loaded, decoder_of_plain_text, monkeypatch
):
    model, _ = loaded
    tokenizer = PlainText(drops_think, 3)
    session = Session(model, tokenizer, params={"max_new_tokens": 40})
    session.replace([])
    wanted = iter(tokenizer.encode("<think>hm</think>Yes.") + [2])
    monkeypatch.setattr(
        "nanokv.decoding.draw.choose", lambda *_, **__: torch.tensor([next(wanted)])
    )
    assert session.ask("Is it?") == "Yes."
    head, cached = len(session.prompt_ids), len(session.cached_ids)
    wanted = iter([5, 2])
    session.ask("Sure?")
    assert session.last.reused == head, "everything before <think> is kept, nothing after it"
    assert (
        session.why == f"template rewrote turn 1 (think dropped): common prefix {head} of {cached}"
    )


def test_published_qwen3_template_rewrites_history_and_reuse_is_still_right(qwen3_files):
    """Qwen3's own template drops the empty think block of enable_thinking=False from history."""
    model, tokenizer = random_qwen3(qwen3_files)
    options = {"params": {"max_new_tokens": 6}, "template_kwargs": {"enable_thinking": False}}
    session = Session(model, tokenizer, **options)
    session.ask("My name is Zorbla.")
    first, cached = list(session.prompt_ids), list(session.cached_ids)
    session.ask("What is my name?")
    n = common_prefix(cached, session.prompt_ids)
    assert tokenizer.decode(first[n : n + 1]) == "<think>"
    assert session.last.reused == n == len(first) - 4
    assert (
        session.why
        == f"template rewrote turn 1 (think dropped): common prefix {n} of {len(cached)}"
    )
    fresh = Session(model, tokenizer, **options)
    fresh.replace(session.messages[:-2])
    fresh.ask("What is my name?")
    assert fresh.last.reused == 0 and fresh.last.ids == session.last.ids
    consistent(session)


def random_qwen3(folder):
    fields = nanokv.Config.from_folder(folder / "0.6B").to_dict() | {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    torch.manual_seed(0)
    model = nanokv.Qwen3(nanokv.Config.from_dict(fields)).eval()
    for p in model.parameters():
        p.data.normal_(std=0.3)
    return model, nanokv.Tokenizer.from_folder(folder / "tokenizer")


def test_why_names_a_text_that_encodes_differently(loaded):
    _, tokenizer = loaded
    split, whole = tokenizer.encode("c") + tokenizer.encode("ache"), tokenizer.encode("cache")
    assert split != whole
    assert "encodes to other tokens" in why_broken(tokenizer, split, whole, [("a", 3)] * 9, 0)


# --- what is shown -------------------------------------------------------------------------------------------------


def test_the_drawing_of_a_sliding_cache_marks_what_left_the_window(loaded):
    model, tokenizer = loaded
    for name, of, sinks in (
        ("sliding", {}, 0),
        ("sliding", {}, 4),
        ("batch", {"of": "sliding"}, 4),
    ):
        cache = nanokv.make_cache(name, model.config, **of, window=16, sinks=sinks)
        session = Session(model, tokenizer, cache=cache, params={"max_new_tokens": 20})
        session.ask("My name is Zorbla.")
        seen, held = cache.length, sinks + 15
        lines = inspector.draw(session, Style(sys.stderr, "never"), 200).splitlines()
        row = re.fullmatch(r"layer  0 (\S+)  .*", lines[1])[1]
        assert (
            len(row) == seen and set(row[sinks:-15]) == {"·"} and "·" not in row[:sinks] + row[-15:]
        )
        assert f"· dropped {seen - held}" in lines[0]
        assert f"× {held} tokens = {cache.nbytes:,} B · measured {cache.nbytes:,} B" in lines[-2]
        assert lines[-1].startswith(
            f"18 new + 0 reused + 20 out − 1 = {seen}: the last token of an answer"
        )


def test_settings_show_the_limit_that_holds_where_none_was_set(loaded):
    said = []
    view = SimpleNamespace(say=said.append, thinking="show", markdown="off")
    chat_commands.set_value(
        SimpleNamespace(session=Session(*loaded), view=view, width=lambda: 80), ""
    )
    assert "max_new_tokens 1024 · " in said[0]


def test_a_template_that_knows_no_thinking_is_found_out(loaded):
    _, tokenizer = loaded
    assert chat_commands.can_think(tokenizer) and not chat_commands.can_think(
        nanokv.load("tiny")[1]
    )


# --- limits -------------------------------------------------------------------------------------------------------


def test_context_error_comes_before_any_work_with_numbers(loaded, fed):
    session = Session(*loaded, params={"max_new_tokens": 4}, context=80)
    session.ask("One.")
    before, cached, fed[:] = list(session.messages), list(session.cached_ids), []
    with pytest.raises(ContextError) as caught:
        session.ask("word " * 60)
    history = len(session.prompt(before, add_generation_prompt=False))
    needs = len(session.prompt([*before, {"role": "user", "content": "word " * 60}]))
    assert (
        str(caught.value)
        == f"needs {needs} of 80 tokens (history {history} + message {needs - history})"
    )
    assert caught.value.hint == "a shorter message, or a larger --context N", (
        "the message alone is too long"
    )
    whole = Session(*loaded)
    with pytest.raises(ContextError) as caught:
        whole.ask("word " * whole.context)
    assert caught.value.hint == "a shorter message", "the model has no more positions"
    assert (session.messages, session.cached_ids, fed) == (before, cached, [])
    with pytest.raises(ContextError) as caught:
        session.ask("word " * 12)
    assert caught.value.hint == "/drop 1, /clear, --context N or --overflow drop"


def test_full_during_the_answer_keeps_it(loaded):
    session = Session(*loaded, params={"max_new_tokens": 500}, context=40)
    session.model.generation_config, before = no_eos(session.model), session.model.generation_config
    try:
        session.ask("One two three.")
    finally:
        session.model.generation_config = before
    assert session.last.finish_reason == "context"
    assert session.cache.length == 40 and session.messages[-1]["content"]
    consistent(session)


def no_eos(model):
    from dataclasses import replace

    return replace(model.generation_config, eos_token_ids=())


def test_prompt_that_fills_the_context_exactly_gets_one_token(loaded):
    probe = Session(*loaded)
    n = len(probe.prompt([{"role": "user", "content": "Hi"}]))
    session = Session(*loaded, context=n)
    session.ask("Hi")
    assert session.last.out == 1 and session.cache.length == n


def test_overflow_drop_forgets_whole_turns_and_keeps_the_system(loaded):
    session = Session(
        *loaded, params={"max_new_tokens": 4}, context=110, overflow="drop", system="Be kind."
    )
    for i in range(8):
        session.ask(f"Message number {i} is here.")
        roles = [m["role"] for m in session.messages]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert session.cache.length <= 110
    turns, tokens = session.last.dropped
    assert turns >= 1 and tokens > 0
    assert session.messages[0]["content"] != "Message number 0 is here."
    assert "Be kind." in session.tokenizer.decode(session.prompt_ids)
    consistent(session)


def test_overflow_drop_still_refuses_a_message_that_never_fits(loaded):
    session = Session(*loaded, context=60, overflow="drop")
    with pytest.raises(ContextError):
        session.ask("word " * 60)
    assert session.messages == []


# --- interrupts ---------------------------------------------------------------------------------------------------


def stop_after(calls):
    counter = itertools.count()
    return lambda: next(counter) >= calls


def test_interrupted_half_answer_stays_and_the_cache_holds_exactly_it(session):
    list(session.stream("Tell me.", stop_after(4)))
    turn = session.last
    assert turn.finish_reason == "interrupted" and 0 < turn.out < 8
    assert session.messages[-1]["interrupted"] is True
    assert session.cached_ids == session.prompt_ids + turn.ids[:-1]
    consistent(session)
    session.ask("And then?")
    assert [m["role"] for m in session.messages] == ["user", "assistant"] * 2
    consistent(session)


def test_interrupt_is_read_before_every_chunk_and_token(loaded, fed):
    """Granularity: after the flag is set at most one more forward runs, in prefill and in decode."""
    session = Session(*loaded, params={"max_new_tokens": 50})
    for flag_at in range(1, 7):
        fed.clear()
        list(session.stream("word " * 100, lambda at=flag_at: len(fed) >= at))
        assert len(fed) == flag_at
        session.clear()


def test_interrupt_in_prefill_takes_the_message_back(loaded, fed):
    session = Session(*loaded, params={"max_new_tokens": 4})
    list(session.stream("word " * 100, lambda: True))
    assert (
        session.messages == []
        and session.last.out == 0
        and session.last.finish_reason == "interrupted"
    )
    consistent(session)
    session.ask("word " * 100)
    assert len(session.messages) == 2


def test_ctrl_c_inside_a_prefill_chunk_keeps_the_chunks_before_it(loaded, fed, monkeypatch):
    """The message is taken back, and asking again goes on where the last whole chunk ended."""
    monkeypatch.setattr("nanokv.decoding.generation.prefill_chunk", lambda model: 32)
    session, undisturbed = (Session(*loaded, params={"max_new_tokens": 4}) for _ in range(2))
    press = Press()
    with monkeypatch.context() as patch:
        press.inside(patch, session.model.layers[1], call=3)
        assert list(session.stream("word " * 100, press)) == []
    assert session.last.finish_reason == "interrupted" and session.messages == []
    assert session.cache.length == 64
    consistent(session)
    fed.clear()
    assert session.ask("word " * 100) == undisturbed.ask("word " * 100)
    assert fed[0][0] == 64 and session.last.reused == 64


def test_reader_that_goes_away_leaves_a_usable_session(session):
    pieces = session.stream("Tell me.")
    next(pieces)
    pieces.close()
    assert session.messages[-1].get("interrupted") and session.last.finish_reason == "interrupted"
    session.ask("Again.")
    consistent(session)


def test_exception_in_a_forward_leaves_a_usable_session(session, monkeypatch):
    session.ask("One.")
    before = list(session.messages)
    decode = inference.decode
    for failing in ("prefill", "decode"):

        def explode(*args, **kwargs):
            raise MemoryError("injected")

        with monkeypatch.context() as patch:
            patch.setattr(f"nanokv.decoding.generation.{failing}", explode)
            with pytest.raises(MemoryError):
                session.ask("Two.")
        consistent(session)
        assert len(session.messages) % 2 == 0
    assert session.messages[:2] == before and decode is inference.decode
    session.ask("Three.")
    consistent(session)


# --- editing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", range(5, 10))
def test_continue_computes_nothing_twice(loaded, fed, first):
    """It feeds the one token that was never fed; a character that was cut in the middle is sampled again, whole."""
    session = Session(*loaded, params={"max_new_tokens": first})
    session.ask("Tell me.")
    half, prompt = list(session.last.ids), list(session.prompt_ids)
    cut = session.tokenizer.text_of(half).endswith("\ufffd")
    fed.clear()
    list(session.resume())
    kept = session.prompt_ids[len(prompt) :]
    assert kept == half[: len(kept)] and (cut or kept == half) and len(half) - len(kept) < 4
    assert fed[0] == (len(prompt) + len(kept) - 1, kept[-1:])
    assert len(session.messages) == 2 and session.last.new == 1
    whole = Session(*loaded, params={"max_new_tokens": len(kept) + first})
    whole.ask("Tell me.")
    assert kept + session.last.ids == whole.last.ids
    assert session.messages == whole.messages
    consistent(session)


def test_retry_asks_the_same_prompt_with_another_seed(loaded):
    session = Session(*loaded, params={"temperature": 2.0, "seed": 7, "max_new_tokens": 12})
    session.ask("Tell me.")
    first, prompt = list(session.last.ids), list(session.prompt_ids)
    list(session.retry())
    assert session.prompt_ids == prompt and session.last.reused == len(prompt) - 1
    assert session.last.ids != first and len(session.messages) == 2
    again = Session(*loaded, params={"temperature": 2.0, "seed": 7, "max_new_tokens": 12})
    again.ask("Tell me.")
    assert again.last.ids == first, "the same seed gives the same conversation"


def test_undo_drop_clear_keep_history_alternating(session):
    for text in ("One.", "Two.", "Three."):
        session.ask(text)
    assert session.undo() == "Three."
    consistent(session)
    session.drop(1)
    assert [m["content"] for m in session.messages[::2]] == ["Two."]
    consistent(session)
    for turns in (3, 0, -1):
        with pytest.raises(SessionError, match=f"cannot drop {turns} of 1 turns"):
            session.drop(turns)
    session.set_system("Be kind.")
    session.ask("Four.")
    assert "Be kind." in session.tokenizer.decode(session.prompt_ids)
    session.clear()
    consistent(session)
    with pytest.raises(SessionError, match="undo"):
        session.undo()


def test_roles_cover_every_cached_token(loaded):
    session = Session(*loaded, system="You are a helpful assistant.", params={"max_new_tokens": 8})
    session.ask("My name is Zorbla.")
    session.ask("What is my name?")
    roles = session.roles()
    assert len(roles) == session.cache.length
    letters = "".join(letter for letter, _ in roles)
    runs = "".join(letter for letter, _ in itertools.groupby(letters))
    assert runs == "suaua"
    where = [i for i, _ in enumerate(roles) if roles[i] == ("u", 2)]
    assert "What is my name?" in session.tokenizer.decode([session.cached_ids[i] for i in where])


@pytest.mark.parametrize(
    ("begin", "runs"),
    [
        ("", "ua"),
        ("<|im_start|>system\nYou are Qwen.\nBe kind.<|im_end|>\n", "sua"),
    ],
)
def test_what_a_template_adds_before_the_first_message_is_the_systems(loaded, begin, runs):
    """Qwen2.5's and SmolLM2's templates have a system message of their own."""
    model, tokenizer = loaded
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    own = nanokv.Tokenizer(
        tokenizer.backend, tokenizer.names, begin + template + "<|im_start|>assistant\n"
    )
    session = Session(model, own, params={"max_new_tokens": 4})
    session.ask("What is my name?")
    letters = [letter for letter, _ in session.roles()]
    assert "".join(letter for letter, _ in itertools.groupby(letters)) == runs
    said = own.decode(
        [id for id, letter in zip(session.cached_ids, letters, strict=True) if letter == "u"]
    )
    assert said == "<|im_start|>user\nWhat is my name?<|im_end|>\n"


def test_replace_refuses_two_user_turns_in_a_row(session):
    with pytest.raises(SessionError, match="alternates"):
        session.replace([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])


# --- thinking -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", range(1, 9))
def test_thinking_is_split_wherever_the_pieces_are_cut(cut):
    text = "<think>\nhm <b> </thin\n</think>\n\nYes </think> <think> no."
    splitter, out = ThinkSplitter(), []
    for i in range(0, len(text), cut):
        out += splitter.put(text[i : i + cut])
    out += splitter.flush()
    assert "".join(t for k, t in out if k == "think") == "\nhm <b> </thin\n"
    assert "".join(t for k, t in out if k == "answer") == "Yes </think> <think> no."


def test_thinking_that_the_prompt_opened_or_nobody_closed():
    assert split_thinking("hm</think>\n\nYes", opened=True) == ("hm", "Yes")
    assert split_thinking("<think>never closed") == ("never closed", "")
    assert split_thinking("<thin ice") == ("", "<thin ice")


# --- the bundled model --------------------------------------------------------------------------------------------


def test_the_bundled_model_recalls_a_made_up_name_over_turns():
    session = Session(*nanokv.load("tiny"))
    session.ask("My name is Zorbla.")
    session.ask("What is 12 + 30?")
    assert "Zorbla" in session.ask("What is my name?")
    assert session.last.reused > session.last.new


def test_the_bundled_model_forgets_with_the_conversation():
    session = Session(*nanokv.load("tiny"))
    session.ask("My name is Zorbla.")
    session.clear()
    assert "Zorbla" not in session.ask("What is my name?")


def test_an_answer_that_failed_between_two_tokens_is_over_at_once(loaded, monkeypatch):
    """Not when its generator is collected: guesses that nobody took would then be cut out of a later forward."""
    session = Session(
        *loaded,
        params={"max_new_tokens": 8},
        make_generation=partial(Speculation, draft=PromptLookup()),
    )
    with monkeypatch.context() as patch:
        patch.setattr(StopStrings, "put", lambda self, text: 1 / 0)
        with pytest.raises(ZeroDivisionError) as kept:  # the traceback holds the generator
            session.ask("word " * 9)
    generation = session._generation
    assert generation.finish_reason == session.last.finish_reason == "error" and kept is not None
    with pytest.raises(StopIteration):
        next(generation._steps)
    consistent(session)


# --- settings as keywords ---------------------------------------------------------------------------------------------


def test_settings_may_be_keywords(loaded):
    given = Session(*loaded, params={"temperature": 1.0, "seed": 3, "max_new_tokens": 8})
    session = Session(*loaded, temperature=1.0, seed=3, max_new_tokens=8)
    assert session.params == given.params and session.ask("hi") == given.ask("hi")
    assert Session(*loaded, params={"seed": 3, "top_k": 5}, seed=4).params == {
        "seed": 4,
        "top_k": 5,
    }


def test_settings_of_one_answer_are_gone_after_it(loaded):
    """Also where it is cut short, and for an answer that is made again or goes on."""
    session = Session(*loaded, max_new_tokens=8)
    session.ask("hi", max_new_tokens=3, temperature=1, seed=7)
    assert (session.last.out, session.last.seed) == (3, 7) and session.params == {
        "max_new_tokens": 8
    }
    first = session.last.ids
    assert (
        "".join(session.retry(max_new_tokens=3, temperature=1, seed=6))
        == session.messages[-1]["content"]
    )
    assert session.last.ids == first, "the second answer draws with seed 6 + 1"
    list(session.resume(max_new_tokens=2))
    assert session.last.out == 2
    stream = session.stream("more", max_new_tokens=5)
    assert session.params == {"max_new_tokens": 8}, "not begun"
    next(stream)
    stream.close()
    assert session.params == {"max_new_tokens": 8} and session.last.finish_reason == "interrupted"
    session.ask("plain")
    assert session.last.out == 8


def test_a_wrong_setting_is_refused_before_any_work(loaded):
    session = Session(*loaded, max_new_tokens=8)
    for settings, words in (
        ({"temperature": -1}, "temperature is -1"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"stop": [""]}, "stop strings must be"),
        ({"top_k": 0.5}, "top_k is 0.5"),
        ({"nonsense": 1}, "has no argument 'nonsense'"),
    ):
        for call in (
            partial(session.ask, "hi"),
            partial(session.stream, "hi"),
            partial(Session, *loaded),
        ):
            with pytest.raises(NanoKVError, match=words):
                call(**settings)
    assert session.messages == [] and session.cache.length == 0 and session.last is None
    assert session.ask("hi", stop=None, seed=None) == Session(*loaded, max_new_tokens=8).ask("hi")


@pytest.mark.parametrize(
    "name", ["static", "quantized:bits=8", "sliding:window=64:sinks=4", "growing"]
)
def test_a_cache_may_be_named(loaded, name):
    model, tokenizer = loaded
    session = Session(model, tokenizer, name, max_new_tokens=8, context=100)
    own = Session(
        model,
        tokenizer,
        nanokv.make_cache(name, model.config, capacity=100),
        max_new_tokens=8,
        context=100,
    )
    assert session.ask("hi") == own.ask("hi") and session.cache.made.name == name.split(":")[0]
    assert session.context == 100 and (name != "static" or session.cache.capacity == 100)


# --- recurrent layers ----------------------------------------------------------------------------------------------


def hybrid_session(cache="growing", **settings):
    """A conversation with a random model whose layers have states, in the bundled tokenizer's words."""
    tokenizer = nanokv.load("tiny")[1]
    sizes = HYBRID["qwen35-G2"] | {"vocab_size": 2048, "max_position_embeddings": 1024}
    model = pair(**sizes)[1]
    cache = nanokv.make_cache(cache, model.config)
    return Session(model, tokenizer, cache=cache, params={"max_new_tokens": 90} | settings)


def test_an_edited_turn_goes_back_to_the_snapshot_before_it():
    """Only what follows the snapshot is prefilled again, and the answer is that of a fresh session."""
    session = hybrid_session()
    for text in ("My name is Zorbla.", "What is my name?", "Once upon a time"):
        session.ask(text)
    ends, cached = session.cache.sizes.snapshots, session.cached_ids
    assert len(ends) >= 4  # of three prompts, and of answers whose text has the same ids again
    history = session.messages[:2]
    session.replace(history)
    session.ask("Who are you?")
    alike = common_prefix(cached, session.prompt_ids)
    nearest = max(end for end in ends if end <= alike)
    assert 0 < nearest < alike
    assert session.last.reused == nearest
    fresh = hybrid_session()
    fresh.replace(history)
    fresh.ask("Who are you?")
    assert (fresh.last.reused, fresh.last.ids) == (0, session.last.ids)
    kept = tuple(end for end in ends if end <= nearest)
    assert session.cache.sizes.snapshots[: len(kept)] == kept


def test_a_cache_without_snapshots_starts_again():
    session = hybrid_session("growing:snapshots=0")
    for text in ("My name is Zorbla.", "Once upon a time"):
        session.ask(text)
    session.replace([])
    session.ask("Who are you?")
    assert session.last.reused == 0


def test_the_drawing_shows_states_and_snapshots():
    session = hybrid_session()
    session.ask("My name is Zorbla.")
    session.ask("What is my name?")
    cache, ends = session.cache, session.cache.sizes.snapshots
    lines = inspector.draw(session, Style(sys.stderr, "never"), 400).splitlines()
    assert lines[0].endswith(f"~ in a state · ◆ snapshots at {', '.join(map(str, ends))}")
    states = [layer.nbytes for layer in cache if not layer.sizes.held]
    rows = [re.fullmatch(r"layer  \d (\S+)  .*", line)[1] for line in lines[1:6]]
    for layer, row in zip(cache, rows, strict=True):
        assert len(row) == cache.length
        marked = tuple(at + 1 for at, letter in enumerate(row) if letter == "◆")
        assert (set(row) <= {"~", "◆"}, marked) == (
            (True, ends) if not layer.sizes.held else (False, ())
        )
    whole = 2 * 2 * 32 * 4 * cache.length  # one layer keeps keys and values
    said = f"= {whole:,} B · windows and states {sum(states):,} B · measured {cache.nbytes:,} B"
    assert said in lines[6]
