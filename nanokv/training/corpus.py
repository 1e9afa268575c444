"""A seeded generator of conversations: what the bundled model is trained and tested on.

Every answer depends on earlier tokens: names, pets, lists and numbers that the user said. That makes the cache
visible: break it, and the answers break. The same generator makes the held-out conversations of the evaluation, from
the half of the words that training never uses.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from nanokv.training import stories, words
from nanokv.training.cache_questions import LATER_WRAPPERS, QUESTIONS, WRAPPERS, ask
from nanokv.training.facts import CHANGED, FACTS, PET
from nanokv.training.phrases import phrases

REQUESTS = phrases("requests")
KINDS = tuple(FACTS)
SENTENCE_STARTS = set(
    """My The You Call Please Remember In People This What What's Which Where Who How Do Can Tell Say Is Does Did
Repeat Reverse Now Why When""".split()
)
KIND_WEIGHTS = tuple(3 if kind == "name" else 1 for kind in KINDS)


class Conversation:
    """Messages that grow by one exchange at a time, and what the user has told so far."""

    def __init__(self, rng: random.Random, held_out: bool = False, stage: "Stage | None" = None):
        self.rng, self.held_out, self.stage = rng, held_out, stage or FIRST
        self.messages: list[dict] = []
        self.facts: dict[str, str] = {}
        self.pets: dict[str, str] = {}  # kind → name
        self.owners: dict[str, tuple[str, str]] = {}  # person → (colour, thing)
        self.objects: dict[str, str] = {}  # thing → place
        self.list: list[str] = []

    def say(self, user: str, assistant: str):
        """One exchange; one user in ten forgets the full stop or the question mark."""
        if self.rng.random() < 0.1:
            user = user.rstrip(".?!")
        self.messages += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]

    def word(self) -> str:
        """A word for a list."""
        return self.stage.word(self.rng, self.held_out)

    def name(self) -> str:
        """A first name."""
        return words.name(self.rng, self.held_out)


# --- facts: told in one turn, asked for in a later one -------------------------------------------------------------


def tell(talk: Conversation, kind: str | None = None):
    """The user tells one or two facts, or changes his mind about one."""
    rng = talk.rng
    kind = kind or rng.choices(KINDS, KIND_WEIGHTS)[0]
    value, sentence = _statement(talk, kind)
    if kind in talk.facts and rng.random() < 0.7:
        sentence = rng.choice(CHANGED).format(s=sentence, l=_lower_first(sentence))
    talk.facts[kind] = value
    noted = rng.choice(FACTS[kind].noted).format(v=value)
    if rng.random() < 0.25:
        other = rng.choice([k for k in KINDS if k != kind])
        talk.facts[other], more = _statement(talk, other)
        joined = f"{sentence} {more}" if rng.random() < 0.5 else f"{sentence.rstrip('.!')} and {_lower_first(more)}"
        also = rng.choice(FACTS[other].noted).format(v=talk.facts[other])
        noted, sentence = rng.choice((noted, "Thank you, I will remember that.", also)), joined
    talk.say(sentence, noted[0].upper() + noted[1:])


def _statement(talk: Conversation, kind: str) -> tuple[str, str]:
    value = FACTS[kind].value(talk.rng, talk.held_out)
    if kind == "name":
        value = talk.rng.choices((value, value.lower(), f"{value} {talk.name()}"), (85, 8, 7))[0]
    sentence = talk.rng.choice(FACTS[kind].told).format(v=value)
    return value, sentence[0].upper() + sentence[1:] if sentence.startswith(value) else sentence


def _lower_first(sentence: str) -> str:
    keep = sentence.split()[0] not in SENTENCE_STARTS  # "I", a name, a city
    return sentence if keep else sentence[0].lower() + sentence[1:]


def _lead_in(rng, question: str) -> str:
    """Questions seldom come bare: "Hey, what is my name?"."""
    return rng.choice(REQUESTS["lead_ins"]).format(_lower_first(question)) if rng.random() < 0.15 else question


def recall(talk: Conversation, kind: str | None = None):
    """The user asks for a fact: an old one, or one that he never told."""
    rng = talk.rng
    if kind is None:
        known = talk.facts and rng.random() < 0.88
        kind = rng.choice(list(talk.facts)) if known else rng.choices(KINDS, KIND_WEIGHTS)[0]
    fact = FACTS[kind]
    question = rng.choice(fact.asked)
    answer = rng.choice(fact.recalled).format(v=talk.facts[kind]) if kind in talk.facts else rng.choice(fact.missing)
    others = [other for other in talk.facts if other != kind]
    if others and rng.random() < 0.08:
        other = rng.choice(others)
        question = f"{question} And {_lower_first(rng.choice(FACTS[other].asked))}"
        answer += " " + rng.choice(FACTS[other].recalled).format(v=talk.facts[other])
    talk.say(_lead_in(rng, question), answer)


def tell_pet(talk: Conversation):
    """The user has a pet."""
    rng = talk.rng
    kind, name = rng.choice(words.ANIMALS), talk.name()
    talk.pets[kind] = name
    told = rng.choice(PET["told"]).format(k=kind, v=name)
    if rng.random() < 0.25:
        other = rng.choices(KINDS, KIND_WEIGHTS)[0]
        talk.facts[other], more = _statement(talk, other)
        told = rng.choice((f"{more} {told}", f"{told} {more}", f"{more.rstrip('.!')} and {_lower_first(told)}"))
    talk.say(told, rng.choice(PET["noted"]).format(k=kind, v=name))


def recall_pet(talk: Conversation):
    """The user asks for his pet, or for one that he does not have."""
    rng = talk.rng
    if not talk.pets or rng.random() < 0.1:
        kind = rng.choice([kind for kind in words.ANIMALS if kind not in talk.pets])
        names = ("asked", "missing") if not talk.pets and rng.random() < 0.5 else ("name_asked", "kind_missing")
        talk.say(*(rng.choice(PET[name]).format(k=kind) for name in names))
        return
    kind = rng.choice(list(talk.pets))
    which = "" if len(talk.pets) == 1 and rng.random() < 0.3 else "name_"
    question, answer = rng.choice(PET[f"{which}asked"]).format(k=kind), PET[f"{which}recalled"]
    talk.say(_lead_in(rng, question), answer.format(k=kind, v=talk.pets[kind]))


def everything(talk: Conversation):
    """What do you know about me?"""
    known = [kind for kind in talk.facts if kind in ("name", "city", "job", "age")][:3]
    answers = (FACTS[kind].recalled[0].format(v=talk.facts[kind]) for kind in KINDS if kind in known)
    asked = ("What do you know about me?", "What did I tell you about me?", "Tell me what you know about me.")
    talk.say(talk.rng.choice(asked), " ".join(answers) or "Nothing yet. Tell me something about you.")


def tell_owner(talk: Conversation):
    """Somebody has something: a fact about a third person."""
    rng, person = talk.rng, talk.name()
    colour, thing = rng.choice(words.COLOURS), words.pick(rng, words.NOUNS, talk.held_out)
    talk.owners[person] = (colour, thing)
    article = "an" if colour[0] in "aeiou" else "a"
    verb = rng.choice(("has", "bought", "owns"))
    noted = rng.choice((f"Good for {person}.", "I will remember that.", f"So {person} has {article} {colour} {thing}."))
    talk.say(f"{person} {verb} {article} {colour} {thing}.", noted)


def recall_owner(talk: Conversation):
    """Who has it, what does he have, what colour is it?"""
    if not talk.owners:
        tell_owner(talk)
    rng = talk.rng
    person = rng.choice(list(talk.owners))
    colour, thing = talk.owners[person]
    article = "an" if colour[0] in "aeiou" else "a"
    exchanges = (
        (f"What does {person} have?", f"{person} has {article} {colour} {thing}."),
        (f"Who has the {colour} {thing}?", f"{person} has the {colour} {thing}."),
        (f"What colour is the {thing} of {person}?", f"The {thing} of {person} is {colour}."),
    )
    talk.say(*rng.choice(exchanges))


def tell_object(talk: Conversation):
    """A thing lies somewhere."""
    rng, thing, place = talk.rng, words.pick(talk.rng, words.NOUNS, talk.held_out), talk.rng.choice(words.PLACES)
    talk.objects[thing] = place
    told = rng.choice((f"The {thing} is", f"I put the {thing}", f"My {thing} is"))
    noted = rng.choice((f"Ok, the {thing} is in the {place}.", "I will remember that.", f"The {place}, noted."))
    talk.say(f"{told} in the {place}.", noted)


def recall_object(talk: Conversation):
    """Where is it?"""
    if not talk.objects:
        tell_object(talk)
    thing = talk.rng.choice(list(talk.objects))
    talk.say(
        talk.rng.choice((f"Where is the {thing}?", f"Where is my {thing}?", f"Where did I put the {thing}?")),
        f"The {thing} is in the {talk.objects[thing]}.",
    )


# --- lists ---------------------------------------------------------------------------------------------------------


def _join(rng, items) -> str:
    """A list as people type it."""
    style = rng.random()
    if style < 0.7:
        return ", ".join(items)
    if style < 0.85:
        return " ".join(items)
    return f"{', '.join(items[:-1])} and {items[-1]}"


def _new_list(talk: Conversation) -> list[str]:
    """`The list` is always the latest one that the user gave."""
    length = talk.rng.choice((2, 3, 3, 4, 4, 5, 5, 6, 7, 8))
    talk.list = words.distinct(talk.rng, length, talk.word)
    return talk.list


def repeat(talk: Conversation):
    """Repeat these words."""
    rng, items = talk.rng, _new_list(talk)
    request = rng.choice(REQUESTS["list"]["repeat"])
    talk.say(request.format(_join(rng, items)), talk.stage.again.format(", ".join(items)))


def reverse(talk: Conversation):
    """Say them backwards."""
    rng, items = talk.rng, _new_list(talk)
    request = rng.choice(REQUESTS["list"]["reverse"])
    talk.say(request.format(_join(rng, items)), talk.stage.backwards.format(", ".join(items[::-1])))


def nth(talk: Conversation):
    """Which is the third?"""
    rng, items = talk.rng, _new_list(talk)
    where, item = _position(rng, items)
    request = rng.choice(REQUESTS["list"]["nth"])
    talk.say(request.format(o=_digits(rng, where), l=_join(rng, items)), f"The {where} is {item}.")


def _position(rng, items) -> tuple[str, str]:
    i = rng.randrange(len(items))
    return ("last", items[-1]) if i == len(items) - 1 and rng.random() < 0.5 else (words.ORDINALS[i], items[i])


def _digits(rng, where: str) -> str:
    """third, or now and then 3rd."""
    if where == "last" or rng.random() < 0.85:
        return where
    n = words.ORDINALS.index(where) + 1
    return f"{n}{('st', 'nd', 'rd')[n - 1] if n < 4 else 'th'}"


def remember_list(talk: Conversation):
    """A list to be asked for later."""
    rng = talk.rng
    _new_list(talk)
    request = rng.choice(REQUESTS["list"]["remember"])
    length = words.NUMBER_WORDS[len(talk.list)]
    all_of_it, count = f"Ok, I will remember {', '.join(talk.list)}.", f"I will remember these {length} words."
    answer = rng.choice((all_of_it, count, "Ok, I will remember the list."))
    talk.say(request.format(_join(rng, talk.list)), answer)


def ask_list(talk: Conversation):
    """Something about the remembered list."""
    if not talk.list:
        talk.say(talk.rng.choice(REQUESTS["remembered"]["unknown"]), "You have not given me a list yet.")
        return
    rng, items = talk.rng, talk.list
    where, item = _position(rng, items)
    i = rng.randrange(len(items) - 1)
    inside = rng.random() < 0.5
    probe = rng.choice(items) if inside else talk.word()
    member = "Yes, {} is on the list." if probe in items else "No, {} is not on the list."

    def asked(about: str) -> str:
        return rng.choice(REQUESTS["remembered"][about])

    position = f"The {where} is {item}."
    exchanges = (  # all are made and one is taken: positions twice as often as the others
        (asked("nth").format(o=_digits(rng, where)), position),
        (asked("nth").format(o=_digits(rng, where)), position),
        (asked("again"), talk.stage.again.format(", ".join(items))),
        (asked("backwards"), talk.stage.backwards.format(", ".join(items[::-1]))),
        (asked("length"), f"There are {words.NUMBER_WORDS[len(items)]}."),
        (asked("member").format(probe), member.format(probe)),
        (asked("next").format(items[i]), f"After {items[i]} comes {items[i + 1]}."),
    )
    question, answer = rng.choice(exchanges)
    talk.say(_lead_in(rng, question), answer)


# --- numbers -------------------------------------------------------------------------------------------------------


def count(talk: Conversation):
    """Count from a to b."""
    rng = talk.rng
    a, length = rng.choice((rng.randint(0, 20), rng.randint(0, 110))), rng.randint(2, 20)
    numbers = list(range(a, a + length))
    down = rng.random() < 0.15
    if down:
        numbers.reverse()
    first, last = numbers[0], numbers[-1]
    requests = REQUESTS["numbers"]["down" if down else "up"]
    talk.say(rng.choice(requests).format(first, last), ", ".join(map(str, numbers)) + ".")


def add(talk: Conversation):
    """Two numbers of at most two digits."""
    rng = talk.rng
    lowest = 0 if rng.random() < 0.12 else 10
    a, b = rng.randint(lowest, 99), rng.randint(lowest, 99)
    request = rng.choice(REQUESTS["numbers"]["add"])
    talk.say(request.format(a, b), f"{a} + {b} = {a + b}.")


# --- the rest ------------------------------------------------------------------------------------------------------


def cache_question(talk: Conversation):
    """A question about KV caches; the last phrasing of each is kept for the evaluation."""
    answer, phrasings = talk.rng.choice(QUESTIONS)
    talk.say(ask(talk.rng, talk.rng.choice(phrasings[:-1]), talk.stage.wrappers), answer)


def story(talk: Conversation):
    """Five sentences with the characters that the user names."""
    rng, kind = talk.rng, talk.rng.random()
    known = kind < 0.75
    people = [talk.name() if rng.random() < 0.7 else f"the {rng.choice(words.ANIMALS)}", talk.name()]
    if not known:
        people = rng.sample(("Mira", "Tom", "the fox", "the owl", "Lina", "the old bear"), 2)
    rng.shuffle(people)
    a, b = people
    places = words.PLACES + ["river", "forest", "market", "harbour", "lake", "hill"]
    form = {"p": rng.choice(places), "t": rng.choice(words.NOUNS[:120])}
    parts = (rng.choice(part) for part in stories.PARTS)
    if 0.6 < kind < 0.75:
        talk_request = rng.choice(stories.SINGLE_REQUESTS).format(a=a)
        b = rng.choice(("a fox", "an owl", "a small bear", "a friend"))
        parts = (part for part in list(parts))
    else:
        talk_request = rng.choice(stories.REQUESTS).format(a=a, b=b) if known else rng.choice(stories.OPEN_REQUESTS)
    sentences = [
        part.format(a=a, b=b if i == 0 else b.replace("a ", "the ").replace("an ", "the "), **form)
        for i, part in enumerate(parts)
    ]
    talk.say(talk_request, " ".join(_capital(sentence) for sentence in sentences))


def _capital(text: str) -> str:
    """Sentences begin with a capital, also when a character is called `the fox`."""
    parts = [part[0].upper() + part[1:] for part in text.split(". ")]
    return ". ".join(parts)


def small_talk(talk: Conversation):
    """Who are you, thank you, hello."""
    rng = talk.rng
    if rng.random() < 0.2:
        name = talk.facts.get("name")
        talk.say(
            rng.choice(stories.GREETINGS),
            rng.choice(stories.GREETED_BY_NAME).format(v=name) if name else rng.choice(stories.GREETED),
        )
        return
    said, answers = rng.choice(stories.TALK)
    talk.say(rng.choice(said), rng.choice(answers))


def unknown(talk: Conversation):
    """An honest "I don't know that"."""
    rng = talk.rng
    city = rng.choice(words.CITIES) if rng.random() < 0.5 else words.invent(rng, talk.held_out).capitalize()
    form = {"c": city, "n": talk.name(), "w": words.invent(rng, talk.held_out)}
    form |= {"t": rng.choice(words.NOUNS), "f": rng.choice(words.FOODS)}
    said, answers = (stories.UNKNOWN, stories.HONEST) if rng.random() < 0.8 else (stories.IMPOSSIBLE, stories.REFUSED)
    talk.say(_lead_in(rng, rng.choice(said).format(**form)), rng.choice(answers))


@dataclass(frozen=True)
class Stage:
    """What a part of the training draws from: how often each exchange comes, words of lists, ways to ask and answer."""

    segments: dict
    word: Callable
    wrappers: tuple
    again: str = "{}."
    backwards: str = "{}."


SEGMENTS = {  # exchange → how often
    tell: 15, recall: 16, tell_pet: 3, recall_pet: 4, everything: 1,
    tell_owner: 2, recall_owner: 2, tell_object: 2, recall_object: 2,
    repeat: 5, reverse: 6, nth: 6, remember_list: 3, ask_list: 7, count: 4, add: 20,
    cache_question: 12, story: 3, small_talk: 5, unknown: 4,
}
FIRST = Stage(SEGMENTS, words.list_word, WRAPPERS)
SECOND = Stage(  # lists of stranger words, and more of what is hard
    SEGMENTS | {repeat: 7, reverse: 10, nth: 10, ask_list: 8, count: 5, add: 12, cache_question: 15},
    words.varied_word,
    WRAPPERS + LATER_WRAPPERS,
)
# " tower" may be one token where "tower" is three that the model has never seen together: an answer that begins with
# other words lets every item keep its leading space, so that copying needs no spelling.
THIRD = replace(
    SECOND,
    segments=SECOND.segments | {nth: 24, reverse: 12, ask_list: 10},
    again="You said: {}.",
    backwards="Reversed: {}.",
)


def conversation(rng: random.Random, exchanges: int, held_out: bool = False, stage: Stage = FIRST) -> list[dict]:
    """Messages of one conversation with so many exchanges; now and then with a system prompt."""
    talk = Conversation(rng, held_out, stage)
    if rng.random() < 0.12:
        talk.messages.append({"role": "system", "content": rng.choice(stories.SYSTEM_PROMPTS)})
    start = len(talk.messages)
    while len(talk.messages) - start < 2 * exchanges:
        rng.choices(list(stage.segments), list(stage.segments.values()))[0](talk)
    return talk.messages


if __name__ == "__main__":
    for message in conversation(random.Random(), 12):
        print(f"{message['role']:>9}: {message['content']}")
