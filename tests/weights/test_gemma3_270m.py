"""A real Gemma 3: the base model of 270 million parameters, GGUF in Q4_K_M, with its SentencePiece tokenizer.

No command fetches its 253,113,024 bytes (docs/real-models.md says where they are): $NANOKV_GEMMA3 is the path of the
file. Without it these tests are skipped.
"""

import hashlib
import os
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import nanokv
from nanokv.inference import score
from oracle import gap, reference_logits
from weights_loader import names

pytestmark = pytest.mark.slow

SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
PROSE = Path(__file__).parents[1] / "facts" / "prose.txt"
TOKENS = 560  # more than its window of 512
PIECES = [
    *("a", "b", "the", "ing", " ", "  ", "\n", "\t", "é", "ß", "中", "🙂", "12", "<", "=", "***"),
    *("</s>", "<eos>", "<b>", "▁", "\u200d", "\ufeff", "\x7f", "ﬁ", "<0x0A>", "<unused5>"),
]


@pytest.fixture(scope="module")
def path():
    path = os.environ.get("NANOKV_GEMMA3")
    if not path:
        pytest.skip("Gemma 3 270M is not here (set NANOKV_GEMMA3 to its GGUF file)")
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    assert found == SHA256, f"{path} has sha256 {found}, expected {SHA256}"
    return path


@pytest.fixture(scope="module")
def loaded(path):
    return nanokv.load(path, dtype=torch.float32)


def test_logits_are_those_of_transformers_on_the_same_numbers(loaded):
    model, tokenizer = loaded
    fields = model.config.to_dict() | {"dtype": "float32"}
    reference = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields)).eval()
    state = {names.to_hugging_face(name): tensor for name, tensor in model.state_dict().items()}
    reference.load_state_dict(state)
    ids = tokenizer.encode(PROSE.read_text("utf-8"), add_special_tokens=True)[:TOKENS]
    ids = torch.tensor([ids])  # (1,T)
    assert gap(score(model, ids), reference_logits(reference, ids)) <= 1e-4


def test_it_knows_water(loaded):
    model, tokenizer = loaded
    prompt = "Question: What is the chemical symbol for water?\nAnswer:"
    ids = tokenizer.encode(prompt, add_special_tokens=True)
    answer = tokenizer.decode(nanokv.generate(model, ids, max_new_tokens=4, eos_token_ids=[]))
    assert answer.startswith(" H2O\n")


def test_ids_are_those_of_llama_cpp(path, loaded):
    llama_cpp = pytest.importorskip(
        "llama_cpp", reason="llama-cpp-python is not installed (pip install nanokv[bench])"
    )
    llama = llama_cpp.Llama(path, vocab_only=True, verbose=False)
    draw = random.Random(0)
    prose = PROSE.read_text("utf-8")
    texts = ["", " " * 77, "\n" * 70, "ab" * 200, "日本語 x\r\n"]
    for _ in range(500):
        first = draw.randrange(len(prose))
        texts.append(prose[first : first + draw.randrange(200)])
        texts.append("".join(draw.choices(PIECES, k=draw.randrange(25))))
        texts.append("".join(draw.choices("abc-#. ", k=3)) * draw.randrange(40))
    _, tokenizer = loaded
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids == llama.tokenize(text.encode(), add_bos=False, special=True), text
        assert tokenizer.decode(ids) == text.replace("▁", " ")
        assert tokenizer.fewest_tokens(text) <= len(ids)
