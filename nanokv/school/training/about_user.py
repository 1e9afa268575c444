"""Exchanges about the user: their facts and pets, and other people and things they mention.

The user mentions a fact, changes it, asks for it and has it confirmed. If they ask for something
they have not mentioned, the assistant answers that it does not know, whatever else it knows.

Each docstring of an exchange gives an example: "message of the user" → "answer".
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from nanokv.school.training import words
from nanokv.school.training.conversation import Conversation, Step, lower_first, upper_first
from nanokv.school.training.facts import (
    BELONGING,
    CHANGED,
    EVERYTHING,
    FACTS,
    HOME,
    OBJECT,
    OPENINGS,
    OWNER,
    PET,
    draw,
)
from nanokv.school.training.phrases import phrases

REQUESTS = phrases("requests")
FAMILY = phrases("facts")["family"]["told"]
AT_ONCE = (1, 1, 1, 1, 1, 1, 1, 2, 2, 3)  # facts in one message
REMEMBERED = "Thank you, I will remember that."


class Statement(NamedTuple):
    """A sentence of the user, a possible answer, and the meaning of the sentence."""

    sentence: str
    answer: str
    step: Step


# --- facts ----------------------------------------------------------------------------------------


def tell(talk: Conversation, first: str | None = None) -> None:
    """The user mentions one to three facts, now and then with a pet; `first` is one of the kinds.

    "My name is Ada and I live in Oslo." → "Nice to meet you, Ada."
    """
    count = talk.rng.choice(AT_ONCE)
    if not first and talk.rng.random() < 0.05:
        _tell_family(talk)
        return
    kinds = [first or draw(talk.rng)]
    while len(kinds) < count:
        kinds.append(draw(talk.rng, kinds))
    told = [statement(talk, kind) for kind in kinds]
    answers = [each.answer for each in told]
    if (count > 1 and talk.rng.random() < 0.3) or talk.rng.random() < 0.04:
        place = talk.rng.randrange(len(told) + 1)
        pet = _pet_statement(talk)
        told.insert(place, pet)
        answers.append(pet.answer)
    if len(answers) == 1:
        answer = talk.rng.choice(answers)
    else:
        answer = talk.one_of((*answers, REMEMBERED))
    message = joined(talk, [each.sentence for each in told])
    if talk.rng.random() < 0.1:
        message = talk.rng.choice(OPENINGS).format(s=message, l=lower_first(message, talk.capitals))
    talk.say(message, answer, *(each.step for each in told))


def _tell_family(talk: Conversation) -> None:
    """The user mentions two relatives.

    "I have a brother, Leo, and a sister, Mia." → "Say hello to Leo and Mia."
    """
    first, second = talk.rng.sample(words.RELATIVES, 2)
    steps = []
    for kind in (first, second):
        value = told_value(talk, kind)
        keep(talk, kind, value)
        steps.append(("tell", kind, value))
    x = talk.facts[first]
    y = talk.facts[second]
    message = talk.one_of(FAMILY, a=first, x=x, b=second, y=y)
    talk.say(message, f"Say hello to {x} and {y}.", *steps)


def tell_before(talk: Conversation) -> None:
    """The user's next message begins with a fact and goes on to something else.

    "I live in Oslo. What is 2 + 3?" → "2 + 3 = 5."
    """
    if talk.before is not None:  # one fact per message
        return
    told = statement(talk, draw(talk.rng))
    talk.before = (told.sentence, told.step)


def statement(
    talk: Conversation, kind: str, texts: Sequence[str] = (), value: str = ""
) -> Statement:
    """A statement of a fact; if the kind is known already, it changes the fact.

    `texts` are the phrasings to choose from, those of the kind by default. Without `value`, one is
    drawn.
    """
    value = value or told_value(talk, kind)
    known = kind in talk.facts
    fact = FACTS[kind]
    keep(talk, kind, value)
    if not texts:
        if known and talk.rng.random() < 0.8:
            texts = fact.changed
        else:
            texts = fact.told
    sentence = talk.one_of(texts, v=value)
    if known and talk.rng.random() < 0.2:
        sentence = talk.one_of(CHANGED, s=sentence, l=lower_first(sentence, talk.capitals))
    answer = talk.one_of(fact.noted, v=value)
    return Statement(upper_first(sentence), upper_first(answer), ("tell", kind, value))


def keep(talk: Conversation, kind: str, value: str) -> None:
    """Store a fact as the newest one."""
    talk.facts.pop(kind, None)
    talk.facts[kind] = value


def keep_pet(talk: Conversation, kind: str, name: str) -> None:
    """Store a pet as the newest one."""
    talk.pets.pop(kind, None)
    talk.pets[kind] = name


def told_value(talk: Conversation, kind: str) -> str:
    """A value of the kind other than the present one."""
    while True:
        value = talk.cased(FACTS[kind].value(talk.rng, talk.held_out))
        if value != talk.facts.get(kind):
            break
    if kind == "name" and talk.rng.random() < 0.07:
        value = f"{value} {talk.name()}"
    return value


def joined(talk: Conversation, sentences: list[str]) -> str:
    """The sentences as one message: one after the other, or with commas and an "and"."""
    if len(sentences) == 1 or talk.rng.random() < 0.5:
        return " ".join(sentences)
    parts = [sentences[0], *(lower_first(sentence, talk.capitals) for sentence in sentences[1:])]
    parts = [part.rstrip(".!?") for part in parts]
    return f"{', '.join(parts[:-1])} and {parts[-1]}."


def update(talk: Conversation) -> None:
    """A fact changes, and is often asked for at once. The newest value counts.

    "I moved to Rome." → "Rome sounds nice."
    """
    if not talk.facts:
        tell(talk)
    kind = talk.rng.choice(list(talk.facts))
    change(talk, kind)
    if talk.rng.random() < 0.4:
        recall(talk, kind)


def change(talk: Conversation, kind: str) -> None:
    """The user gives a known fact a new value.

    "Call me Leo instead." → "Hello, Leo!"
    """
    talk.say(*statement(talk, kind))


def asked(talk: Conversation, question: str) -> str:
    """The question, now and then with words around it: "Hey, what is my name? Thanks!"."""
    dice = talk.rng.random()
    if dice < 0.15:
        lead_in = talk.rng.choice(REQUESTS["lead_ins"])
        question = lead_in.format(lower_first(question, talk.capitals))
    if 0.1 < dice < 0.2:
        tail = talk.rng.choice(REQUESTS["tails"])
        question = tail.format(question)
    return question


def recall(talk: Conversation, kind: str | None = None) -> None:
    """The user asks for a fact, now and then for two. Over a third of the facts are not known.

    "What is my name?" → "Your name is Ada."
    """
    if kind is None:
        # "I don't know" is easy to answer while no fact is known, so mostly there is one.
        if not talk.facts and talk.rng.random() < 0.7:
            tell(talk)
        if talk.facts and talk.rng.random() < 0.62:
            kind = talk.rng.choice(list(talk.facts))
        else:
            kind = draw(talk.rng, talk.facts)
    question = talk.one_of(FACTS[kind].asked)
    answer = recalled(talk, kind)
    meaning = [("ask", kind)]
    others = [other for other in talk.facts if other != kind]
    if others and talk.rng.random() < 0.08:
        other = talk.rng.choice(others)
        question += f" And {lower_first(talk.one_of(FACTS[other].asked), talk.capitals)}"
        answer += " " + recalled(talk, other)
        meaning.append(("ask", other))
    talk.say(asked(talk, question), answer, *meaning)


def recalled(talk: Conversation, kind: str) -> str:
    """The answer to a question for a fact: its value, or that it is not known."""
    fact = FACTS[kind]
    if kind in talk.facts:
        return talk.one_of(fact.recalled, v=talk.facts[kind])
    return talk.one_of(fact.missing)


def tell_and_ask(talk: Conversation) -> None:
    """The user mentions a fact and asks for it in the same message.

    "My hobby is chess. What is my hobby?" → "Your hobby is chess."
    """
    told = statement(talk, draw(talk.rng))
    kind = told.step[1]
    message = f"{told.sentence} {talk.one_of(FACTS[kind].asked)}"
    talk.say(message, recalled(talk, kind), told.step, ("ask", kind))


def confirm(talk: Conversation) -> None:
    """The user asks whether a fact has a certain value; half of the time it has another one.

    "Is my name Leo?" → "No, your name is Ada."
    """
    if not talk.facts:
        tell(talk)
    rng = talk.rng
    if rng.random() < 0.85:
        kind = rng.choice(list(talk.facts))
    else:
        kind = draw(rng, talk.facts)
    if kind in talk.facts and rng.random() < 0.5:
        probe = talk.facts[kind]
    else:
        probe = told_value(talk, kind)
    answer = recalled(talk, kind)
    if kind in talk.facts:
        answer = f"{_yes_or_no(probe == talk.facts[kind])}, {lower_first(answer)}"
    question = asked(talk, talk.one_of(FACTS[kind].confirm, v=probe))
    talk.say(question, answer, ("confirm", kind, probe))


def _yes_or_no(right: bool) -> str:
    if right:
        return "Yes"
    return "No"


def everything(talk: Conversation) -> None:
    """The user asks for all that is known: the answer has the last four facts and the last pet.

    "What do you know about me?" → "Your name is Ada. You have a dog called Miso."
    """
    answers = []
    for kind in list(talk.facts)[-4:]:
        answers.append(talk.one_of(FACTS[kind].recalled, v=talk.facts[kind]))
    for kind, name in list(talk.pets.items())[-1:]:
        answers.append(PET["recalled"].format(k=kind, v=name))
    question = talk.one_of(EVERYTHING["asked"])
    talk.say(question, " ".join(answers) or EVERYTHING["nothing"], ("everything",))


# --- pets -----------------------------------------------------------------------------------------


def tell_pet(talk: Conversation) -> None:
    """The user mentions a pet, and now and then asks at once: "What is its name?".

    "I have a dog called Miso." → "Say hello to Miso."
    """
    told = _pet_statement(talk)
    talk.say(*told)
    if talk.rng.random() < 0.1:
        _, kind, name = told.step
        answer = PET["name_recalled"].format(k=kind, v=name)
        talk.say(talk.one_of(PET["its_asked"]), answer, ("ask pet", kind))


def _pet_statement(talk: Conversation) -> Statement:
    """A new pet, or another name for a known one."""
    if talk.pets and talk.rng.random() < 0.3:
        kind = talk.rng.choice(list(talk.pets))
    else:
        kind = animal(talk)
    while True:
        name = talk.name()
        if name != talk.pets.get(kind):
            break
    texts = PET["told"]
    if kind in talk.pets:
        texts = PET["changed"]
    sentence = talk.one_of(texts, k=kind, v=name)
    keep_pet(talk, kind, name)
    answer = talk.one_of(PET["noted"], k=kind, v=name)
    return Statement(upper_first(sentence), upper_first(answer), ("pet", kind, name))


def animal(talk: Conversation) -> str:
    """A kind of animal; one in five is a made-up word."""
    if talk.rng.random() < 0.8:
        return talk.rng.choice(words.ANIMALS)
    return talk.cased(words.splice(talk.rng, talk.held_out))


def recall_pet(talk: Conversation) -> None:
    """The user asks for a pet. In a third of the cases or more they have not mentioned it.

    "What is my dog called?" → "Your dog is called Miso."
    """
    if not talk.pets and talk.rng.random() < 0.5:
        tell_pet(talk)
    if not talk.pets or talk.rng.random() < 0.35:
        _ask_missing_pet(talk)
    else:
        _ask_known_pet(talk)


def _ask_missing_pet(talk: Conversation) -> None:
    """The user asks for a kind of pet that is not known, or for their pet while none is known.

    The assistant answers that it does not know.
    """
    rng = talk.rng
    kind = rng.choice([kind for kind in words.ANIMALS if kind not in talk.pets])
    if not talk.pets and rng.random() < 0.4:
        question = asked(talk, talk.one_of(PET["asked"]))
        talk.say(question, talk.one_of(PET["missing"]), ("ask pet", None))
        return
    how = "have_asked"
    if rng.random() < 0.7:
        how = "name_asked"
    question = asked(talk, talk.one_of(PET[how], k=kind))
    talk.say(question, talk.one_of(PET["kind_missing"], k=kind), ("ask pet", kind))


def _ask_known_pet(talk: Conversation) -> None:
    """The user asks for the name of a pet, for the kind of a name, or has a name confirmed.

    "What animal is Miso?" → "Miso is a dog."
    """
    rng = talk.rng
    kind = rng.choice(list(talk.pets))
    name = talk.pets[kind]
    dice = rng.random()
    if dice < 0.15:
        _confirm_pet(talk, kind)
        return
    if dice < 0.25 and list(talk.pets.values()).count(name) == 1:
        question = asked(talk, talk.one_of(PET["kind_asked"], v=name))
        talk.say(question, upper_first(f"{name} is a {kind}."), ("ask animal", name))
        return
    how = "name_asked"
    answer = PET["name_recalled"]
    if len(talk.pets) == 1 and rng.random() < 0.35:  # "What is my pet called?"
        how = rng.choice(("asked", "have_asked"))
        answer = PET["recalled"]
    question = asked(talk, talk.one_of(PET[how], k=kind))
    talk.say(question, answer.format(k=kind, v=name), ("ask pet", kind))


def _confirm_pet(talk: Conversation, kind: str) -> None:
    """The user asks whether a pet has a certain name.

    "Is my dog called Rex?" → "No, your dog is called Miso."
    """
    name = talk.pets[kind]
    if talk.rng.random() < 0.5:
        probe = name
    else:
        probe = talk.name()
    answer = lower_first(PET["name_recalled"].format(k=kind, v=name))
    answer = f"{_yes_or_no(probe == name)}, {answer}"
    talk.say(talk.one_of(PET["confirm"], k=kind, v=probe), answer, ("confirm pet", kind, probe))


# --- other people, and things ---------------------------------------------------------------------


PEOPLE = (1, 1, 2, 2, 3)  # in one message


def tell_owner(talk: Conversation) -> None:
    """The user says what one to three other people have.

    "Leo has a red lamp." → "Good for Leo."
    """
    sentences = []
    steps = []
    for _ in range(talk.rng.choice(PEOPLE)):
        sentence, step = _owner_statement(talk)
        sentences.append(sentence)
        steps.append(step)
    _, person, _, _ = steps[-1]
    answer = talk.one_of(OWNER["noted"], p=person)
    talk.say(joined(talk, sentences), upper_first(answer), *steps)


def _owner_statement(talk: Conversation) -> tuple[str, Step]:
    """A person has a new thing, or the thing of another person. Each person has one thing."""
    person = new_name(talk, talk.owners)
    if talk.owners and talk.rng.random() < 0.15:
        colour, thing = talk.owners.pop(talk.rng.choice(list(talk.owners)))
        texts = BELONGING["moved"]
    else:
        colour = ""
        texts = BELONGING["told"]
        if talk.rng.random() < 0.5:
            colour = talk.rng.choice(words.COLOURS)
            texts = OWNER["told"]
        thing = new_thing(talk, _owned(talk))
    talk.owners[person] = (colour, thing)
    sentence = talk.one_of(texts, p=person, c=colour, t=thing)
    return upper_first(sentence), ("owner", person, colour, thing)


def _owned(talk: Conversation) -> list[str]:
    """All things that belong to a person."""
    return [thing for _, thing in talk.owners.values()]


def new_name(talk: Conversation, taken: Collection[str]) -> str:
    """A name that is not in `taken`."""
    while True:
        name = talk.name()
        if name not in taken:
            return name


def new_thing(talk: Conversation, taken: Collection[str]) -> str:
    """A thing that is not in `taken`; one in three is a made-up word."""
    while True:
        if talk.rng.random() < 0.65:
            thing = words.pick(talk.rng, words.NOUNS, talk.held_out)
        else:
            thing = words.splice(talk.rng, talk.held_out)
        if thing not in taken:
            return thing


def recall_owner(talk: Conversation) -> None:
    """The user asks what a person has, who has a thing, or for its colour. One in five is unknown.

    "Who has the red lamp?" → "Leo has the red lamp."
    """
    if not talk.owners:
        tell_owner(talk)
    if talk.rng.random() < 0.2:
        _ask_missing_owner(talk)
        return
    person = talk.rng.choice(list(talk.owners))
    colour, thing = talk.owners[person]
    coloured = f"{colour} {thing}".strip()
    answers = [
        ("what", f"{person} has a {coloured}."),
        ("who", f"{person} has the {coloured}."),
    ]
    if colour:
        answers.append(("colour", f"The {thing} of {person} is {colour}."))
    which, answer = talk.rng.choice(answers)
    texts = OWNER[f"{which}_asked"]
    if which == "who" and not colour:
        texts = BELONGING["who_asked"]
    question = talk.one_of(texts, p=person, c=colour, t=thing)
    talk.say(asked(talk, question), upper_first(answer), ("ask owner", which, person))


def _ask_missing_owner(talk: Conversation) -> None:
    """The user asks for the owner of an unknown thing, or for the thing of an unknown person.

    The assistant answers that it does not know.
    """
    if talk.rng.random() < 0.5:
        thing = new_thing(talk, _owned(talk))
        question = asked(talk, talk.one_of(BELONGING["who_asked"], t=thing))
        talk.say(question, f"You have not told me who has the {thing}.", ("no owner", thing))
        return
    person = new_name(talk, talk.owners)
    question = asked(talk, talk.one_of(OWNER["what_asked"], p=person))
    talk.say(question, f"You have not told me what {person} has.", ("owns nothing", person))


def tell_home(talk: Conversation) -> None:
    """The user says where one or two other people live, or that a known one has moved.

    "Leo lives in Lima." → "So Leo lives in Lima."
    """
    sentences: list[str] = []
    steps: list[Step] = []
    for _ in range(talk.rng.choice((1, 1, 2))):
        sentence, step = _home_statement(talk, first=not steps)
        sentences.append(sentence)
        steps.append(step)
    _, person, city = steps[-1]
    answer = talk.one_of(HOME["noted"], p=person, v=city)
    talk.say(joined(talk, sentences), upper_first(answer), *steps)


def _home_statement(talk: Conversation, first: bool) -> tuple[str, Step]:
    """The city of a person. The first statement of a message may be a move of a known person."""
    if talk.homes and first and talk.rng.random() < 0.6:
        person = talk.rng.choice(list(talk.homes))
        texts = HOME["changed"]
    else:
        person = new_name(talk, talk.homes)
        texts = HOME["told"]
    while True:
        city = talk.cased(FACTS["city"].value(talk.rng, talk.held_out))
        if city not in talk.homes.values():
            break
    talk.homes[person] = city
    return upper_first(talk.one_of(texts, p=person, v=city)), ("home", person, city)


def recall_home(talk: Conversation) -> None:
    """The user asks where a person lives, or who lives in a city. One person in five is unknown.

    "Where does Leo live?" → "Leo lives in Lima."
    """
    if not talk.homes:
        tell_home(talk)
    if talk.rng.random() < 0.2:
        person = new_name(talk, talk.homes)
        question = asked(talk, talk.one_of(HOME["where_asked"], p=person))
        answer = f"You have not told me where {person} lives."
        talk.say(question, answer, ("ask home", person))
        return
    person = talk.rng.choice(list(talk.homes))
    which = talk.rng.choice(("where_asked", "where_asked", "who_asked"))
    question = talk.one_of(HOME[which], p=person, v=talk.homes[person])
    answer = upper_first(f"{person} lives in {talk.homes[person]}.")
    talk.say(asked(talk, question), answer, ("ask home", person))


def tell_object(talk: Conversation) -> None:
    """The user says where a thing is, or where they have moved it.

    "The key is in the drawer." → "Ok, the key is in the drawer."
    """
    if talk.objects and talk.rng.random() < 0.3:
        thing = talk.rng.choice(list(talk.objects))
        texts = OBJECT["changed"]
    else:
        thing = new_thing(talk, talk.objects)
        texts = OBJECT["told"]
    while True:
        place = _place(talk)
        if place != talk.objects.get(thing):
            break
    message = talk.one_of(texts, t=thing, p=place)
    talk.objects[thing] = place
    answer = upper_first(talk.one_of(OBJECT["noted"], t=thing, p=place))
    talk.say(message, answer, ("object", thing, place))


def _place(talk: Conversation) -> str:
    """A room or a container; one in three is a made-up word."""
    if talk.rng.random() < 0.65:
        return talk.rng.choice(words.PLACES)
    return words.splice(talk.rng, talk.held_out)


def recall_object(talk: Conversation) -> None:
    """The user asks where a thing is. One thing in four is unknown.

    "Where is the key?" → "The key is in the drawer."
    """
    if not talk.objects:
        tell_object(talk)
    if talk.rng.random() < 0.25:
        thing = new_thing(talk, talk.objects)
        answer = f"You have not told me where the {thing} is."
    else:
        thing = talk.rng.choice(list(talk.objects))
        answer = f"The {thing} is in the {talk.objects[thing]}."
    question = asked(talk, talk.one_of(OBJECT["asked"], t=thing))
    talk.say(question, answer, ("ask object", thing))
