"""Exchanges of the second stage, modelled on messages of people who had not seen the corpus.

Facts in untidy messages; corrections of two words; several people, things or pets in one message;
kinds of facts that resemble others (home, birthplace, workplace); requests with words around them.

Each docstring of an exchange gives an example: "message of the user" → "answer". Statements are
answered by hard.said_again, whatever answer the exchange itself has.
"""

from collections.abc import Sequence
from typing import Any

from nanokv.school.training import about_user, lists, sums, words
from nanokv.school.training.about_user import asked, joined, new_name, recalled, told_value
from nanokv.school.training.conversation import Conversation, Step, upper_first
from nanokv.school.training.facts import FACTS, HOME, LATE, PET, draw
from nanokv.school.training.phrases import phrases
from nanokv.school.training.small_talk import tale

_TEXTS = phrases("strangers")


def _known_or(talk: Conversation, known: list[str], share: float, others: Sequence[str]) -> str:
    """With probability `share`, and if there are any, one of `known`; else one of `others`."""
    if known and talk.rng.random() < share:
        return talk.rng.choice(known)
    return talk.rng.choice(others)


# --- facts ----------------------------------------------------------------------------------------


def tell_late(talk: Conversation) -> None:
    """The user mentions a fact that resembles others.

    "I was born in Lima." → "So you were born in Lima."
    """
    about_user.tell(talk, talk.rng.choice(list(LATE)))


def recall_late(talk: Conversation) -> None:
    """The user asks for such a fact; about half of the time it is unknown.

    "Where was I born?" → "You were born in Lima."
    """
    known = [kind for kind in talk.facts if kind in LATE]
    about_user.recall(talk, _known_or(talk, known, 0.6, list(LATE)))


def correct(talk: Conversation) -> None:
    """The user states a fact, and corrects its value in the next message.

    "No wait, olive." → "So your favourite colour is olive."
    """
    kind = draw(talk.rng, ("friends",))
    talk.say(*about_user.statement(talk, kind))
    old = talk.facts[kind]
    value = told_value(talk, kind)
    talk.facts[kind] = value
    message = upper_first(talk.one_of(_TEXTS["corrections"]["told"], v=value, w=old))
    answer = upper_first(talk.one_of(FACTS[kind].noted, v=value))
    talk.say(message, answer, ("tell", kind, value))
    if talk.rng.random() < 0.6:
        about_user.recall(talk, kind)


def together(talk: Conversation) -> None:
    """The user names themselves and a relative, and may ask for one of the two.

    "I'm Ada and my brother is Leo." → "So your name is Ada. Your brother is called Leo."
    """
    kind = talk.rng.choice(words.RELATIVES)
    name = told_value(talk, "name")
    other = told_value(talk, kind)
    about_user.keep(talk, "name", name)
    about_user.keep(talk, kind, other)
    message = talk.one_of(_TEXTS["together"]["told"], n=name, r=kind, p=other)
    answer = talk.one_of(_TEXTS["together"]["noted"], n=name, p=other)
    talk.say(message, answer, ("tell", "name", name), ("tell", kind, other))
    if talk.rng.random() < 0.5:
        if talk.rng.random() < 0.5:
            ask_name(talk)
        else:
            about_user.recall(talk, kind)


def form(talk: Conversation) -> None:
    """The user gives three facts as in a form, and may ask for one of them.

    "Name: Ada. Job: baker. Hobby: chess." → "So your name is Ada. You work as a baker. ..."
    """
    kinds = ("name", "job", "hobby")
    values = [told_value(talk, kind) for kind in kinds]
    steps = []
    for kind, value in zip(kinds, values, strict=True):
        about_user.keep(talk, kind, value)
        steps.append(("tell", kind, value))
    name, job, hobby = values
    message = talk.one_of(_TEXTS["form"]["told"], n=name, j=job, h=hobby)
    answer = talk.one_of(_TEXTS["form"]["noted"], n=name)
    talk.say(message, answer, *steps)
    if talk.rng.random() < 0.6:
        about_user.recall(talk, talk.rng.choice(kinds))


def titled(talk: Conversation) -> None:
    """The user mentions a person with a title. The title is part of the name.

    "I'm Dr. Ada." → "So your name is Dr. Ada."
    """
    kind = talk.rng.choice(("name", "name", "friend", "boss", "teacher", "neighbour"))
    value = talk.cased(f"{talk.rng.choice(words.TITLES)} {words.name(talk.rng, talk.held_out)}")
    about_user.keep(talk, kind, value)
    message = upper_first(talk.one_of(FACTS[kind].told, v=value))
    answer = upper_first(talk.one_of(FACTS[kind].noted, v=value))
    talk.say(message, answer, ("tell", kind, value))
    if talk.rng.random() < 0.6:
        about_user.recall(talk, kind)


def chat(talk: Conversation) -> None:
    """The user makes a remark that states no fact, although it may mention a thing.

    "I know, it's weird." → "I see. Tell me more."
    """
    texts = _TEXTS["chat"]
    thing = about_user.new_thing(talk, ())
    talk.say(talk.one_of(texts["said"], t=thing), texts["answered"][0], ("talk",))


def ask_name(talk: Conversation) -> None:
    """The user asks for their name in an unusual way.

    "So who am I?" → "Your name is Ada."
    """
    question = asked(talk, talk.one_of(_TEXTS["who"]["asked"]))
    talk.say(question, recalled(talk, "name"), ("ask", "name"))


def label(kind: str) -> str:
    """The words for a fact after "my": "sister", "favourite colour". Empty if there are none."""
    if kind in (*words.RELATIVES, "name", "job", "hobby", "age", "friend", "city", "language"):
        return kind
    if FACTS[kind].recalled[0].startswith("Your favourite"):
        return f"favourite {kind}"
    return ""


def follow_up(talk: Conversation) -> None:
    """The user asks for a fact, and then for another in two or three words.

    "And my sister?" → "Your sister is called Mia."
    """
    about_user.recall(talk)
    known = [kind for kind in talk.facts if label(kind)]
    kind = _known_or(talk, known, 0.6, words.RELATIVES)
    question = talk.one_of(_TEXTS["follow_up"]["fact"], x=label(kind))
    talk.say(question, recalled(talk, kind), ("ask", kind))


# --- pets, people, things -------------------------------------------------------------------------


def two_pets(talk: Conversation) -> None:
    """The user mentions two pets, and often asks for one or both by their kind.

    "I have a dog called Miso and a cat called Ada." → "So your dog is called Miso. ..."
    """
    first, second = words.distinct(talk.rng, 2, lambda: about_user.animal(talk))
    a, b = words.distinct(talk.rng, 2, talk.name)
    talk.pets |= {first: a, second: b}
    message = talk.one_of(_TEXTS["pets"]["told"], k=first, p=a, j=second, q=b)
    answer = talk.one_of(_TEXTS["pets"]["noted"], p=a, q=b)
    talk.say(upper_first(message), upper_first(answer), ("pet", first, a), ("pet", second, b))
    for kind in talk.rng.sample((first, second), talk.rng.choice((0, 1, 1, 2))):
        question = talk.one_of(_TEXTS["follow_up"]["pet"], k=kind)
        answer = PET["name_recalled"].format(k=kind, v=talk.pets[kind])
        talk.say(asked(talk, question), answer, ("ask pet", kind))


def relative_home(talk: Conversation) -> None:
    """The user says where a relative lives, half of the time also where they live themselves.

    "I live in Oslo, my sister Mia lives in Lima." → "So your sister is called Mia. ..."
    """
    kind = talk.rng.choice(words.RELATIVES)
    person = new_name(talk, talk.homes)
    city, own = words.distinct(talk.rng, 2, lambda: _city(talk))
    steps = [("tell", kind, person), ("home", person, city)]
    about_user.keep(talk, kind, person)
    talk.homes[person] = city
    texts = _TEXTS["relative_home"]["told"]
    if talk.rng.random() < 0.5:
        about_user.keep(talk, "city", own)
        steps.append(("tell", "city", own))
        texts = _TEXTS["relative_home"]["both"]
    message = talk.one_of(texts, r=kind, p=person, c=city, d=own)
    answer = talk.one_of(_TEXTS["relative_home"]["noted"], p=person, c=city)
    talk.say(upper_first(message), upper_first(answer), *steps)
    _ask_home(talk, kind, person)


def _city(talk: Conversation) -> str:
    """A city as this user types it."""
    return talk.cased(FACTS["city"].value(talk.rng, talk.held_out))


def _ask_home(talk: Conversation, kind: str, person: str) -> None:
    """In three cases of four, the user asks for one of the homes of relative_home."""
    dice = talk.rng.random()
    if dice < 0.3:
        ask_relative(talk, kind)
    elif dice < 0.5:
        question = asked(talk, talk.one_of(HOME["where_asked"], p=person))
        answer = upper_first(f"{person} lives in {talk.homes[person]}.")
        talk.say(question, answer, ("ask home", person))
    elif dice < 0.75:
        about_user.recall(talk, "city")


def ask_relative(talk: Conversation, kind: str | None = None) -> None:
    """The user asks where a relative lives. The relative or the home may be unknown.

    "Where does my sister live?" → "Mia lives in Lima."
    """
    if not kind:
        known = [each for each in words.RELATIVES if talk.facts.get(each) in talk.homes]
        kind = _known_or(talk, known, 0.7, words.RELATIVES)
    person = talk.facts.get(kind)
    if person is None:
        answer = recalled(talk, kind)
    elif person in talk.homes:
        answer = upper_first(f"{person} lives in {talk.homes[person]}.")
    else:
        answer = f"You have not told me where {person} lives."
    question = asked(talk, talk.one_of(_TEXTS["relative_home"]["asked"], r=kind))
    talk.say(question, answer, ("ask relative", kind))


def of_others(talk: Conversation) -> None:
    """The user asks for a fact of a known person that they have not mentioned.

    "How old is Leo?" → the answer that this is unknown
    """
    people = [*talk.homes, *talk.owners]
    people += [talk.facts[kind] for kind in words.RELATIVES if kind in talk.facts]
    if people:
        person = talk.rng.choice(people)
    else:
        person = talk.name()
    texts = _TEXTS["of_others"]
    question = talk.one_of(texts["asked"], p=person)
    talk.say(question, talk.one_of(texts["answered"], p=person), ("of others", person))


def tell_spots(talk: Conversation) -> None:
    """The user says where one or two things are: under, behind or on something.

    "The key is under the lamp." → "So the key is under the lamp."
    """
    sentences: list[str] = []
    steps: list[Step] = []
    for _ in range(talk.rng.choice((1, 1, 2))):
        sentence, step = _spot_statement(talk, first=not steps)
        sentences.append(upper_first(sentence))
        steps.append(step)
    _, thing, place = steps[-1]
    answer = talk.one_of(_TEXTS["spot"]["noted"], **_spot(thing, place))
    talk.say(joined(talk, sentences), answer, *steps)


def _spot_statement(talk: Conversation, first: bool) -> tuple[str, Step]:
    """Where a thing is. The first statement of a message may move a known thing."""
    if talk.objects and first and talk.rng.random() < 0.35:
        thing = talk.rng.choice(list(talk.objects))
        texts = _TEXTS["spot"]["changed"]
    else:
        thing = about_user.new_thing(talk, talk.objects)
        texts = _TEXTS["spot"]["told"]
    place = f"{talk.rng.choice(words.BESIDE)} the {_place(talk)}"
    talk.objects[thing] = place
    return talk.one_of(texts, **_spot(thing, place)), ("spot", thing, place)


def _spot(thing: str, place: str) -> dict[str, str]:
    """The values of a phrasing about a spot; "on top of the box" is a way and a place."""
    way, _, where = place.partition(" the ")
    return {"t": thing, "w": way, "p": where}


def _place(talk: Conversation) -> str:
    """The name of a place: a made-up word, a place, a noun, or two words of those."""
    rng = talk.rng
    noun = words.pick(rng, words.NOUNS, talk.held_out)
    kind = rng.random()
    if kind < 0.3:
        return words.splice(rng, talk.held_out)
    if kind < 0.6:
        last = rng.choice(words.PLACES)
    else:
        last = words.pick(rng, words.NOUNS, talk.held_out)
    if rng.random() < 0.3:
        return f"{noun} {last}"
    return last


def recall_spot(talk: Conversation) -> None:
    """The user asks where a thing is. One thing in five is unknown.

    "Where is the key?" → "The key is under the lamp."
    """
    if not talk.objects:
        tell_spots(talk)
    if talk.rng.random() < 0.2:
        thing = about_user.new_thing(talk, talk.objects)
        answer = f"You have not told me where the {thing} is."
    else:
        thing = talk.rng.choice(list(talk.objects))
        answer = f"The {thing} is {talk.objects[thing]}."
    question = asked(talk, talk.one_of(_TEXTS["spot"]["asked"], t=thing))
    talk.say(question, answer, ("ask spot", thing))


# --- numbers, lists, stories ----------------------------------------------------------------------


def count(talk: Conversation) -> None:
    """The user asks to count with words around the request, half of the time in words or digits.

    "Count to 4 in words please" → "one, two, three, four."
    """
    rng = talk.rng
    dice = rng.random()
    down = rng.random() < 0.35
    from_one = rng.random() < 0.4
    limit = 20
    if dice >= 0.7:
        limit = 99
    first = 1
    if not from_one:
        first = rng.randint(0, limit)
    numbers = [n for n in range(first, first + rng.randint(2, 12)) if n <= 99]
    if len(numbers) < 2:  # first is 99
        return count(talk)
    if down:
        numbers.reverse()
    how, ends = sums.request_for(numbers, down, from_one)

    typed = sums.speller(rng.random() < 0.4)
    said = typed
    tails = []
    if dice < 0.5:
        in_words = rng.random() < 0.7
        said = sums.speller(in_words)
        if in_words:
            tails.append("in_words")
        else:
            tails.append("in_digits")
    request = rng.choice(sums.NUMBERS[how]).format(*map(typed, ends))
    if rng.random() < 0.5:
        tails.append("count_tails")
    for tail in tails:
        request = rng.choice(_TEXTS["numbers"][tail]).format(s=request.rstrip(".?!"))
    counted = list(map(said, numbers))
    talk.say(request, ", ".join(counted) + ".", ("count", *counted))


def add(talk: Conversation) -> None:
    """The user asks for a sum as one says it.

    "27 and 48 makes?" → "27 + 48 = 75."
    """
    rng = talk.rng
    a = sums.summand(rng)
    b = sums.summand(rng)
    said = sums.speller(rng.random() < 0.15)
    request = rng.choice(_TEXTS["numbers"]["add"]).format(said(a), said(b))
    talk.say(request, f"{a} + {b} = {a + b}.", ("add", a, b))


def list_at_once(talk: Conversation) -> None:
    """The user gives a list with words on both sides: reversed, repeated, or one item of it.

    "Reverse this list for me: moon, chair" → "Reversed: chair, moon."
    """
    items = lists.new_list(talk)
    how = talk.rng.choice(("reverse", "reverse", "repeat", "nth", "nth"))
    where, item = lists.position(talk.rng, items)
    step: Step
    if how == "reverse":
        answer = lists.backwards(talk)
        step = ("backwards",)
    elif how == "repeat":
        answer = lists.again(talk)
        step = ("again",)
    else:
        answer = f"The {where} is {item}."
        step = ("nth", where)
    listed = lists.typed(talk.rng, items)
    place = lists.digits(talk.rng, where)
    request = talk.rng.choice(_TEXTS["list"][how]).format(l=listed, o=place)
    talk.say(request, answer, ("list", *items), step)


def list_later(talk: Conversation) -> None:
    """The user gives a list, may change it, and asks one or two short questions.

    "2nd word?" → "The second is chair."
    """
    items = lists.new_list(talk)
    texts = _TEXTS["list"]
    rng = talk.rng
    request = rng.choice(texts["remember"]).format(l=lists.typed(rng, items))
    talk.say(request, f"Ok, I will remember {', '.join(items)}.", ("list", *items), ("remember",))
    if rng.random() < 0.5:
        _change_list(talk, texts)
    for how in rng.sample(("nth", "nth", "again", "backwards"), rng.choice((1, 2))):
        if how == "nth":
            _ask_nth(talk, texts)
        elif how == "again":
            talk.say(rng.choice(texts["asked_again"]), lists.again(talk), (how,))
        else:
            talk.say(rng.choice(texts["asked_backwards"]), lists.backwards(talk), (how,))


def _ask_nth(talk: Conversation, texts: dict[str, Any]) -> None:
    """The user asks for one item by its place, in very few words."""
    rng = talk.rng
    i = rng.randrange(len(talk.list))
    where = words.ORDINALS[i]
    number = rng.choice((i + 1, words.number(i + 1)))
    question = rng.choice(texts["asked_nth"]).format(o=lists.digits(rng, where), n=number)
    talk.say(upper_first(question), f"The {where} is {talk.list[i]}.", ("nth", where))


def _change_list(talk: Conversation, texts: dict[str, Any]) -> None:
    """The user adds an item to the list or removes one, in the words of `texts`."""
    how, item = lists.add_or_remove(talk, 0.5)
    talk.say(talk.rng.choice(texts[how]).format(item), lists.now(talk), (how, item))


def story(talk: Conversation) -> None:
    """The user asks for a story about two characters with a kind and a name.

    "Tell me a story about Ada the owl and Leo the cat." → five sentences about Ada and Leo
    """
    a, b = words.distinct(talk.rng, 2, talk.name)
    first = talk.rng.choice((*words.ANIMALS, "girl", "boy", "fox", "hedgehog", "owl"))
    second = talk.rng.choice(words.ANIMALS)
    request = talk.one_of(_TEXTS["stories"]["told"], a=a, b=b, k=first, j=second)
    talk.say(request, tale(talk.rng, a, b), ("story", a, b))


def goodbye(talk: Conversation) -> None:
    """The user says goodbye.

    "Bye!" → "Goodbye! It was nice to talk with you."
    """
    texts = _TEXTS["goodbye"]
    talk.say(talk.rng.choice(texts["said"]), texts["answered"][0], ("talk",))
