"""The third stage of the training conversations: facts without names, other assistants, first sentences, scripts.

The first two stages stay as they are, to the bit; test_corpus.py works their answers out again. Here another reader
does that for the new exchanges, from the meaning of every exchange.
"""

import hashlib
import random
import re
from collections import Counter
from dataclasses import replace

import pytest

from corpus_checker import ACCENTS, plain, says
from nanokv.school.training import (
    acknowledgements,
    cache_questions,
    corpus,
    firsts,
    hard,
    nearby,
    scripts,
    small_talk,
    unnamed,
    words,
)
from nanokv.school.training.cache_questions import QUESTIONS, YES_OR_NO
from nanokv.school.training.conversation import Conversation
from nanokv.school.training.phrases import phrases

TALKS, EXCHANGES = 1000, 12
PLURALS = {"mice": "mouse", "ponies": "pony", "canaries": "canary", "goldfish": "goldfish"}
# What an exchange of the third stage means: at least 12 of each among 12,000 exchanges.
OFTEN = {
    "have",
    "have relative",
    "home of",
    "like",
    "no name",
    "ask have",
    "which pet",
    "ask home of",
    "ask like",
    "ask thing",
    "never",
    "first",
    "unreadable",
}


@pytest.fixture(scope="module")
def talks() -> list[Conversation]:
    return [
        corpus.talk(random.Random(f"third:{i}"), EXCHANGES, stage=corpus.THIRD)
        for i in range(TALKS)
    ]


def exchanges(talk):
    """(user, assistant's message, meaning) of every exchange."""
    said = talk.messages[talk.messages[0]["role"] == "system" :]
    pairs = zip(said[::2], said[1::2], talk.log, strict=True)
    return [(user["content"], reply, meaning) for user, reply, meaning in pairs]


# --- the stages before it ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "digest"),
    [(corpus.FIRST, "e7098e5934e7199f"), (corpus.SECOND, "7de46432463127a9")],
    ids=["first", "second"],
)
def test_the_first_two_stages_stay_as_they_are(stage, digest):
    """The conversations of the first two stages are those that they were."""
    drawn = [corpus.conversation(random.Random(f"x:{i}"), 15, stage=stage) for i in range(40)]
    assert hashlib.sha256(repr(drawn).encode()).hexdigest()[:16] == digest


def test_the_third_stage_has_every_exchange_of_the_second():
    """Lists that change, codes, what was never told and questions about caches more often than there."""
    second, third = corpus.SECOND.segments, corpus.THIRD.segments
    assert set(second) < set(third)
    assert {name for name in second if third[name] < second[name]} == set()
    for name in (corpus.nearby.edit, corpus.nearby.codes, small_talk.cache_question):
        assert third[name] > 1.5 * second[name]


def test_the_last_steps_differ_in_their_shares_only():
    """No exchange is lost or new: lists, changes and codes come more often, questions about caches less."""
    third, last = corpus.THIRD.segments, corpus.LAST.segments
    assert replace(corpus.LAST, segments=third) == corpus.THIRD
    assert set(last) == set(third)
    assert {name for name in last if last[name] < corpus.SECOND.segments.get(name, 0)} == set()
    lists = corpus.lists
    for name in (corpus.about_user.update, lists.nth, lists.reverse, corpus.nearby.codes):
        assert last[name] > third[name]
    for name in (small_talk.cache_question, corpus.nearby.yes_or_no):
        assert last[name] < third[name]


def test_the_seed_decides_everything(talks):
    random.seed(1)
    for i in (9, 4):
        again = corpus.talk(random.Random(f"third:{i}"), EXCHANGES, stage=corpus.THIRD)
        assert again.messages == talks[i].messages and again.log == talks[i].log


# --- every answer is right --------------------------------------------------------------------------------------------


class Reader:
    """Knows what a user has and likes without a name, from the meanings alone; spells the answers himself."""

    def __init__(self):
        self.have: dict[str, str] = {}  # kind → "a cat"
        self.named: dict[str, str] = {}  # kind of pet or relative → name
        self.home: dict[str, str] = {}
        self.likes = self.thing = ""

    def expected(self, step) -> str | None:
        """The right answer to this exchange; None where it is not one of the third stage."""
        name, *values = step
        if name in ("have", "have relative"):
            return self._tell(*values)
        if name == "home of":
            kind, city = values
            self.home[kind] = city
            self.have.setdefault(kind, f"an {kind}" if kind[0] in "aeiou" else f"a {kind}")
            return f"So your {kind} lives in {city}."
        if name == "like":
            (self.likes,) = values
            return f"So you like {self.likes}."
        if name == "no name":
            return f"You have not told me what your {self._called(values[0])} called."
        if name == "ask have":
            return self._has(values[0])
        if name == "how many":
            return f"You have {self.have[values[0]]}."
        if name == "which pet":
            pets = [what for kind, what in self.have.items() if self._pet(kind)]
            return f"You have {' and '.join(pets[-2:])}."
        if name == "ask home of":
            return f"Your {values[0]} lives in {self.home[values[0]]}."
        if name == "ask like":
            return f"You like {self.likes}."
        if name == "ask thing":
            return f"You have {self.thing}."
        if name == "never":
            return f"You have not told me what you {'like' if values[0] == 'like' else 'have'}."
        return None

    def learn(self, step):
        """What a name changes."""
        name, *values = step
        if name == "pet" or (name == "tell" and values[0] in words.RELATIVES):
            self.named[values[0]] = values[1]
            self.have.pop(values[0], None)

    def _tell(self, kind: str, what: str) -> str:
        if kind == "thing":
            self.thing = what
        else:
            self.have[kind] = what
        return f"So you have {what}."

    def _pet(self, kind: str) -> bool:
        return kind in words.ANIMALS and kind not in self.named

    def _called(self, kind: str) -> str:
        what = self.have[kind]
        if what.split()[0] in ("a", "an"):
            return f"{kind} is"
        many = what.split()[1]
        assert PLURALS.get(many, many.removesuffix("s")) == kind
        return f"{many} are"

    def _has(self, kind: str) -> str:
        if kind in self.named:
            return f"You have a {kind} called {self.named[kind]}."
        if kind in self.have:
            return f"You have {self.have[kind]}."
        return f"You have not told me about a {kind}."


def test_every_answer_follows_from_the_conversation(talks):
    """Statements and questions without a name, worked out again; another assistant's hold the answer too."""
    seen = Counter()
    for talk in talks:
        reader = Reader()
        for user, reply, meaning in exchanges(talk):
            right = []
            for step in meaning:
                seen[step[0]] += 1
                right.append(reader.expected(step))
            for step in meaning:
                reader.learn(step)
            if None in right:
                continue
            answer = right[0]
            if len(right) == 2:
                answer = f"{right[0].removesuffix('.')} and {meaning[1][2]}."
            answer = re.sub(r"\b([Aa])(?= [aeiou])(?! uni)", r"\1n", answer)
            if reply.get("foreign"):
                assert reply["content"] == "" or answer in reply["content"] or right[0][:3] == "So "
            else:
                assert reply["content"] == answer, (user, meaning)
    assert {name for name in OFTEN if seen[name] < 12} == set()


def test_what_was_said_carries_the_meaning(talks):
    """A statement holds its words, and a sentence of the file."""
    told = phrases("unnamed")
    sections = {"have relative": "relative", "home of": "home", "like": "like"}
    checked = 0
    for talk in talks:
        for user, _, meaning in exchanges(talk):
            (name, *values), *_ = meaning
            if len(meaning) > 1 or name not in (*sections, "have"):
                continue
            section = sections.get(name, "thing" if values[0] == "thing" else "animal")
            texts = told[section]["told"]
            line = scripts_off(user)
            assert says(line, texts, a=values[-1], r=values[0], c=values[-1], v=values[-1]), user
            checked += 1
    assert checked > 300


def scripts_off(text: str) -> str:
    """Without emoji."""
    return re.sub(r"[^\x00-ɏ]", " ", text)


def test_what_has_no_name_is_known_to_all_exchanges():
    """Whether, which, where and what for: the answers of older exchanges change, and only those."""
    talk = Conversation(random.Random(0), False, corpus.THIRD)
    talk.unnamed |= {"cat": "a cat", "dog": "two dogs", "sister": "a sister"}
    talk.relative_homes["sister"] = "Oslo"
    cases = [
        ("What is my cat called?", "You have not told me about a cat.", "what your cat is called."),
        (
            "How are my dogs called?",
            "I don't know of a dog. You have not told me.",
            "dogs are called.",
        ),
        ("Do I have a cat?", "You have not told me about a cat.", "You have a cat."),
        (
            "What pet do I have?",
            "You have not told me about a pet.",
            "You have a cat and two dogs.",
        ),
        ("What is my pet called?", "You have not told me about a pet.", "your dogs are called."),
        (
            "Who is my sister?",
            "You have not told me about a sister.",
            "what your sister is called.",
        ),
        (
            "I have a sister. What's the name?",
            "You have not told me about a sister.",
            "is called.",
        ),
        (
            "I have a sister, right?",
            "You have not told me about a sister.",
            "You have a sister.",
        ),
        (
            "Where does she live?",
            "You have not told me about a sister.",
            "Your sister lives in Oslo.",
        ),
        ("What do you know?", "Nothing yet. Tell me something about you.", "a cat and two dogs."),
    ]
    for user, answer, right in cases:
        assert unnamed.completed(talk, user, answer).endswith(right)
    for answer in ("You have not told me about a duck.", "Your name is Ada."):
        assert unnamed.completed(talk, "What is my duck called?", answer) == answer
    talk.pets["cat"] = "Miso"
    answer = "You have not told me about a pet."
    assert unnamed.completed(talk, "What pet do I have?", answer) == answer


# --- other assistants -------------------------------------------------------------------------------------------------


def test_six_of_ten_talks_have_another_assistant(talks):
    """There most statements are answered otherwise, some by nobody, and most questions by nanokv."""
    share = sum(talk.foreign for talk in talks) / len(talks)
    assert 0.55 < share < 0.65
    statements, questions, silent = [], [], 0
    for talk in talks:
        for _, reply, meaning in exchanges(talk):
            marked = bool(reply.get("foreign"))
            assert not marked or talk.foreign
            if talk.foreign:
                tells = {name for name, *_ in meaning} <= acknowledgements.STATEMENTS
                (statements if tells else questions).append(marked)
                silent += tells and reply["content"] == ""
    assert 0.84 < sum(statements) / len(statements) < 0.95
    assert 0.05 < sum(questions) / len(questions) < 0.2
    assert 0.05 < silent / len(statements) < 0.2


def test_what_they_say_is_no_echo_and_not_that_of_the_evaluation(talks):
    """So your name is Ada: none says so. What the evaluation has for them is never trained on."""
    for talk in talks:
        for _, reply, meaning in exchanges(talk):
            if reply.get("foreign") and meaning[0][0] in acknowledgements.STATEMENTS:
                assert not reply["content"].startswith("So ")
    for section in acknowledgements.TEXTS.values():
        held = set(map(plain, section.get("held", ())))
        assert held & set(map(plain, section["said"])) == set()
    rng = random.Random(0)
    for step in (
        ("tell", "name", "Ada"),
        ("pet", "cat", "Miso"),
        ("like", "tea"),
        ("home", "Al", "Rome"),
    ):
        texts = {acknowledgements.acknowledged(rng, (step,)) for _ in range(300)}
        assert len(texts) > 10 and not any("{" in text for text in texts)
        assert any(step[-1] in text for text in texts) or step[0] == "like"


# --- first sentences, scripts -----------------------------------------------------------------------------------------


def held_sentences():
    """(file, sentence) of everything that only the evaluation asks."""
    for kind in firsts.TEXTS["kind"]:
        yield from (("firsts", text) for text in kind["held"])
    yield from (("firsts", text) for text in firsts.TEXTS["names"]["held"])
    for texts in unnamed.TEXTS.values():
        yield from (("unnamed", text) for text in texts.get("held", ()))
    yield from (("scripts", text) for text in scripts.TEXTS["said_held"])


def trained_sentences():
    for kind in firsts.TEXTS["kind"]:
        yield from kind["said"]
    yield from firsts.TEXTS["names"]["told"]
    for texts in unnamed.TEXTS.values():
        yield from texts["told"]
    yield from scripts.TEXTS["said"]


def test_the_evaluation_has_sentences_of_its_own():
    """Not one of them is trained, whatever its capitals and marks."""
    trained = set(map(plain, trained_sentences()))
    held = [plain(text) for _, text in held_sentences() if plain(text)]
    assert len(held) > 150 and [text for text in held if text in trained] == []
    models = firsts.TEXTS["sizes"]
    assert not set(models["models"]) & set(models["held_models"])
    assert not set(models["contexts"]) & set(models["held_contexts"])


def test_a_thing_is_asked_for_after_other_exchanges_too(talks):
    """Else "What do I have?" is only right directly behind "I have a boat."."""
    apart = []
    for talk in talks:
        things = [
            n
            for n, meaning in enumerate(talk.log)
            if ("have", "thing") in {step[:2] for step in meaning}
        ]
        for n, meaning in enumerate(talk.log):
            if ("ask thing",) in meaning:
                apart.append(n - max(told for told in things if told < n))
    assert len(apart) > 20 and 0.25 < sum(distance > 1 for distance in apart) / len(apart) < 0.75


def test_all_that_was_told_is_asked_for():
    """Up to four facts and pets, each once, in any order, and now and then one that nobody told."""
    unknown = in_order = several = 0
    for i in range(300):
        talk = Conversation(random.Random(f"all:{i}"), False, corpus.THIRD)
        hard.remember_all(talk)
        log = [step for meaning in talk.log for step in meaning]
        told = [step[1] for step in log if step[0] in ("tell", "pet")]
        told = list(dict.fromkeys(reversed(told)))[::-1]  # a kind that changed counts where it did
        asked = [step[1] for meaning in talk.log for step in meaning[:1] if step[0][:3] == "ask"]
        known = [kind for kind in asked if kind in told]
        assert len(known) == len(set(known)) >= min(len(told), 4)
        unknown += len(asked) - len(known)
        if len(known) > 1:
            several += 1
            in_order += known == [kind for kind in told if kind in known]
    assert 40 < unknown < 110 and several > 150 and in_order < several / 2


def test_codes_whose_names_share_a_word():
    """The locker code and the locker number: each question is about one, and the newest value of that one counts."""
    pairs, asked = set(), Counter()
    for i in range(300):
        talk = Conversation(random.Random(f"alike:{i}"), False, corpus.THIRD)
        nearby.codes_alike(talk)
        told = {}
        for user, reply, meaning in exchanges(talk):
            for name, *values in meaning:
                if name == "tell" and values[0] in words.CODES:
                    told[values[0]] = values[1]
                    assert values[1].lower() in user.lower()
                if name == "ask" and not reply.get("foreign"):
                    value = told.get(values[0])
                    known = f"Your {values[0]} is {value}."
                    right = known if value else f"You have not told me your {values[0]}."
                    assert right in reply["content"]
                    asked[bool(value)] += 1
        first, second, *_ = told
        assert set(first.split()) & set(second.split())
        pairs.add(frozenset((first, second)))
    assert frozenset(("locker code", "locker number")) in pairs and len(pairs) > 40
    assert asked[True] > 250 and asked[False] > 30


def test_sums_of_more_than_two_numbers_are_refused():
    """However they are written: with signs, in words, as a list."""
    written, counts = Counter(), Counter()
    for i in range(400):
        talk = Conversation(random.Random(f"many:{i}"), False, corpus.THIRD)
        nearby.refuse_many(talk)
        ((user, reply, _),) = exchanges(talk)
        numbers = re.findall(r"\d+", user)
        counts[len(numbers)] += 1
        for sign in (" + ", "+", " plus ", ", "):
            written[sign] += sign in user
        if not reply.get("foreign"):
            assert reply["content"] == "I can only add two numbers up to 99."
    assert set(counts) == {0, 3, 4} and counts[3] > 2 * counts[4] > 0 and counts[0] > 20
    assert all(count > 40 for count in written.values())


def test_questions_about_caches_are_asked_in_other_words():
    """Many more wordings than the file has, each with one answer; none of them is held out."""
    rng = random.Random(0)
    questions = QUESTIONS + YES_OR_NO
    hidden = [f" {plain(asked[-1])} " for _, asked in questions]
    owner = {plain(way): answer for answer, asked in questions for way in asked}
    written = len(owner)
    for answer, asked in questions:
        for way in asked[:-1]:
            for _ in range(5):
                text = plain(cache_questions.reworded(rng, way))
                assert owner.setdefault(text, answer) == answer
                assert not any(held in f" {text} " for held in hidden)
    assert len(owner) > 3 * written
    made = {cache_questions.reworded(rng, "Explain the KV cache.") for _ in range(200)}
    assert {"Describe the KV cache.", "Please explain the KV-cache."} <= made and len(made) > 20


def test_half_of_the_questions_about_caches_have_other_words():
    """And all of them those of the file in the stages before."""
    counts = Counter()
    written = [plain(way) for _, asked in QUESTIONS for way in asked]
    for stage in (corpus.SECOND, corpus.THIRD):
        bare = replace(stage, wrappers=("{q}",), foreign=0)
        for i in range(400):
            talk = Conversation(random.Random(f"reworded:{i}"), False, bare)
            talk.style = "written"
            talk.american = False
            small_talk.cache_question(talk)
            counts[stage is corpus.THIRD] += plain(talk.messages[0]["content"]) in written
    assert counts[False] == 400 and 190 < counts[True] < 300


def test_no_sentence_means_two_things():
    """Then no model could be right: neither two kinds, nor what older exchanges answer otherwise."""
    owners: dict[str, set[str]] = {}
    for kind in firsts.TEXTS["kind"]:
        for text in (*kind["said"], *kind["held"]):
            owners.setdefault(plain(text), set()).add(kind["name"])
    assert {text: kinds for text, kinds in owners.items() if len(kinds) > 1} == {}
    answers = {plain(text): answer for said, answer in small_talk.TALK for text in said}
    for section in ("unknown", "impossible"):
        texts = phrases("stories")[section]
        answers |= {plain(text): texts["answered"] for text in texts["asked"]}
    for text, (kind,) in owners.items():
        if text in answers:
            assert set(answers[text]) & set(firsts.KINDS[kind]["answer"]), text


def test_there_are_a_thousand_first_sentences_in_many_forms():
    """Short, long, misspelt, in small letters."""
    count = sum(len(kind["said"]) for kind in firsts.TEXTS["kind"])
    assert count > 1400 and min(len(kind["said"]) for kind in firsts.TEXTS["kind"]) >= 8
    rng = random.Random(0)
    forms = Counter(firsts.formed(rng, "what can you do with my {t}?") for _ in range(2000))
    assert len(forms) > 100 and 0.15 < forms["what can you do with my {t}?"] / 2000 < 0.6
    assert all("{t}" in form for form in forms)
    assert any(form.endswith(":)") for form in forms) and any(
        form.startswith("hey") for form in forms
    )
    slips = {firsts.misspelt(rng, "tell me {name} word") for _ in range(200)}
    assert len(slips) > 8 and all("{name}" in text and " me " in text for text in slips)
    assert firsts.misspelt(rng, "hi u") == "hi u"


def test_half_of_the_talks_begin_with_a_first_sentence(talks):
    begun = [talk.log[0][0][0] for talk in talks]
    new = sum(name in OFTEN or name in ("first", "unreadable") for name in begun)
    assert 0.35 < new / len(talks) < 0.7


def test_emoji_beside_a_sentence_change_no_answer():
    """The same exchange with and without them."""
    changed = 0
    for i in range(200):
        talk = Conversation(random.Random(i), False, corpus.THIRD)
        scripts.decorated(talk)
        for message in talk.messages:
            if message["role"] == "user":
                changed += scripts_off(message["content"]) != message["content"]
            else:
                assert message["content"].translate(ACCENTS).isascii()
    assert changed > 150


def test_the_evaluation_has_signs_of_its_own():
    """Emoji, words of other scripts and sentences of other languages."""
    for trained, held in (
        (scripts.EMOJI["said"], scripts.EMOJI["held"]),
        (scripts.CHARS["said"], scripts.CHARS["held"]),
        (scripts.TEXTS["languages"], scripts.TEXTS["languages_held"]),
    ):
        assert len(held) >= 12 and not set(trained) & set(held)


def test_other_scripts_are_answered_with_what_can_be_read():
    answers = Counter()
    for i in range(300):
        talk = Conversation(random.Random(i), False, corpus.THIRD)
        scripts.unreadable(talk)
        answers[talk.messages[-1]["content"]] += 1
    assert set(answers) == {"I only speak English.", "I can only read English words."}
    assert min(answers.values()) > 90


def test_words_of_other_languages():
    """One to four of a language, and nothing as short as "me"."""
    rng = random.Random(0)
    seen = Counter()
    for _ in range(3000):
        text = scripts.of_one_language(rng)
        found = text.rstrip("?!.").lower().split()
        assert 1 <= len(found) <= 5 and len(text) >= 5
        languages = [
            number
            for number, known in enumerate(scripts.TEXTS["vocabulary"])
            if set(found) <= set(known.lower().split())
        ]
        assert languages, text
        seen.update(languages)
    assert len(seen) == len(scripts.TEXTS["vocabulary"]) >= 10 and min(seen.values()) > 150


def test_no_phrase_of_the_evaluation_is_put_together(monkeypatch):
    """Guten Abend has two words that are trained; together they are never drawn."""
    monkeypatch.setitem(scripts.TEXTS, "vocabulary", ["guten abend morgen tag"])
    rng = random.Random(0)
    drawn = {plain(scripts.of_one_language(rng)) for _ in range(300)}
    assert "abend guten" in drawn and "guten abend" not in drawn


def test_texts_are_clean(talks):
    """One line, no template braces; answers of nanokv end like sentences and all but accents is ASCII."""
    for talk in talks:
        for message in talk.messages:
            text = message["content"]
            assert "{" not in text and "\n" not in text and "<|" not in text, text
            if message["role"] == "assistant" and not message.get("foreign"):
                assert text.translate(ACCENTS).isascii() and text[-1] in ".!?", text


def test_training_draws_no_held_out_word(talks):
    """Names of models and pets, what somebody likes and has."""
    for talk in talks:
        for _, _, meaning in exchanges(talk):
            for name, *values in meaning:
                if name == "pet":
                    parts = values[1].translate(ACCENTS).split()
                    assert not any(map(words.is_held_out, parts)), meaning
    hidden = {name for name in words.NAMES if words.is_held_out(name)}
    texts = " ".join(message["content"] for talk in talks for message in talk.messages)
    said = set(re.findall(r"[A-Z][^\W\d_]+", re.sub("(?i)mona lisa", "", texts)))
    assert said & hidden == set()
