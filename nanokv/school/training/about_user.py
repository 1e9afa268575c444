"""Exchanges about the user: facts that he tells, changes, asks back and has confirmed; his pets, other people, things.

What he never told is said to be unknown, whatever else he told.
"""

from nanokv.school.training import words
from nanokv.school.training.conversation import Conversation, lower_first, upper_first
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


# --- facts ---------------------------------------------------------------------------------------------------------


def tell(talk: Conversation, first: str | None = None):
    """The user tells one to three facts, now and then a pet among them."""
    count = talk.rng.choice(AT_ONCE)
    if not first and talk.rng.random() < 0.05:
        return _tell_family(talk)
    kinds = [first or draw(talk.rng)]
    while len(kinds) < count:
        kinds.append(draw(talk.rng, kinds))
    sentences, noted, meaning = [], [], []
    for kind in kinds:
        sentence, answer, step = statement(talk, kind)
        sentences, noted, meaning = [*sentences, sentence], [*noted, answer], [*meaning, step]
    if (count > 1 and talk.rng.random() < 0.3) or talk.rng.random() < 0.04:
        place = talk.rng.randrange(len(sentences) + 1)
        sentence, answer, step = _pet_statement(talk)
        sentences.insert(place, sentence)
        meaning.insert(place, step)
        noted = [*noted, answer]
    answer = (
        talk.rng.choice(noted)
        if len(noted) == 1
        else talk.one_of((*noted, "Thank you, I will remember that."))
    )
    message = joined(talk, sentences)
    if talk.rng.random() < 0.1:
        message = talk.rng.choice(OPENINGS).format(s=message, l=lower_first(message, talk.capitals))
    talk.say(message, answer, *meaning)


def _tell_family(talk: Conversation):
    """I have a brother, Leo, and a sister, Mia."""
    first, second = talk.rng.sample(words.RELATIVES, 2)
    steps = []
    for kind in (first, second):
        value = told_value(talk, kind)
        keep(talk, kind, value)
        steps.append(("tell", kind, value))
    a, b = talk.facts[first], talk.facts[second]
    told = talk.one_of(FAMILY, a=first, x=a, b=second, y=b)
    talk.say(told, f"Say hello to {a} and {b}.", *steps)


def tell_before(talk: Conversation):
    """The user begins his next message with a fact, and goes on to something else."""
    if talk.before is None:  # one fact, not two
        sentence, _, step = statement(talk, draw(talk.rng))
        talk.before = (sentence, step)


def statement(talk: Conversation, kind: str, told=(), value: str = "") -> tuple[str, str, tuple]:
    """What the user says, what could be answered, what it means; a second statement changes the first.

    `told` are the phrasings to choose from, where they are not those of the kind; `value`, where it is known.
    """
    value = value or told_value(talk, kind)
    known, fact = kind in talk.facts, FACTS[kind]
    keep(talk, kind, value)
    texts = told or (fact.changed if known and talk.rng.random() < 0.8 else fact.told)
    sentence = talk.one_of(texts, v=value)
    if known and talk.rng.random() < 0.2:
        sentence = talk.one_of(CHANGED, s=sentence, l=lower_first(sentence, talk.capitals))
    return (
        upper_first(sentence),
        upper_first(talk.one_of(fact.noted, v=value)),
        ("tell", kind, value),
    )


def keep(talk: Conversation, kind: str, value: str):
    """Remember a fact; the newest is the last."""
    talk.facts.pop(kind, None)
    talk.facts[kind] = value


def keep_pet(talk: Conversation, kind: str, name: str):
    """Remember a pet; the newest is the last."""
    talk.pets.pop(kind, None)
    talk.pets[kind] = name


def told_value(talk: Conversation, kind: str) -> str:
    """A value that this user has not told of this kind."""
    while (value := talk.cased(FACTS[kind].value(talk.rng, talk.held_out))) == talk.facts.get(kind):
        pass
    if kind == "name" and talk.rng.random() < 0.07:
        value = f"{value} {talk.name()}"
    return value


def joined(talk: Conversation, sentences: list[str]) -> str:
    """Several statements in one message: one after the other, or with commas and an `and`."""
    if len(sentences) == 1 or talk.rng.random() < 0.5:
        return " ".join(sentences)
    parts = [sentences[0], *(lower_first(sentence, talk.capitals) for sentence in sentences[1:])]
    parts = [part.rstrip(".!?") for part in parts]
    return f"{', '.join(parts[:-1])} and {parts[-1]}."


def update(talk: Conversation):
    """A fact changes: he moved, she is called otherwise, it was a slip. The newest counts."""
    if not talk.facts:
        tell(talk)
    kind = talk.rng.choice(list(talk.facts))
    change(talk, kind)
    if talk.rng.random() < 0.4:
        recall(talk, kind)


def change(talk: Conversation, kind: str):
    """A new value of a fact that was told."""
    talk.say(*statement(talk, kind))


def asked(talk: Conversation, question: str) -> str:
    """Questions seldom come bare: "Hey, what is my name? Thanks." """
    dice = talk.rng.random()
    if dice < 0.15:
        question = talk.rng.choice(REQUESTS["lead_ins"]).format(
            lower_first(question, talk.capitals)
        )
    return talk.rng.choice(REQUESTS["tails"]).format(question) if 0.1 < dice < 0.2 else question


def recall(talk: Conversation, kind: str | None = None):
    """The user asks for a fact, now and then for two; more than one in three he never told."""
    if kind is None:
        if not talk.facts and talk.rng.random() < 0.7:  # "not told" is easy where nothing was told
            tell(talk)
        known = talk.facts and talk.rng.random() < 0.62
        kind = talk.rng.choice(list(talk.facts)) if known else draw(talk.rng, talk.facts)
    question, answer, meaning = (
        talk.one_of(FACTS[kind].asked),
        recalled(talk, kind),
        [("ask", kind)],
    )
    others = [other for other in talk.facts if other != kind]
    if others and talk.rng.random() < 0.08:
        other = talk.rng.choice(others)
        question += f" And {lower_first(talk.one_of(FACTS[other].asked), talk.capitals)}"
        answer += " " + recalled(talk, other)
        meaning.append(("ask", other))
    talk.say(asked(talk, question), answer, *meaning)


def recalled(talk: Conversation, kind: str) -> str:
    """Your name is Ada, or that it was not told."""
    fact = FACTS[kind]
    return (
        talk.one_of(fact.recalled, v=talk.facts[kind])
        if kind in talk.facts
        else talk.one_of(fact.missing)
    )


def tell_and_ask(talk: Conversation):
    """A fact and its question in one message."""
    sentence, _, step = statement(talk, draw(talk.rng))
    kind = step[1]
    talk.say(
        f"{sentence} {talk.one_of(FACTS[kind].asked)}", recalled(talk, kind), step, ("ask", kind)
    )


def confirm(talk: Conversation):
    """Is my name Ada? The value is the right one, another one, or one of another fact."""
    if not talk.facts:
        tell(talk)
    rng = talk.rng
    kind = rng.choice(list(talk.facts)) if rng.random() < 0.85 else draw(rng, talk.facts)
    probe = (
        talk.facts[kind] if kind in talk.facts and rng.random() < 0.5 else told_value(talk, kind)
    )
    answer = recalled(talk, kind)
    if kind in talk.facts:
        answer = f"{'Yes' if probe == talk.facts[kind] else 'No'}, {lower_first(answer)}"
    talk.say(
        asked(talk, talk.one_of(FACTS[kind].confirm, v=probe)), answer, ("confirm", kind, probe)
    )


def everything(talk: Conversation):
    """What do you know about me? At most the four latest facts and a pet."""
    answers = [
        talk.one_of(FACTS[kind].recalled, v=talk.facts[kind]) for kind in list(talk.facts)[-4:]
    ]
    answers += [
        PET["recalled"].format(k=kind, v=name) for kind, name in list(talk.pets.items())[-1:]
    ]
    talk.say(
        talk.one_of(EVERYTHING["asked"]),
        " ".join(answers) or EVERYTHING["nothing"],
        ("everything",),
    )


# --- pets ----------------------------------------------------------------------------------------------------------


def tell_pet(talk: Conversation):
    """The user has a pet; then, at times, at once a question that calls it `it`."""
    sentence, noted, step = _pet_statement(talk)
    talk.say(sentence, noted, step)
    if talk.rng.random() < 0.1:
        answer = PET["name_recalled"].format(k=step[1], v=step[2])
        talk.say(talk.one_of(PET["its_asked"]), answer, ("ask pet", step[1]))


def _pet_statement(talk: Conversation) -> tuple[str, str, tuple]:
    known = talk.pets and talk.rng.random() < 0.3
    kind = talk.rng.choice(list(talk.pets)) if known else animal(talk)
    while (name := talk.name()) == talk.pets.get(kind):
        pass
    sentence = talk.one_of(PET["changed" if kind in talk.pets else "told"], k=kind, v=name)
    keep_pet(talk, kind, name)
    return (
        upper_first(sentence),
        upper_first(talk.one_of(PET["noted"], k=kind, v=name)),
        ("pet", kind, name),
    )


def animal(talk: Conversation) -> str:
    """A kind of animal, one in five of them one that nobody has heard of."""
    known = talk.rng.random() < 0.8
    return (
        talk.rng.choice(words.ANIMALS)
        if known
        else talk.cased(words.splice(talk.rng, talk.held_out))
    )


def recall_pet(talk: Conversation):
    """The user asks for his pet by its kind, or for his only pet; one in four he does not have."""
    rng = talk.rng
    if not talk.pets and rng.random() < 0.5:
        tell_pet(talk)
    if not talk.pets or rng.random() < 0.35:
        kind = rng.choice([kind for kind in words.ANIMALS if kind not in talk.pets])
        if not talk.pets and rng.random() < 0.4:
            return talk.say(
                asked(talk, talk.one_of(PET["asked"])),
                talk.one_of(PET["missing"]),
                ("ask pet", None),
            )
        question = talk.one_of(PET["name_asked" if rng.random() < 0.7 else "have_asked"], k=kind)
        return talk.say(
            asked(talk, question), talk.one_of(PET["kind_missing"], k=kind), ("ask pet", kind)
        )
    kind = rng.choice(list(talk.pets))
    dice = rng.random()
    if dice < 0.15:
        return _confirm_pet(talk, kind)
    if dice < 0.25 and list(talk.pets.values()).count(talk.pets[kind]) == 1:
        name = talk.pets[kind]
        question = asked(talk, talk.one_of(PET["kind_asked"], v=name))
        return talk.say(question, upper_first(f"{name} is a {kind}."), ("ask animal", name))
    whole = len(talk.pets) == 1 and rng.random() < 0.35
    which = rng.choice(("asked", "have_asked")) if whole else "name_asked"
    answer = PET["recalled" if whole else "name_recalled"].format(k=kind, v=talk.pets[kind])
    talk.say(asked(talk, talk.one_of(PET[which], k=kind)), answer, ("ask pet", kind))


def _confirm_pet(talk: Conversation, kind: str):
    probe = talk.pets[kind] if talk.rng.random() < 0.5 else talk.name()
    answer = lower_first(PET["name_recalled"].format(k=kind, v=talk.pets[kind]))
    word = "Yes" if probe == talk.pets[kind] else "No"
    talk.say(
        talk.one_of(PET["confirm"], k=kind, v=probe),
        f"{word}, {answer}",
        ("confirm pet", kind, probe),
    )


# --- other people, and things --------------------------------------------------------------------------------------


PEOPLE = (1, 1, 2, 2, 3)  # in one message


def tell_owner(talk: Conversation):
    """One to three people have something: facts about somebody else."""
    told = [_owner_statement(talk) for _ in range(talk.rng.choice(PEOPLE))]
    noted = talk.one_of(OWNER["noted"], p=told[-1][1][1])
    talk.say(
        joined(talk, [sentence for sentence, _ in told]),
        upper_first(noted),
        *(step for _, step in told),
    )


def _owner_statement(talk: Conversation) -> tuple[str, tuple]:
    """Ada has a red lamp, or has now what was somebody else's. A thing belongs to one person, and a person has one."""
    person = new_name(talk, talk.owners)
    if talk.owners and talk.rng.random() < 0.15:
        colour, thing = talk.owners.pop(talk.rng.choice(list(talk.owners)))
        texts = BELONGING["moved"]
    else:
        colour = talk.rng.choice(words.COLOURS) if talk.rng.random() < 0.5 else ""
        texts, thing = (
            (OWNER if colour else BELONGING)["told"],
            new_thing(talk, [it for _, it in talk.owners.values()]),
        )
    talk.owners[person] = (colour, thing)
    return upper_first(talk.one_of(texts, p=person, c=colour, t=thing)), (
        "owner",
        person,
        colour,
        thing,
    )


def new_name(talk: Conversation, taken) -> str:
    """A name of nobody in `taken`."""
    while (name := talk.name()) in taken:
        pass
    return name


def new_thing(talk: Conversation, taken) -> str:
    """A thing that is not in `taken`, one in three of them one that nobody has heard of."""
    while True:
        known = talk.rng.random() < 0.65
        thing = (
            words.pick(talk.rng, words.NOUNS, talk.held_out)
            if known
            else words.splice(talk.rng, talk.held_out)
        )
        if thing not in taken:
            return thing


def recall_owner(talk: Conversation):
    """Who has it, what does he have, what colour is it? One in five was never told."""
    if not talk.owners:
        tell_owner(talk)
    if talk.rng.random() < 0.2:
        return _ask_missing_owner(talk)
    person = talk.rng.choice(list(talk.owners))
    colour, thing = talk.owners[person]
    coloured = f"{colour} {thing}".strip()
    which, answer = talk.rng.choice(
        (
            ("what", f"{person} has a {coloured}."),
            ("who", f"{person} has the {coloured}."),
            ("colour", f"The {thing} of {person} is {colour}."),
        )[: 3 if colour else 2]
    )
    texts = BELONGING["who_asked"] if which == "who" and not colour else OWNER[f"{which}_asked"]
    question = talk.one_of(texts, p=person, c=colour, t=thing)
    talk.say(asked(talk, question), upper_first(answer), ("ask owner", which, person))


def _ask_missing_owner(talk: Conversation):
    if talk.rng.random() < 0.5:
        thing = new_thing(talk, [it for _, it in talk.owners.values()])
        question, answer = (
            talk.one_of(BELONGING["who_asked"], t=thing),
            f"You have not told me who has the {thing}.",
        )
        return talk.say(asked(talk, question), answer, ("no owner", thing))
    person = new_name(talk, talk.owners)
    answer = f"You have not told me what {person} has."
    talk.say(
        asked(talk, talk.one_of(OWNER["what_asked"], p=person)), answer, ("owns nothing", person)
    )


def tell_home(talk: Conversation):
    """Where one or two other people live, or where one of them has moved."""
    told: list[tuple[str, tuple]] = []
    for _ in range(talk.rng.choice((1, 1, 2))):
        told.append(_home_statement(talk, told))
    _, person, city = told[-1][1]
    noted = talk.one_of(HOME["noted"], p=person, v=city)
    talk.say(
        joined(talk, [sentence for sentence, _ in told]),
        upper_first(noted),
        *(step for _, step in told),
    )


def _home_statement(talk: Conversation, told) -> tuple[str, tuple]:
    """Where somebody lives; as the first of a message it may be a move."""
    moves = bool(talk.homes) and not told and talk.rng.random() < 0.6
    person = talk.rng.choice(list(talk.homes)) if moves else new_name(talk, talk.homes)
    while (city := talk.cased(FACTS["city"].value(talk.rng, talk.held_out))) in talk.homes.values():
        pass
    talk.homes[person] = city
    sentence = talk.one_of(HOME["changed" if moves else "told"], p=person, v=city)
    return upper_first(sentence), ("home", person, city)


def recall_home(talk: Conversation):
    """Where does she live, who lives there? One in five was never told."""
    if not talk.homes:
        tell_home(talk)
    if talk.rng.random() < 0.2:
        person = new_name(talk, talk.homes)
        answer = f"You have not told me where {person} lives."
        return talk.say(
            asked(talk, talk.one_of(HOME["where_asked"], p=person)), answer, ("ask home", person)
        )
    person = talk.rng.choice(list(talk.homes))
    which = talk.rng.choice(("where_asked", "where_asked", "who_asked"))
    answer = upper_first(f"{person} lives in {talk.homes[person]}.")
    question = talk.one_of(HOME[which], p=person, v=talk.homes[person])
    talk.say(asked(talk, question), answer, ("ask home", person))


def tell_object(talk: Conversation):
    """A thing lies somewhere, or is put somewhere else."""
    rng = talk.rng
    known = talk.objects and rng.random() < 0.3
    thing = rng.choice(list(talk.objects)) if known else new_thing(talk, talk.objects)
    while (place := _place(talk)) == talk.objects.get(thing):
        pass
    sentence = talk.one_of(OBJECT["changed" if known else "told"], t=thing, p=place)
    talk.objects[thing] = place
    talk.say(
        sentence,
        upper_first(talk.one_of(OBJECT["noted"], t=thing, p=place)),
        ("object", thing, place),
    )


def _place(talk: Conversation) -> str:
    known = talk.rng.random() < 0.65
    return talk.rng.choice(words.PLACES) if known else words.splice(talk.rng, talk.held_out)


def recall_object(talk: Conversation):
    """Where is it? One in four he never mentioned."""
    if not talk.objects:
        tell_object(talk)
    if talk.rng.random() < 0.25:
        thing = new_thing(talk, talk.objects)
        answer = f"You have not told me where the {thing} is."
    else:
        thing = talk.rng.choice(list(talk.objects))
        answer = f"The {thing} is in the {talk.objects[thing]}."
    talk.say(asked(talk, talk.one_of(OBJECT["asked"], t=thing)), answer, ("ask object", thing))
