"""Notebook 16: each typical slip in a kernel is told by its name, a kernel is kept, a recording repeats itself.

Without Triton the exercises stay unanswered.
"""

import linecache
import re
from itertools import count
from pathlib import Path

import pytest
import torch

from nanokv.school.course import checking, exam, mistakes, own_kernels, parts, session, twins
from nanokv.school.course.own_inputs import Inputs
from nanokv.school.course.own_kernels import Recording

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
SOURCE = twins.read(next((NOTEBOOKS / "source").glob("16_*.py")))
CELLS = count()
KERNELS = {"16.1": "norm_kernel", "16.3": "place", "16.4": "fold", "16.5": "merge_kernel"}
needs_triton = pytest.mark.skipif(
    not own_kernels.here, reason="Triton has no wheel for this system"
)


def cell(text: str) -> dict:
    """The names of a cell of the notebook."""
    file = f"/tmp/ipykernel_16/{next(CELLS)}.py"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    names = {"__name__": "__main__", "torch": torch}
    names |= {"tl": own_kernels.tl, "triton": own_kernels.triton}
    exec(compile(text, file, "exec"), names)
    return names


def spoiled(id: str, old: str, new: str):
    text = exam.solution(SOURCE, id)
    assert old in text
    return cell(text.replace(old, new) if old else text)[KERNELS.get(id, "fill")]


ROOT = "tl.sqrt(tl.sum(numbers * numbers) / C + eps)"
CENTRED = "    numbers = tl.where(inside, numbers - tl.sum(numbers) / C, 0)\n    scale ="
SLIPS = [
    ("16.1", "", "", ""),
    ("16.1", "inside, 0)\n    scale", "column < BLOCK, 0)\n    scale", "no mask"),
    ("16.1", "/ C + eps", "/ BLOCK + eps", "padding counted"),
    ("16.1", "/ C + eps", "+ eps", "sum"),
    ("16.1", "/ C + eps)", "/ C)", "no eps"),
    ("16.1", ROOT, "(tl.sqrt(tl.sum(numbers * numbers) / C) + eps)", "eps outside"),
    ("16.1", "w * numbers", "numbers", "no weight"),
    ("16.1", "1 / tl.sqrt", "tl.sqrt", "upside down"),
    ("16.1", ROOT, "(tl.sum(numbers * numbers) / C + eps)", "no root"),
    ("16.1", "    scale =", CENTRED, "mean subtracted"),
    ("16.1", "tl.program_id(0)", "0", "one row"),
    ("16.1", "scale, inside)", "scale)", "store unmasked"),
    ("16.1", "@triton.jit\n", "", "no kernel"),
    ("16.1", "x + row * C", "x + row * BLOCK", "other rows"),
    ("16.1", "weight + column", "weight + row * C + column", "other rows"),
    ("16.1", "tl.store(y + row * C + column, w * numbers * scale, inside)", "return w", "no store"),
    ("16.3", "", "", ""),
    ("16.3", "tl.load(table + token // SIZE, seen, 0)", "token // SIZE", "no table"),
    ("16.3", "table + token // SIZE, seen, 0", "table + token // SIZE", "no mask"),
    ("16.3", "token % SIZE", "token", "token as slot"),
    ("16.3", "return page, token % SIZE", "return token % SIZE, page", "swapped"),
    ("16.3", "table + token // SIZE, seen", "table + token, seen", "entry per token"),
    ("16.3", "return page, token % SIZE", "return page", "form"),
    ("16.4", "", "", ""),
    ("16.4", "return higher, total, mixed", "return higher, total, mixed / total", "divided"),
    ("16.4", "return higher, total, mixed", "return total, higher, mixed", "swapped"),
    ("16.4", "return higher, total, mixed", "return higher, total", "form"),
    ("16.4", " * shrink", "", "no shrink"),
    ("16.4", "total * shrink", "total", "total not shrunk"),
    ("16.4", "mixed * shrink", "mixed", "mixed not shrunk"),
    ("16.4", "tl.maximum(highest, tl.max(scores, 0))", "tl.max(scores, 0)", "own highest"),
    ("16.4", "tl.exp(highest - higher)", "tl.exp(higher - highest)", "upside down"),
    ("16.4", "tl.maximum(highest, tl.max(scores, 0))", "tl.max(scores, 0) * 0", "no highest"),
    ("16.5", "", "", ""),
    ("16.5", "tl.exp(lse - tl.max(lse, 0))", "lse * 0 + 1", "mean"),
    ("16.5", "tl.exp(lse - tl.max(lse, 0))", "lse", "weighted by lse"),
    ("16.5", "share = share / tl.sum(share, 0)", "pass", "not divided"),
    ("16.5", "tl.exp(lse - tl.max(lse, 0))", "tl.exp(lse)", "no highest"),
    ("16.5", "tl.program_id(0)", "0", "one row"),
    ("16.5", "sums + row * SPLITS", "sums", "other rows"),
    ("16.5", "(row * SPLITS + s[:, None]) * D", "(row + s[:, None]) * D", "other rows"),
    ("16.5", "share[:, None], 0), d < D)", "1, 0), d < D)", "sum"),
    ("16.5", "tl.store(y", "tl.store(parts", "no store"),
    ("16.5", "share[:, None], 0), d < D)", "share[:, None], 0))", "store unmasked"),
]  # fmt: skip


@needs_triton
@pytest.mark.parametrize(("id", "old", "new", "mistake"), SLIPS)
def test_a_typical_kernel_is_told_what_is_wrong_with_it(id, old, new, mistake):
    check = checking.find(id)
    outcome = check.judge(spoiled(id, old, new), check.case())
    assert (outcome.state, outcome.mistake) == ("wrong" if mistake else "right", mistake), (
        outcome.message
    )
    named = {known.name for known in mistakes.registered("16") if known.id == id}
    assert mistake in named | {"", "form"}


@needs_triton
@pytest.mark.parametrize(
    ("id", "old", "new", "said"),
    [
        ("16.1", "x + row * C", "x + row * BLOCK", "Row 1 is ["),
        (
            "16.4",
            "return higher",
            "return highest",
            "After 1 block: highest is -inf, but it should",
        ),
        ("16.4", "tl.maximum", "tl.minimum", "highest is -inf"),
        ("16.5", "sums + row * SPLITS", "sums", "Row 1 is ["),
    ],
)
def test_what_is_told_of_a_kernel_is_the_part_that_is_wrong_in_a_few_digits(id, old, new, said):
    check = checking.find(id)
    message = check.judge(spoiled(id, old, new), check.case()).message
    assert said in message and not re.search(r"[1-9]\.\d{4}", message), message


@needs_triton
@pytest.mark.parametrize(
    ("id", "old", "new", "where"),
    [
        ("16.1", "numbers * numbers", "numbers ** 2", "in norm_kernel: scale = 1 / tl.sqrt("),
        ("16.3", "tl.load(table + token // SIZE, seen, 0)", "table[token]", "in place: page = "),
        ("16.4", "share[:, None] * v", "share * v", "in fold: mixed = "),
    ],
)
def test_an_error_in_a_kernel_shows_its_line_and_nothing_of_the_interpreter(id, old, new, where):
    check = checking.find(id)
    message = check.judge(spoiled(id, old, new), check.case()).message
    assert where in message and "InterpreterError" not in message, message


@pytest.mark.parametrize(
    ("old", "new", "mistake"),
    [
        ("", "", ""),
        ("inputs.tokens[:b] =", "inputs.tokens =", "new tensor"),
        ("inputs.lengths.zero_()", "pass", "old rows"),
        (") + 1", ")", "new token not counted"),
        ("inputs.lengths.zero_()", "inputs.lengths = inputs.lengths * 0", "new tensor"),
        ("inputs.tokens[:b] = torch.tensor(tokens)", "pass", ""),
        ("enumerate(tables)", "enumerate(tables, 1)", "table"),
        ("inputs.tokens[:b] =", "inputs.tokens.data =", "new tensor"),
        ("        inputs.table", "        table += [0]\n        inputs.table", "lists changed"),
    ],
)
def test_a_typical_fill_is_told_what_is_wrong_with_it(old, new, mistake):
    check = checking.find("16.6")
    outcome = check.judge(spoiled("16.6", old, new), check.case())
    assert outcome.mistake == mistake and (outcome.state == "right") == (old == ""), outcome.message


@needs_triton
@pytest.mark.parametrize("id", KERNELS)
def test_an_untouched_stub_is_not_answered(id):
    stubs = [one.text for one in SOURCE.cells if one.role == "exercise"]
    text = next(text for text in stubs if f"def {KERNELS[id]}(" in text)
    check = checking.find(id)
    assert check.judge(cell(text)[KERNELS[id]], check.case()).state == "unanswered"


@pytest.mark.parametrize("id", [*KERNELS, "16.6"])
@pytest.mark.parametrize("odd", [7, "kernel", print, int, lambda *a: exit(3)])
def test_an_absurd_kernel_never_raises(id, odd):
    check = checking.find(id)
    assert check.judge(odd, check.case()).state in ("wrong", "unanswered")


@needs_triton
@pytest.mark.parametrize("name", ["row_norm", "place", "fold", "merge"])
def test_a_kernel_is_kept_and_taken(tmp_path, name):
    id = parts.PARTS[name].id
    assert parts.keep(id, spoiled(id, "", ""), tmp_path).startswith(f"{id}: kept as my/{name}.py")
    found = parts.find(name, tmp_path)
    assert found.yours, found.why
    text = (tmp_path / "my" / f"{name}.py").read_text()
    assert "import triton\n" in text and "import triton.language as tl" in text


@pytest.mark.parametrize("id", KERNELS)
def test_without_triton_a_kernel_is_not_judged_and_it_is_said(id, monkeypatch, capsys):
    monkeypatch.setattr(own_kernels, "here", False)
    result = session.check(id, lambda *_: None)
    assert result.state == "unanswered" and "Triton is not here" in capsys.readouterr().out


# --- the stand-in for a graph -------------------------------------------------------------------------------------


def test_a_recording_reads_tensors_again_and_numbers_never():
    held, n = torch.tensor([2.0]), 2
    with torch.inference_mode(), Recording() as recording:
        by_tensor = (torch.ones(3) * held).view(3, 1) + 0
        by_number = torch.ones(3) * n
        written = torch.zeros(3)
        written[1:] = by_tensor[1:, 0]
    held.fill_(5)
    recording.replay()
    assert by_tensor[:, 0].tolist() == [5, 5, 5] and written.tolist() == [0, 5, 5]
    assert by_number.tolist() == [2, 2, 2]


def test_a_recording_refuses_what_waits_for_a_number():
    with pytest.raises(RuntimeError, match="cannot wait"), torch.inference_mode(), Recording():
        torch.ones(1).item()
    assert Recording.current is None


@needs_triton
@pytest.mark.parametrize("splits", [1, 2, 8])
def test_attention_over_pages_is_the_plain_line(splits):
    """Rows of 1, 17 and no tokens, more parts than tokens, pages in any order."""
    source = torch.Generator().manual_seed(splits)
    H, Hk, D, SIZE = 4, 2, 6, 8
    keys, values = torch.randn(2, 7, Hk, SIZE, D, generator=source)
    q = torch.randn(3, H, D, generator=source)
    inputs = Inputs(3, 3)
    inputs.lengths[:] = torch.tensor([17, 1, 0])
    inputs.table[:] = torch.tensor([[4, 0, 6], [2, 0, 0], [0, 0, 0]])
    sums = own_kernels.attention(
        own_kernels.place,
        own_kernels.fold,
        q,
        keys,
        values,
        inputs.table,
        inputs.lengths,
        splits,
        block=4,
    )
    merged = own_kernels.merge(own_kernels.merge_kernel, *sums)
    for b, n in enumerate((17, 1)):
        k, v = (
            x[inputs.table[b].long()].transpose(0, 1).flatten(1, 2)[None, :, :n]
            for x in (keys, values)
        )
        plain = torch.nn.functional.scaled_dot_product_attention(
            q[b][None, :, None], k, v, enable_gqa=True
        )
        torch.testing.assert_close(merged[b], plain[0, :, 0], rtol=1e-5, atol=1e-6)
