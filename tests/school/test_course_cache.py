"""The judges of notebook 06: a loop may return a list, a tensor or a generator; a class may do what it likes."""

import itertools
import sys

import pytest
import torch

import nanokv
from nanokv.lab.study import equality
from nanokv.school.course import checking

CLASS, LOOP = checking.find("06.3"), checking.find("06.4")


@pytest.fixture(scope="module")
def case():
    return checking.Case({}, equality.small_model())


def tokens(model, ids, n):
    """The loop that is asked for, as a generator."""
    cache = nanokv.make_cache("dict", model.config)
    logits = nanokv.prefill(model, ids, cache, start_pos=0)
    for i in range(n):
        token = logits.argmax(-1, keepdim=True)  # (1,1)
        yield int(token)
        if i < n - 1:
            logits = nanokv.decode(model, token, cache, start_pos=cache.length)


FORMS = {
    "generator": tokens,
    "list": lambda *a: list(tokens(*a)),
    "tensor": lambda *a: torch.tensor([list(tokens(*a))]),
    "list of tensors": lambda *a: [torch.tensor(token) for token in tokens(*a)],
}


@pytest.mark.parametrize("form", FORMS)
def test_the_loop_is_right_in_every_form(form, case):
    assert LOOP.judge(FORMS[form], case).state == "right"


def feeds_all(model, ids, n):
    """One decode more than it takes."""
    cache = nanokv.make_cache("dict", model.config)
    logits = nanokv.prefill(model, ids, cache, start_pos=0)
    for _ in range(n):
        token = logits.argmax(-1, keepdim=True)
        logits = nanokv.decode(model, token, cache, start_pos=cache.length)
        yield int(token)


def pieces(model, ids, n, prefill):
    """The first so many tokens of the prompt in one forward, the others one by one."""
    cache, logits = nanokv.make_cache("dict", model.config), None
    if prefill:
        logits = nanokv.prefill(model, ids[:, :prefill], cache, start_pos=0)
    for at in range(prefill, ids.shape[1]):
        logits = nanokv.decode(model, ids[:, at : at + 1], cache, start_pos=at)
    for i in range(n):
        token = logits.argmax(-1, keepdim=True)
        yield int(token)
        if i < n - 1:
            logits = nanokv.decode(model, token, cache, start_pos=cache.length)


WRONG = {
    "with prompt": lambda model, ids, n: itertools.chain(ids[0].tolist(), tokens(model, ids, n)),
    "count": lambda model, ids, n: itertools.repeat(3),
    "last token fed": feeds_all,
    "prompt in pieces": lambda *a: pieces(*a, prefill=0),
    "borrowed": lambda model, ids, n: nanokv.generate(
        model, ids, max_new_tokens=n, eos_token_ids=[]
    ),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_generator_is_told_its_own_mistake(mistake, case):
    """One that never ends too."""
    assert LOOP.judge(WRONG[mistake], case).mistake == mistake
    assert "0 rows" not in LOOP.judge(WRONG[mistake], case).message


def test_a_prompt_but_for_its_last_token_is_no_prefill(case):
    outcome = LOOP.judge(
        lambda model, ids, n: pieces(model, ids, n, prefill=ids.shape[1] - 1), case
    )
    assert (
        outcome.mistake == "prompt in pieces"
        and "took 7 forwards where 6 are enough" in outcome.message
    )


@pytest.mark.parametrize("blank", [lambda *a: ..., lambda *a: [...], lambda *a: iter([...])])
def test_a_stub_is_not_answered(blank, case):
    outcome = LOOP.judge(blank, case)
    assert outcome.state == "unanswered", outcome


def test_a_loop_that_returns_nothing_is_told_so(case):
    assert "is a return missing?" in LOOP.judge(lambda *a: None, case).message


def test_a_class_that_leaves_the_program_is_a_wrong_answer(case):
    class Leaves(nanokv.cache.DictCache):
        def append(self, k, v):
            if self.length > 2:
                sys.exit(1)
            return super().append(k, v)

    outcome = CLASS.judge(Leaves, case)
    assert outcome.state == "wrong" and "SystemExit" in outcome.message
    assert CLASS.judge(nanokv.cache.DictCache, case).state == "right"
    assert CLASS.judge(nanokv.cache.DictCache(), case).state == "wrong"
