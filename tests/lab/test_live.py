"""The page of `nanokv live`, its scripts run by node: tokens, logits, answers and caches are those of the package.

One process of node does the jobs of a test, with the scripts, weights and tokenizer that stand in the page.
tests/lab/test_live_browser.py uses the page as a reader does.
"""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

import nanokv
from live_talks import BEFORE, FAULTS, MOST, hold_in, prompt
from nanokv.apps.cli import main
from nanokv.cache.codes import dequantize, quantize
from nanokv.errors import NanoKVError
from nanokv.lab import live
from nanokv.lab.live import page as pages
from nanokv.school.training.evaluate import written_cases

JOBS = Path(__file__).resolve().parents[1] / "support" / "live_page.mjs"
CLOSE = 1e-3  # of the largest logit
# A number halfway between two steps of a 2-bit grid falls on either side, by the processor's sums.
CLOSE_2_BITS = 5e-3
TOLD = "My name is Zorbla. What is my name?"
LONG = ["My name is Zorbla.", "Repeat: moon, kettle, blorf", "What is my name?"]


@pytest.fixture(scope="module")
def page() -> str:
    return live.build()


@pytest.fixture(scope="module")
def node(page, tmp_path_factory):
    """node(job, …) → their results, from one process."""
    if shutil.which("node") is None:
        pytest.skip("needs node 18 or newer: apt-get install nodejs")
    path = tmp_path_factory.mktemp("live") / "live.html"
    path.write_text(page, encoding="utf-8")

    def run(*jobs):
        done = subprocess.run(
            ["node", JOBS, path], input=json.dumps(jobs), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout)

    return run


@pytest.fixture(scope="module")
def loaded():
    return nanokv.load("tiny")


# --- the page -----------------------------------------------------------------------------------------------------


def test_the_page_is_small_and_asks_nobody_for_anything(page):
    assert len(page.encode()) < pages.LARGEST == 10_000_000
    assert re.findall(r'(?:src|href)="(?!data:|#)[^"]*"', page) == []
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    scripts = re.findall(r"<script(?: id=\"engine\")?>(.*?)</script>", page, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
    assert len(hashes) == 2 and all(f"'sha256-{one}'" in policy for one in hashes)


def test_the_weights_in_the_page_are_rounded_nowhere(page, loaded):
    """They are the file's bf16, which the package widens to fp32 as the page does."""
    inside = re.search(r'id="weights">(.*?)</script>', page, re.DOTALL)[1]
    found = load(base64.b64decode(inside))
    for name, tensor in loaded[0].state_dict().items():
        if name != "lm_head.weight":
            assert torch.equal(found[f"model.{name}"].float(), tensor), name
    assert len(found) == len(loaded[0].state_dict()) - 1


def test_a_page_that_nobody_would_wait_for_is_refused(monkeypatch):
    monkeypatch.setattr(pages, "LARGEST", 8_000_000)
    with pytest.raises(NanoKVError, match=r"8,\d\d\d,\d\d\d bytes, and the limit is 8,000,000"):
        live.build()


def test_the_command_writes_the_page_and_says_where(page, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("nanokv.lab.live.build", lambda: page)
    out = tmp_path / "live.html"
    assert main(["live", "-o", str(out)]) == 0
    assert out.read_text(encoding="utf-8") == page
    told = capsys.readouterr()
    assert told.out == f"{out}\n" and f"{len(page) / 1e6:.2f} MB" in told.err
    monkeypatch.setattr("sys.stdin", None)
    for place, why in (
        (out, "would be replaced; nothing was written"),
        (tmp_path / "gone" / "live.html", "there is no folder"),
        (tmp_path, "is not a file"),
    ):
        assert main(["live", "-o", str(place)]) == 2
        assert why in capsys.readouterr().err


# --- the tokenizer ------------------------------------------------------------------------------------------------

ODD = [
    "",
    " ",
    "  two  spaces   and a tab\tx ",
    "line\nline\r\n\r\n  line\n\n",
    "it's IT'S they'Re I'd we'LL 'ſ it'ſab 'K",
    "12345 ½ ² Ⅷ ٣ x1y2",
    "<|im_end|> and <|im_start|>user <|endoftext|><|im_en",
    "e\u0301 é \u1e9b\u0323 \u212b ﬁ",
    "🧑‍🚀 👩‍👩‍👧‍👦 🇨🇭 日本語 हिन्दी 𝔘𝔫𝔦",
    "\x00\x1b[2J\u202e\ufeff\u0085\u00a0\u2028\u3000\ufffd",
    "ͅα ι\u0345",
    "…—“q” !!!???\n\n--\r\n ::",
    "a" * 300,
    " \n \n\t x",
    "Donaudampfschifffahrtsgesellschaft",
]


def test_texts_become_the_same_ids(node, loaded):
    tokenizer = loaded[1]
    (ids,) = node({"do": "encode", "texts": ODD})
    assert ids == [tokenizer.encode(text) for text in ODD]


def test_ids_become_the_same_text_and_pieces(node, loaded):
    """Also where a list begins or ends within a character."""
    tokenizer = loaded[1]
    whole = [tokenizer.encode(text) for text in ODD]
    lists = [ids[a : len(ids) - b] for ids in whole for a in (0, 1, 2) for b in (0, 1)]
    lists.append(list(range(2048)))
    texts, pieces = node({"do": "decode", "lists": lists}, {"do": "pieces", "lists": lists})
    assert texts == [tokenizer.text_of(ids) for ids in lists]
    assert pieces == [tokenizer.pieces(ids) for ids in lists]


def test_a_conversation_is_rendered_as_by_the_template(node, loaded):
    messages = [
        {"role": role, "content": text}
        for role, text in zip(["user", "assistant"] * 8, ODD, strict=False)
    ]
    assert node({"do": "render", "messages": messages}) == [loaded[1].render(messages)]


@pytest.mark.slow
def test_every_character_of_the_first_plane_becomes_the_same_ids(node, loaded):
    """Characters that are newer than the browser's Unicode may differ; there are none here."""
    letters = [chr(c) for c in range(0x10000) if c >> 11 != 0x1B]  # no halves of surrogates
    words = [f"a{c}b {c}{c} '{c}" for c in letters]
    texts = ["x".join(words[at : at + 16]) for at in range(0, len(words), 16)]
    (found,) = node({"do": "encode", "texts": texts})
    differ = [text for text, ids in zip(texts, found, strict=True) if loaded[1].encode(text) != ids]
    assert differ == [] and len(texts) == 63_488 // 16


# --- the model ----------------------------------------------------------------------------------------------------


def check_close(found, expected, close=CLOSE) -> None:
    """Logits, within `close` of the largest."""
    expected = expected.flatten()
    gap = (torch.tensor(found) - expected).abs().max()
    assert gap <= close * expected.abs().max(), float(gap)


def test_logits_of_every_position(node, loaded):
    model, tokenizer = loaded
    ids = prompt(tokenizer, TOLD, "Your name is Zorbla.", "Reverse: moon, kettle, blorf")
    (found,) = node({"do": "score", "ids": ids})
    check_close(found, nanokv.score(model, [ids]))
    spread = float(
        (nanokv.score(model, [ids])[0, -1] - nanokv.score(model, [ids[:-1]])[0, -1]).abs().max()
    )
    assert spread > 100 * CLOSE  # another token would be noticed


@pytest.mark.slow
@pytest.mark.parametrize("count", [50, pytest.param(200, marks=pytest.mark.night)])
def test_answers_have_the_same_tokens(node, loaded, count):
    model, tokenizer = loaded
    texts = [case.turns[0] for case in written_cases("natural")][:count]
    prompts = [prompt(tokenizer, text) for text in texts]
    (found,) = node({"do": "answers", "prompts": prompts, "most": 8})
    expected = [list(nanokv.generate(model, ids, max_new_tokens=8)) for ids in prompts]
    assert len(found) == count and found == expected


# --- what is switched ---------------------------------------------------------------------------------------------


def check_talk(found, expected, cache, close=CLOSE) -> None:
    assert [one["ids"] for one in found["answers"]] == [ids for ids, _, _ in expected]
    for one, (_, first, last) in zip(found["answers"], expected, strict=True):
        check_close(one["first"], first, close)
        check_close(one["last"], last, close)
    assert found["length"] == cache.length and found["nbytes"] == cache.nbytes


KINDS = [  # of the experiments
    "dict",
    "sliding:window=64",
    "sliding:window=64:sinks=4",
    "quantized:k_bits=4:group=16:residual=16",
    "quantized:k_bits=2:group=16:residual=16",
    "paged:page=16",
]
MORE = [
    "sliding:window=16:sinks=2",
    "quantized:k_bits=2:v_bits=2:group=8:residual=0",
    "paged:page=4",
    "paged:page=64",
]


def close_of(kind: str) -> float:
    return CLOSE_2_BITS if "k_bits=2" in kind else CLOSE


@pytest.fixture(scope="module")
def talks(node):
    """The conversation held in every way, by one process: name → what came out."""
    names = [*KINDS, *FAULTS, "multiplied"]
    job = {"do": "talk", "before": BEFORE, "turns": LONG, "most": MOST}
    jobs = [job | {"name": name} for name in names]
    return dict(zip(names, node(*jobs), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_of_the_page_is_the_cache_of_the_package(talks, loaded, kind):
    """Words, logits, length and bytes after a conversation that is longer than each window."""
    check_talk(talks[kind], *hold_in(loaded, kind, LONG), close_of(kind))


def test_numbers_in_few_bits_are_rounded_alike(node):
    """To the last bit, where fp16 and ties are at stake."""
    x = torch.randn(200, 16, generator=torch.Generator().manual_seed(0))
    x[::4] = (x[::4] * 4).round() / 4  # ties
    x[1::4] *= torch.logspace(-9, 4, 50)[:, None]
    for bits in (2, 4, 8):
        (found,) = node({"do": "round", "rows": x.tolist(), "bits": bits})
        assert torch.equal(torch.tensor(found), dequantize(*quantize(x, bits, dim=1)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", MORE)
def test_another_cache_of_the_page_is_the_cache_of_the_package(node, loaded, kind):
    (found,) = node({"do": "talk", "name": kind, "turns": LONG, "most": MOST})
    check_talk(found, *hold_in(loaded, kind, LONG), close_of(kind))


@pytest.mark.parametrize("name", [*FAULTS, "multiplied"])
def test_a_bug_of_the_page_is_the_bug_of_the_package(talks, loaded, name):
    """nanokv.faults, and a mask that multiplies; each moves the logits, so that it shows."""
    wrong, cache = hold_in(loaded, name, LONG)
    check_talk(talks[name], wrong, cache)
    right, _ = hold_in(loaded, "right", LONG[:1])
    (_, first, last), (_, other_first, other_last) = right[0], wrong[0]
    moved = max((first - other_first).abs().max(), (last - other_last).abs().max())
    assert moved > 0.05


def test_without_a_cache_the_answer_is_the_same_and_the_work_grows(node, loaded):
    """Every row again for every token: what `score` computes."""
    model, tokenizer = loaded
    job = {"do": "talk", "turns": [TOLD], "most": MOST}
    right, off = node(job | {"name": "right"}, job | {"name": "off"})
    answer, ids = right["answers"][0]["ids"], prompt(tokenizer, TOLD)
    assert off["answers"][0]["ids"] == answer
    check_close(off["answers"][0]["last"], nanokv.score(model, [ids + answer[:-1]])[0, -1])
    fed = [ids + answer[:n] for n in range(len(answer))]
    assert [int(nanokv.score(model, [one])[0, -1].argmax()) for one in fed] == answer
    assert right["rows"] == len(fed[-1]) and off["rows"] == sum(map(len, fed))


def test_the_work_is_counted_as_the_formula_has_it(node, loaded):
    """Every weight once per row, the head once per token, and two products per key, head and dimension."""
    model, tokenizer = loaded
    config = model.config
    (found,) = node({"do": "talk", "name": "right", "turns": [TOLD], "most": 5})
    P = len(prompt(tokenizer, TOLD))
    rows, head = P + 4, config.vocab_size * config.hidden_size
    matrices = sum(p.numel() for p in model.layers.parameters() if p.dim() == 2)
    keys = sum(range(1, rows + 1)) * config.num_hidden_layers
    width = config.num_attention_heads * config.head_dim
    assert found["rows"] == rows
    assert found["multiplyAdds"] == rows * matrices + 5 * head + 2 * keys * width
