"""Exchanges of the second stage: facts in untidy messages, corrections in two words, several people, things and pets at
once, kinds of facts that resemble others (where one lives, was born, works), requests with words around them.
"""

from nanokv.school.training import about_user, lists, sums, words
from nanokv.school.training.about_user import asked, joined, new_name, recalled, told_value
from nanokv.school.training.conversation import Conversation, upper_first
from nanokv.school.training.facts import FACTS, HOME, LATE, PET, draw
from nanokv.school.training.phrases import phrases
from nanokv.school.training.small_talk import tale

_TEXTS = phrases("strangers")


# --- facts ---------------------------------------------------------------------------------------------------------


def tell_late(talk: Conversation):
    """Where the user was born, works, what he plays: beside facts that resemble it."""
    about_user.tell(talk, talk.rng.choice(list(LATE)))


def recall_late(talk: Conversation):
    """Half of them were told."""
    known = [kind for kind in talk.facts if kind in LATE]
    kind = (
        talk.rng.choice(known) if known and talk.rng.random() < 0.6 else talk.rng.choice(list(LATE))
    )
    about_user.recall(talk, kind)


def correct(talk: Conversation):
    """A fact, and in the next message what it should have been: "No wait, olive." """
    kind = draw(talk.rng, ("friends",))
    talk.say(*about_user.statement(talk, kind))
    old = talk.facts[kind]
    value = told_value(talk, kind)
    talk.facts[kind] = value
    told = upper_first(talk.one_of(_TEXTS["corrections"]["told"], v=value, w=old))
    talk.say(told, upper_first(talk.one_of(FACTS[kind].noted, v=value)), ("tell", kind, value))
    if talk.rng.random() < 0.6:
        about_user.recall(talk, kind)


def together(talk: Conversation):
    """I'm Ada and my brother is Leo. Who is asked for then may be either."""
    kind = talk.rng.choice(words.RELATIVES)
    name, other = told_value(talk, "name"), told_value(talk, kind)
    about_user.keep(talk, "name", name)
    about_user.keep(talk, kind, other)
    told = talk.one_of(_TEXTS["together"]["told"], n=name, r=kind, p=other)
    noted = talk.one_of(_TEXTS["together"]["noted"], n=name, p=other)
    talk.say(told, noted, ("tell", "name", name), ("tell", kind, other))
    if talk.rng.random() < 0.5:
        ask_name(talk) if talk.rng.random() < 0.5 else about_user.recall(talk, kind)


def form(talk: Conversation):
    """Name: Ada. Job: baker. Hobby: chess. Then one of them is asked for."""
    kinds = ("name", "job", "hobby")
    values = [told_value(talk, kind) for kind in kinds]
    for kind, value in zip(kinds, values, strict=True):
        about_user.keep(talk, kind, value)
    n, j, h = values
    told = talk.one_of(_TEXTS["form"]["told"], n=n, j=j, h=h)
    noted = talk.one_of(_TEXTS["form"]["noted"], n=n)
    talk.say(
        told, noted, *(("tell", kind, value) for kind, value in zip(kinds, values, strict=True))
    )
    if talk.rng.random() < 0.6:
        about_user.recall(talk, talk.rng.choice(kinds))


def titled(talk: Conversation):
    """I'm Dr. Ada. What stands before a name belongs to it."""
    kind = talk.rng.choice(("name", "name", "friend", "boss", "teacher", "neighbour"))
    value = talk.cased(f"{talk.rng.choice(words.TITLES)} {words.name(talk.rng, talk.held_out)}")
    about_user.keep(talk, kind, value)
    told, noted = (talk.one_of(texts, v=value) for texts in (FACTS[kind].told, FACTS[kind].noted))
    talk.say(upper_first(told), upper_first(noted), ("tell", kind, value))
    if talk.rng.random() < 0.6:
        about_user.recall(talk, kind)


def chat(talk: Conversation):
    """A remark between two questions: its words are not to be mistaken for a fact."""
    texts, thing = _TEXTS["chat"], about_user.new_thing(talk, ())
    talk.say(talk.one_of(texts["said"], t=thing), texts["answered"][0], ("talk",))


def ask_name(talk: Conversation):
    """Guess who I am!"""
    talk.say(
        asked(talk, talk.one_of(_TEXTS["who"]["asked"])), recalled(talk, "name"), ("ask", "name")
    )


def label(kind: str) -> str:
    """What a user calls a fact after "my"; nothing where it takes more words."""
    if kind in (*words.RELATIVES, "name", "job", "hobby", "age", "friend", "city", "language"):
        return kind
    return f"favourite {kind}" if FACTS[kind].recalled[0].startswith("Your favourite") else ""


def follow_up(talk: Conversation):
    """A question, and at once another in two words: "And my sister?" """
    about_user.recall(talk)
    known = [kind for kind in talk.facts if label(kind)]
    kind = (
        talk.rng.choice(known)
        if known and talk.rng.random() < 0.6
        else talk.rng.choice(words.RELATIVES)
    )
    talk.say(
        talk.one_of(_TEXTS["follow_up"]["fact"], x=label(kind)), recalled(talk, kind), ("ask", kind)
    )


# --- pets, people, things ------------------------------------------------------------------------------------------


def two_pets(talk: Conversation):
    """A dog called Miso and a cat called Ada; then, often, one of them is asked for by its kind."""
    first, second = words.distinct(talk.rng, 2, lambda: about_user.animal(talk))
    a, b = words.distinct(talk.rng, 2, talk.name)
    talk.pets |= {first: a, second: b}
    told = talk.one_of(_TEXTS["pets"]["told"], k=first, p=a, j=second, q=b)
    noted = talk.one_of(_TEXTS["pets"]["noted"], p=a, q=b)
    talk.say(upper_first(told), upper_first(noted), ("pet", first, a), ("pet", second, b))
    for kind in talk.rng.sample((first, second), talk.rng.choice((0, 1, 1, 2))):
        question = talk.one_of(_TEXTS["follow_up"]["pet"], k=kind)
        answer = PET["name_recalled"].format(k=kind, v=talk.pets[kind])
        talk.say(asked(talk, question), answer, ("ask pet", kind))


def relative_home(talk: Conversation):
    """Where a relative lives, now and then beside where the user lives; then one of the two is asked for."""
    kind, rng = talk.rng.choice(words.RELATIVES), talk.rng
    person = new_name(talk, talk.homes)
    city, own = words.distinct(rng, 2, lambda: talk.cased(FACTS["city"].value(rng, talk.held_out)))
    steps = [("tell", kind, person), ("home", person, city)]
    about_user.keep(talk, kind, person)
    talk.homes[person] = city
    both = rng.random() < 0.5
    if both:
        about_user.keep(talk, "city", own)
        steps.append(("tell", "city", own))
    told = talk.one_of(
        _TEXTS["relative_home"]["both" if both else "told"], r=kind, p=person, c=city, d=own
    )
    noted = talk.one_of(_TEXTS["relative_home"]["noted"], p=person, c=city)
    talk.say(upper_first(told), upper_first(noted), *steps)
    dice = rng.random()
    if dice < 0.3:
        ask_relative(talk, kind)
    elif dice < 0.5:
        question = talk.one_of(HOME["where_asked"], p=person)
        talk.say(
            asked(talk, question), upper_first(f"{person} lives in {city}."), ("ask home", person)
        )
    elif dice < 0.75:
        about_user.recall(talk, "city")


def ask_relative(talk: Conversation, kind: str | None = None):
    """Where does my sister live? Where she was told; else that she was not, or that her home was not."""
    known = [r for r in words.RELATIVES if talk.facts.get(r) in talk.homes]
    kind = kind or (
        talk.rng.choice(known)
        if known and talk.rng.random() < 0.7
        else talk.rng.choice(words.RELATIVES)
    )
    person = talk.facts.get(kind)
    if person is None:
        answer = recalled(talk, kind)
    elif person in talk.homes:
        answer = upper_first(f"{person} lives in {talk.homes[person]}.")
    else:
        answer = f"You have not told me where {person} lives."
    talk.say(
        asked(talk, talk.one_of(_TEXTS["relative_home"]["asked"], r=kind)),
        answer,
        ("ask relative", kind),
    )


def of_others(talk: Conversation):
    """Something about a person who was mentioned, that was not told."""
    people = [
        *talk.homes,
        *talk.owners,
        *(talk.facts[r] for r in words.RELATIVES if r in talk.facts),
    ]
    person = talk.rng.choice(people) if people else talk.name()
    texts = _TEXTS["of_others"]
    talk.say(
        talk.one_of(texts["asked"], p=person),
        talk.one_of(texts["answered"], p=person),
        ("of others", person),
    )


def tell_spots(talk: Conversation):
    """One or two things lie under, behind, on something; or one that was told lies elsewhere now."""
    rng = talk.rng
    told: list[tuple[str, tuple]] = []
    for _ in range(rng.choice((1, 1, 2))):
        moves = bool(talk.objects) and not told and rng.random() < 0.35
        thing = (
            rng.choice(list(talk.objects)) if moves else about_user.new_thing(talk, talk.objects)
        )
        place = f"{rng.choice(words.BESIDE)} the {_place(talk)}"
        way, _, where = place.partition(" the ")
        talk.objects[thing] = place
        sentence = talk.one_of(
            _TEXTS["spot"]["changed" if moves else "told"], t=thing, w=way, p=where
        )
        told.append((upper_first(sentence), ("spot", thing, place)))
    _, (_, thing, place) = told[-1]
    way, _, where = place.partition(" the ")
    noted = talk.one_of(_TEXTS["spot"]["noted"], t=thing, w=way, p=where)
    talk.say(joined(talk, [sentence for sentence, _ in told]), noted, *(step for _, step in told))


def _place(talk: Conversation) -> str:
    """A place, a piece of furniture, or two words of those."""
    rng, noun = talk.rng, words.pick(talk.rng, words.NOUNS, talk.held_out)
    kind = rng.random()
    if kind < 0.3:
        return words.splice(rng, talk.held_out)
    last = rng.choice(words.PLACES) if kind < 0.6 else words.pick(rng, words.NOUNS, talk.held_out)
    return f"{noun} {last}" if rng.random() < 0.3 else last


def recall_spot(talk: Conversation):
    """Where is it? One in five was never mentioned."""
    if not talk.objects:
        tell_spots(talk)
    if talk.rng.random() < 0.2:
        thing = about_user.new_thing(talk, talk.objects)
        answer = f"You have not told me where the {thing} is."
    else:
        thing = talk.rng.choice(list(talk.objects))
        answer = f"The {thing} is {talk.objects[thing]}."
    talk.say(
        asked(talk, talk.one_of(_TEXTS["spot"]["asked"], t=thing)), answer, ("ask spot", thing)
    )


# --- numbers, lists, stories ---------------------------------------------------------------------------------------


def count(talk: Conversation):
    """A count with words around it, and at times the wish for words or digits."""
    rng, dice = talk.rng, talk.rng.random()
    down, from_one, limit = rng.random() < 0.35, rng.random() < 0.4, 20 if dice < 0.7 else 99
    first = 1 if from_one else rng.randint(0, limit)
    numbers = list(range(first, first + rng.randint(2, 12)))
    numbers = [n for n in numbers if n <= 99] if len(numbers) > 1 else numbers
    numbers = numbers[::-1] if down else numbers
    if len(numbers) < 2:
        return count(talk)
    how = ("down_from" if from_one else "down") if down else ("up_to" if from_one else "up")
    ends = {"up_to": numbers[-1:], "down_from": numbers[:1]}.get(how, [numbers[0], numbers[-1]])
    typed = words.number if rng.random() < 0.4 else str
    said, wish = typed, ""
    if dice < 0.5:
        said, wish = (words.number, "in_words") if rng.random() < 0.7 else (str, "in_digits")
    request = rng.choice(sums.NUMBERS[how]).format(*map(typed, ends))
    for tail in filter(None, (wish, "count_tails" if rng.random() < 0.5 else "")):
        request = rng.choice(_TEXTS["numbers"][tail]).format(s=request.rstrip(".?!"))
    talk.say(request, ", ".join(map(said, numbers)) + ".", ("count", *map(said, numbers)))


def add(talk: Conversation):
    """A sum that is told."""
    rng, a, b = talk.rng, sums.summand(talk.rng), sums.summand(talk.rng)
    said = words.number if rng.random() < 0.15 else str
    request = rng.choice(_TEXTS["numbers"]["add"]).format(said(a), said(b))
    talk.say(request, f"{a} + {b} = {a + b}.", ("add", a, b))


def list_at_once(talk: Conversation):
    """Backwards, again, or one place of a list, with words on both sides of it."""
    items = lists.new_list(talk)
    how = talk.rng.choice(("reverse", "reverse", "repeat", "nth", "nth"))
    where, item = lists.position(talk.rng, items)
    answer, meaning = {
        "reverse": (lists.backwards(talk), ("backwards",)),
        "repeat": (lists.again(talk), ("again",)),
        "nth": (f"The {where} is {item}.", ("nth", where)),
    }[how]
    listed, place = lists.typed(talk.rng, items), lists.digits(talk.rng, where)
    talk.say(
        talk.rng.choice(_TEXTS["list"][how]).format(l=listed, o=place),
        answer,
        ("list", *items),
        meaning,
    )


def list_later(talk: Conversation):
    """A list, perhaps a change of it, then one or two short questions."""
    items, texts, rng = lists.new_list(talk), _TEXTS["list"], talk.rng
    request = rng.choice(texts["remember"]).format(l=lists.typed(rng, items))
    talk.say(request, f"Ok, I will remember {', '.join(items)}.", ("list", *items), ("remember",))
    if rng.random() < 0.5:
        _change_list(talk, texts)
    for how in rng.sample(("nth", "nth", "again", "backwards"), rng.choice((1, 2))):
        if how == "nth":
            i = rng.randrange(len(talk.list))
            where = words.ORDINALS[i]
            number = rng.choice((i + 1, words.number(i + 1)))
            question = rng.choice(texts["asked_nth"]).format(o=lists.digits(rng, where), n=number)
            talk.say(upper_first(question), f"The {where} is {talk.list[i]}.", ("nth", where))
        else:
            answer = lists.again(talk) if how == "again" else lists.backwards(talk)
            talk.say(rng.choice(texts[f"asked_{how}"]), answer, (how,))


def _change_list(talk: Conversation, texts) -> None:
    if (len(talk.list) > 2 and talk.rng.random() < 0.5) or len(talk.list) >= lists.LONGEST:
        item, how = talk.rng.choice(talk.list), "remove_item"
        talk.list = [other for other in talk.list if other != item]
    else:
        while (item := talk.word()) in talk.list:
            pass
        talk.list, how = [*talk.list, item], "add_item"
    talk.say(
        talk.rng.choice(texts[how]).format(item),
        f"Your list is now: {', '.join(talk.list)}.",
        (how, item),
    )


def story(talk: Conversation):
    """A story about two who have a kind and a name."""
    a, b = words.distinct(talk.rng, 2, talk.name)
    k, j = (
        talk.rng.choice((*words.ANIMALS, "girl", "boy", "fox", "hedgehog", "owl")),
        talk.rng.choice(words.ANIMALS),
    )
    request = talk.one_of(_TEXTS["stories"]["told"], a=a, b=b, k=k, j=j)
    talk.say(request, tale(talk.rng, a, b), ("story", a, b))


def goodbye(talk: Conversation):
    """Bye!"""
    texts = _TEXTS["goodbye"]
    talk.say(talk.rng.choice(texts["said"]), texts["answered"][0], ("talk",))
