"""A reader of training conversations that works every answer out again, from what each exchange means.

It has a memory and an arithmetic of its own and spells the answers itself. It also looks whether the user's words carry
the meaning: they hold one of the sentences of the TOML files, with the values in their places. Capitals, marks,
apostrophes and the usual slips do not matter. `check(messages, log)` raises WrongAnswer at the first thing that is off.
"""

import re
from collections.abc import Iterable
from functools import cache
from itertools import pairwise, product

from nanokv.school.training import words
from nanokv.school.training.cache_questions import QUESTIONS, YES_OR_NO
from nanokv.school.training.conversation import SLIPS
from nanokv.school.training.phrases import phrases

STRANGERS, REQUESTS, STORIES = phrases("strangers"), phrases("requests"), phrases("stories")
NEARBY = phrases("nearby")
MOVED, EDITS, INTRODUCTION = NEARBY["moved"], NEARBY["edits"], phrases("introductions")
FACTS = phrases("facts") | {
    kind: texts for kind, texts in (STRANGERS | NEARBY).items() if "recalled" in texts
}
PET, OWNER, BELONGING, HOME, OBJECT = (
    FACTS[name] for name in ("pet", "owner", "belonging", "home", "object")
)
LIST, REMEMBERED, NUMBERS = REQUESTS["list"], REQUESTS["remembered"], REQUESTS["numbers"]
RECALLED = {
    "name": "Your name is {v}.",
    "city": "You live in {v}.",
    "job": "You work as a {v}.",
    "hobby": "Your hobby is {v}.",
    "friend": "Your friend is called {v}.",
    "friends": "Your friends are {v}.",
    "age": "You are {v} years old.",
    "number": "The number is {v}.",
    "word": "The word is {v}.",
    "sibling": "Your {thing} is called {v}.",
    "favourite": "Your favourite {thing} is {v}.",
    "birthplace": "You were born in {v}.",
    "childhood": "You grew up in {v}.",
    "workplace": "You work in {v}.",
    "password": "The password is {v}.",
    "played": "You play the {v}.",
    "language": "You speak {v}.",
    "code": "Your {thing} is {v}.",
}
NOTES = {
    "colour": "{v} is a lovely colour.",
    "food": "Mmm, {v}.",
    "drink": "{v} is good.",
    "animal": "I like that: {v}.",
}
RESTATED = {
    "tell": "",
    "pet": "Your {a} is called {b}.",
    "owner": "{a} has a {b} {c}.",
    "home": "{a} lives in {b}.",
    "object": "The {a} is in the {b}.",
    "spot": "The {a} is {b}.",
}
# What else is said is answered, if anything is.
STATEMENTS = ("tell", "pet", "owner", "home", "object", "spot", "list")
SCENES = (  # what a sentence about two or three at once means, and where it stands
    ((("tell", "name", "{n}"), ("tell", "{r}", "{p}")), "together", "told"),
    ((("tell", "name", "{n}"), ("tell", "job", "{j}"), ("tell", "hobby", "{h}")), "form", "told"),
    ((("pet", "{k}", "{p}"), ("pet", "{j}", "{q}")), "pets", "told"),
    (
        (("tell", "{r}", "{p}"), ("home", "{p}", "{c}"), ("tell", "city", "{d}")),
        "relative_home",
        "both",
    ),
    ((("tell", "{r}", "{p}"), ("home", "{p}", "{c}")), "relative_home", "told"),
)
ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth".split()
SHORT_ORDINALS = "1st 2nd 3rd 4th 5th 6th 7th 8th 9th 10th".split()
STEPS = {2: "twos", 3: "threes", 5: "fives", 10: "tens"}
_ONES = "one two three four five six seven eight nine".split()
_TEENS = "ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen".split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
IN_WORDS = [
    "zero",
    *_ONES,
    *_TEENS,
    *(f"{ten}-{one}".strip("-") for ten in _TENS for one in ("", *_ONES)),
]
ACCENTS = {ord(accented): letter for letter, forms in words.ACCENTS.items() for accented in forms}
SAME = {slip: word for word, slip in SLIPS.items()}  # one spelling of each word
SAME |= {
    "an": "a",
    "color": "colour",
    "favorite": "favourite",
    "favorit": "favourite",
    "favrite": "favourite",
}


# What the corpus changes so.
NOW = {*MOVED, *"colour food drink animal sport game instrument sister brother".split()}


class WrongAnswer(AssertionError):
    """The answer, or the user's words, are not what the conversation means."""


@cache
def plain(text: str) -> str:
    """Words, numbers and operators with a space between, each word in one spelling; {placeholders} stay."""
    text = re.sub(
        r"\{\w*\}|[^\W\d_]+", lambda word: SAME.get(word[0], word[0]), text.casefold()
    ).replace("'", "")
    text = re.sub(r"(?<=[a-z])-(?=[a-z])", " ", text)  # twenty-one
    return " ".join(re.findall(r"(?:\{\w*\}|[^\W_])+|[-+*/^%=]", text))


def says(user: str, texts: Iterable[str], *items, **values) -> bool:
    """Does one of the sentences, filled in, stand in what the user typed?"""
    line, items = f" {plain(user)} ", [plain(str(item)) for item in items]
    values = {name: plain(str(value)) for name, value in values.items()}
    return any(f" {plain(text).format(*items, **values)} " in line for text in texts)


@cache
def shape(text: str) -> re.Pattern:
    """The sentence with anything in its places: numbers at a, b and c."""
    pieces = re.split(r"(\{\w*\})", plain(text))
    number = r"(?:\d+|[a-z ]*?hundred[a-z ]*?|(?:" + "|".join(map(plain, IN_WORDS)) + "))"
    holes = {"{a}": number, "{b}": number, "{c}": number} | (
        {"{c}": ".+"} if "{a}" not in pieces else {}
    )
    return re.compile(
        f" {''.join(holes.get(p, '.+') if p[:1] == '{' else re.escape(p) for p in pieces)} "
    )


def section(kind: str) -> str:
    """Where the sentences of a kind of fact stand."""
    if kind in words.CODES:
        return "code"
    if kind in FACTS:
        return kind
    return "sibling" if kind in words.RELATIVES else "favourite"


_SECTIONS = (*FACTS.values(), *STRANGERS.values())
VOCABULARY = {
    word for part in _SECTIONS for texts in part.values() for word in plain(" ".join(texts)).split()
}


def introduces(user: str, steps: list[tuple]) -> bool:
    """Is the message an introduction that tells the last of these facts, in their order, and all of it?"""
    for sentence in INTRODUCTION["told"]:
        places = re.findall(r"\{(\w+)\}", sentence)
        meant = steps[-len(places) :]
        if len(meant) == len(places) and all(map(stands_for, places, meant)):
            ways = product(
                *(clauses(place, step) for place, step in zip(places, meant, strict=True))
            )
            filled = {plain(sentence.format(**dict(zip(places, way, strict=True)))) for way in ways}
            if any(f" {plain(user)} ".endswith(f" {text} ") for text in filled):
                return True
    return False


def stands_for(place: str, step: tuple) -> bool:
    """May the step be told in this place of an introduction?"""
    name, kind, _ = step if len(step) == 3 else ("", "", "")
    return (
        name == "pet" if place == "pet" else name == "tell" and (kind == place or place == "other")
    )


def clauses(place: str, step: tuple) -> list[str]:
    """The ways to tell it there."""
    _, kind, value = step
    if place in ("pet", "name"):
        return [text.format(k=kind, v=value) for text in INTRODUCTION[place]]
    texts = FACTS[section(kind)]["told"][:3] if place == "other" else ["{v}"]
    return [text.rstrip(".").format(v=value, thing=kind) for text in texts]


class Reader:
    """What a careful listener knows after every exchange. Each `_step` says (is it in the words?, right answers)."""

    def __init__(self, says_again: bool = False):
        # Is what was told said again, in the words in which it is recalled?
        self.says_again = says_again
        self.facts: dict[str, str] = {}
        self.pets: dict[str, str] = {}
        self.owners: dict[str, tuple[str, str]] = {}  # person → (colour or nothing, thing)
        self.homes: dict[str, str] = {}
        self.objects: dict[str, str] = {}
        self.list: list[str] = []
        self.latest: list[str] = []  # kinds of fact that the message before told

    def exchange(self, user: str, answer: str, steps: list[tuple]):
        """Verify the user's words and the answer, and remember what was told."""
        if stray := self.strays(user, steps):
            raise WrongAnswer(f"{steps}: {user!r} also says {stray}")
        self.answer, self.steps, self.corrects = answer, steps, self.latest
        # The list stands in this very message.
        self.fresh = any(name == "list" for name, *_ in steps)
        told, asked, statements = [], [], 0
        for name, *values in steps:
            try:
                said, right = getattr(self, f"_{name.replace(' ', '_')}")(user, *values)
            except (AttributeError, LookupError, TypeError, ValueError) as error:
                raise WrongAnswer(
                    f"{steps}: there is no right answer to {(name, *values)}: {error!r}"
                ) from error
            if not said:
                raise WrongAnswer(f"{(name, *values)} is not what {user!r} says")
            if name in STATEMENTS:
                told, statements = [*told, *right], statements + 1
            else:
                asked.append(right)
        self.latest = [
            kind for name, kind, *_ in (step for step in steps if len(step) > 1) if name == "tell"
        ]
        thanks = ["Thank you, I will remember that."] if statements > 1 else []
        right = [" ".join(parts) for parts in product(*asked)] if asked else told + thanks
        if not asked and self.says_again and all(name in RESTATED for name, *_ in steps):
            right = [self.said_again(steps)]
        right = {
            re.sub(r"\b([Aa]) (?!uni|one\b|eu|use)(?=[aeiou])", r"\1n ", text) for text in right
        }
        if answer not in right | {text[0].upper() + text[1:] for text in right}:
            raise WrongAnswer(f"{steps}: {user!r} → {answer!r}, expected {sorted(right)}")

    def said_again(self, steps) -> str:
        """So your name is Ada. Your cat is called Leo."""
        sentences = []
        for name, *values in steps:
            if name == "tell":  # of two that change one another, both
                sentences.append(RECALLED[section(values[0])].format(v=values[1], thing=values[0]))
            else:
                named = dict(zip(("a", "b", "c"), values, strict=False))
                sentences.append(re.sub(" +", " ", RESTATED[name].format(**named)))
        first, *rest = sentences
        # A name stays as it was typed.
        first = re.sub("^(Your|You|The)(?= )", lambda word: word[0].lower(), first)
        return " ".join((f"So {first}", *(text[0].upper() + text[1:] for text in rest)))

    def strays(self, user: str, steps: list[tuple]) -> list[str]:
        """Values of other facts in a message that only tells something."""
        if any(name not in STATEMENTS for name, *_ in steps):
            return []
        meant = set(plain(" ".join(str(value) for step in steps for value in step)).split())
        known = {
            *self.facts.values(),
            *self.pets.values(),
            *self.owners,
            *self.homes,
            *self.homes.values(),
        }
        if len(steps) == 1 and steps[0][0] == "tell":
            known.discard(self.old(steps[0][1]))  # "olive, not red"
            if before_and_now(user, *steps[0][1:]):
                known.discard(self.facts.get(steps[0][1]))  # "I moved from Lima to Turin."
        strange = [value for value in known if not set(plain(value).split()) <= meant | VOCABULARY]
        return [value for value in strange if says(user, [value])]

    def old(self, kind) -> str | None:
        """The value that this message may correct: it was told in the one before."""
        return self.facts.get(kind) if kind in self.latest else None

    def scene(self, user) -> list[str]:
        """The answers to a message that tells of two or three at once, if it is one of those."""
        for place in range(len(self.steps)):
            for meanings, part, texts in SCENES:
                values = matched(meanings, self.steps[place : place + len(meanings)])
                if values and says(user, STRANGERS[part][texts], **values):
                    return [text.format(**values) for text in STRANGERS[part]["noted"]]
        return []

    # --- about the user ----------------------------------------------------------------------------------------------

    def _tell(self, user, kind, value):
        texts, old = FACTS[section(kind)], self.facts.get(kind)
        self.facts.pop(kind, None)
        self.facts[kind] = value
        notes = (text.replace("{note}", NOTES.get(kind, "Noted: {v}.")) for text in texts["noted"])
        noted = [text.format(v=value, thing=kind) for text in notes]
        if both := self.family(user, kind):  # of a longer message any part may be noted
            return True, [f"Say hello to {both}.", *(noted if len(self.steps) > 2 else [])]
        if scene := self.scene(user):
            return True, scene
        said = says(user, texts["told"] + texts["changed"], v=value, thing=kind)
        said = said or before_and_now(user, kind, value) or introduces(user, self.steps)
        if kind in words.CODES:
            said |= two_codes(user, kind, value)
        if kind in self.corrects:
            said |= says(user, STRANGERS["corrections"]["told"], v=value, w=old)
        return said, noted

    def family(self, user, kind) -> str | None:
        """Ada and Tom, if one sentence tells of this relative and of another one."""
        for one, other in pairwise(self.steps):
            if {one[0], other[0]} == {"tell"} and kind in (one[1], other[1]):
                (_, a, x), (_, b, y) = one, other
                if {a, b} <= set(words.RELATIVES) and says(
                    user, FACTS["family"]["told"], a=a, x=x, b=b, y=y
                ):
                    return f"{x} and {y}"
        return None

    def recalled(self, kind) -> list[str]:
        """The newest value, or that it was not told."""
        if kind in self.facts:
            return [RECALLED[section(kind)].format(v=self.facts[kind], thing=kind)]
        return [text.format(thing=kind) for text in FACTS[section(kind)]["missing"]]

    def _ask(self, user, kind):
        said = says(user, FACTS[section(kind)]["asked"], thing=kind)
        said |= kind == "name" and says(user, STRANGERS["who"]["asked"])
        label = f"favourite {kind}" if section(kind) == "favourite" else kind
        return said or says(user, STRANGERS["follow_up"]["fact"], x=label), self.recalled(kind)

    def _confirm(self, user, kind, probe):
        said, right = (
            says(user, FACTS[section(kind)]["confirm"], v=probe, thing=kind),
            self.recalled(kind),
        )
        return said, [
            agreed(probe == self.facts[kind], text) for text in right
        ] if kind in self.facts else right

    def _everything(self, user):
        right = [text for kind in list(self.facts)[-4:] for text in self.recalled(kind)]
        right += [
            f"You have a {kind} called {name}." for kind, name in list(self.pets.items())[-1:]
        ]
        right = right or ["Nothing yet. Tell me something about you."]
        return says(user, FACTS["everything"]["asked"]), [" ".join(right)]

    def _pet(self, user, kind, name):
        self.pets.pop(kind, None)
        self.pets[kind] = name
        if scene := self.scene(user):
            return True, scene
        said = says(user, PET["told"] + PET["changed"], k=kind, v=name) or introduces(
            user, self.steps
        )
        return said, [text.format(k=kind, v=name) for text in PET["noted"]]

    def _ask_pet(self, user, kind):
        texts = PET["name_asked"] + PET["have_asked"] + STRANGERS["follow_up"]["pet"]
        if [kind] == (list(self.pets) or [None]):
            texts = texts + PET["asked"]  # "my pet" is clear only if there is one
        if kind in list(self.pets)[-1:]:
            texts = texts + PET["its_asked"]
        right = [text.format(k=kind) for text in PET["kind_missing" if kind else "missing"]]
        if name := self.pets.get(kind):
            right = [f"Your {kind} is called {name}.", f"You have a {kind} called {name}."]
        return says(user, texts, k=kind), right

    def _confirm_pet(self, user, kind, probe):
        right = agreed(probe == self.pets[kind], f"Your {kind} is called {self.pets[kind]}.")
        return says(user, PET["confirm"], k=kind, v=probe), [right]

    def _ask_animal(self, user, name):
        # Of two Rexes none is "Rex".
        (kind,) = [kind for kind, called in self.pets.items() if called == name]
        return says(user, PET["kind_asked"], v=name), [f"{name} is a {kind}."]

    # --- others and things -------------------------------------------------------------------------------------------

    def whose(self, thing) -> list[str]:
        """Who has it: a thing belongs to one person."""
        return [person for person, (_, owned) in self.owners.items() if owned == thing]

    def _owner(self, user, person, colour, thing):
        """A thing that belonged to somebody else keeps its colour, and he has it no more."""
        if person in self.owners:
            raise ValueError("a second thing")
        texts = (OWNER if colour else BELONGING)["told"]
        for before in self.whose(thing):
            texts = BELONGING["moved"] if self.owners.pop(before)[0] == colour else []
        self.owners[person], named = (colour, thing), {"p": person, "c": colour, "t": thing}
        return says(user, texts, **named), [text.format(**named) for text in OWNER["noted"]]

    def _ask_owner(self, user, which, person):
        colour, thing = self.owners[person]
        coloured = f"{colour} {thing}".strip()
        right = {"what": f"{person} has a {coloured}.", "who": f"{person} has the {coloured}."}
        right |= {"colour": f"The {thing} of {person} is {colour}."} if colour else {}
        texts = BELONGING if which == "who" and not colour else OWNER
        return says(user, texts[f"{which}_asked"], p=person, c=colour, t=thing), [right[which]]

    def _no_owner(self, user, thing):
        right = [] if self.whose(thing) else [f"You have not told me who has the {thing}."]
        return says(user, BELONGING["who_asked"], t=thing), right

    def _owns_nothing(self, user, person):
        right = [] if person in self.owners else [f"You have not told me what {person} has."]
        return says(user, OWNER["what_asked"], p=person), right

    def _home(self, user, person, city):
        """Somebody can have moved whose old home was never told."""
        if self.homes.get(person) == city:
            raise ValueError("there already")
        texts = HOME["changed"] if person in self.homes else HOME["told"] + HOME["changed"]
        self.homes[person] = city
        if scene := self.scene(user):
            return True, scene
        return says(user, texts, p=person, v=city), [
            text.format(p=person, v=city) for text in HOME["noted"]
        ]

    def _ask_home(self, user, person):
        said, city = says(user, HOME["where_asked"], p=person), self.homes.get(person)
        if list(self.homes.values()).count(city) == 1:  # who lives there is clear
            said |= says(user, HOME["who_asked"], v=city)
        return said, [
            f"{person} lives in {city}." if city else f"You have not told me where {person} lives."
        ]

    def _ask_relative(self, user, kind):
        said, person = says(user, STRANGERS["relative_home"]["asked"], r=kind), self.facts.get(kind)
        if person is None:
            return said, self.recalled(kind)
        missing = f"You have not told me where {person} lives."
        return said, [
            f"{person} lives in {self.homes[person]}." if person in self.homes else missing
        ]

    def _of_others(self, user, person):
        texts = STRANGERS["of_others"]
        return says(user, texts["asked"], p=person), [
            text.format(p=person) for text in texts["answered"]
        ]

    def _spot(self, user, thing, place):
        """A thing is `under the bed`: what moves was somewhere before."""
        texts, (way, where) = STRANGERS["spot"], place.split(" the ")
        told, named = (
            "changed" if thing in self.objects else "told",
            {"t": thing, "w": way, "p": where},
        )
        self.objects[thing] = place
        return says(user, texts[told], **named), [text.format(**named) for text in texts["noted"]]

    def _ask_spot(self, user, thing):
        place = self.objects.get(thing)
        right = (
            f"The {thing} is {place}." if place else f"You have not told me where the {thing} is."
        )
        return says(user, STRANGERS["spot"]["asked"], t=thing), [right]

    def _object(self, user, thing, place):
        self.objects[thing] = place
        said = says(user, OBJECT["told"] + OBJECT["changed"], t=thing, p=place)
        return said, [text.format(t=thing, p=place) for text in OBJECT["noted"]]

    def _ask_object(self, user, thing):
        place = self.objects.get(thing)
        right = (
            f"The {thing} is in the {place}."
            if place
            else f"You have not told me where the {thing} is."
        )
        return says(user, OBJECT["asked"], t=thing), [right]

    # --- lists -------------------------------------------------------------------------------------------------------

    def _list(self, user, *items):
        self.list = list(items)
        return self.listed(user, ["{}"]), []

    def listed(self, user, texts, **place):
        """The items in their order, and maybe an `and` before the last."""
        forms = (" ".join(self.list), " ".join([*self.list[:-1], "and", self.list[-1]]))
        return any(says(user, texts, form, l=form, **place) for form in forms)

    def asked(self, user, fresh: str, remembered: str, **place):
        """A request with its list in it, or one for the list of an earlier turn."""
        strange = STRANGERS["list"]
        if self.fresh:
            return self.listed(user, LIST[fresh] + strange.get(fresh, []), **place)
        return says(user, REMEMBERED[remembered] + strange.get(f"asked_{remembered}", []), **place)

    def _again(self, user):
        said = ", ".join(self.list) + "."
        return self.asked(user, "repeat", "again"), [said, f"You said: {said}"]

    def _backwards(self, user):
        said = ", ".join(reversed(self.list)) + "."
        return self.asked(user, "reverse", "backwards"), [said, f"Reversed: {said}"]

    def _nth(self, user, where):
        i = len(self.list) - 1 if where == "last" else ORDINALS.index(where)
        spelled = ["last"] if where == "last" else [where, SHORT_ORDINALS[i]]
        numbers = (i + 1, IN_WORDS[i + 1])
        said = any(self.asked(user, "nth", "nth", o=o, n=n) for o in spelled for n in numbers)
        return said, [f"The {where} is {self.list[i]}."]

    def _length(self, user):
        count = len(self.list)
        right = "There is one." if count == 1 else f"There are {IN_WORDS[count]}."
        return self.asked(user, "length", "length"), [right]

    def _remember(self, user):
        right = [f"Ok, I will remember {', '.join(self.list)}.", "Ok, I will remember the list."]
        right += [f"I will remember these {IN_WORDS[len(self.list)]} words."]
        return self.listed(user, LIST["remember"] + STRANGERS["list"]["remember"]), right

    def _no_list(self, user):
        return not self.list and says(user, REMEMBERED["unknown"]), [
            "You have not given me a list yet."
        ]

    def _add_item(self, user, item):
        self.list = [*self.list, item]
        said = says(user, LIST["add_item"] + STRANGERS["list"]["add_item"], item) or says(
            user, EDITS["append"], v=item
        )
        return said, [f"Your list is now: {', '.join(self.list)}."]

    def _remove_item(self, user, item):
        self.list.remove(item)
        said = says(user, LIST["remove_item"] + STRANGERS["list"]["remove_item"], item)
        said |= says(user, EDITS["remove_word"], w=item)
        return said, [f"Your list is now: {', '.join(self.list)}."]

    def _put_first(self, user, item):
        self.list = [item, *self.list]
        return says(user, EDITS["put_first"], v=item), [
            f"Your list is now: {', '.join(self.list)}."
        ]

    def _remove_place(self, user, where):
        i = len(self.list) - 1 if where == "last" else ORDINALS.index(where)
        spelled = ["last"] if where == "last" else [where, SHORT_ORDINALS[i]]
        del self.list[i]
        said = any(says(user, EDITS["remove_place"], o=o) for o in spelled)
        return said, [f"Your list is now: {', '.join(self.list)}."]

    def _replace_item(self, user, old, new):
        self.list[self.list.index(old)] = new
        return says(user, EDITS["replace_item"], w=old, v=new), [
            f"Your list is now: {', '.join(self.list)}."
        ]

    def _member(self, user, word):
        right = (
            f"Yes, {word} is on the list."
            if word in self.list
            else f"No, {word} is not on the list."
        )
        return says(user, REMEMBERED["member"], word), [right]

    def _next(self, user, word):
        right = f"After {word} comes {self.list[self.list.index(word) + 1]}."
        return says(user, REMEMBERED["next"], word), [right]

    def _before(self, user, this):
        if isinstance(this, int):
            return says(user, NUMBERS["previous_number"], this), [
                f"Before {this} comes {this - 1}."
            ]
        after, before = dict(zip(self.list[1:], self.list, strict=False)), REMEMBERED["before"]
        return says(user, before, this), [f"Before {this} comes {after[this]}."]

    # --- numbers -----------------------------------------------------------------------------------------------------

    def _after(self, user, number):
        return says(user, NUMBERS["next_number"], number), [f"After {number} comes {number + 1}."]

    def _count(self, user, *numbers):
        values = [IN_WORDS.index(n) if n in IN_WORDS else int(n) for n in numbers]
        first, last = values[0], values[-1]
        if values != (list(range(first, last + 1)) or list(range(first, last - 1, -1))):
            raise ValueError("not one after the other")
        texts = [("up" if first < last else "down", first, last)] * (first != last)
        texts += [("up_to", last)] * (first == 1) + [("down_from", first)] * (last == 1)
        digits, spelled = (
            any(says(user, NUMBERS[how], *map(form, ends)) for how, *ends in texts)
            or says(user, NEARBY["counting"]["either"], a=form(first), b=form(last))
            for form in (str, in_words)
        )
        wished = [form for form in ("in_words", "in_digits") if says(user, wishes(form))]
        as_words = wished == ["in_words"] if wished else not digits
        return (digits or spelled) and as_words == (numbers[0] in IN_WORDS), [
            ", ".join(numbers) + "."
        ]

    def _steps(self, user, *numbers):
        values = list(map(int, numbers))
        (step,) = {after - before for before, after in pairwise(values)}
        named = {"a": values[0], "b": values[-1], "n": step}
        said = any(
            says(user, NEARBY["counting"]["steps"], s=s, **named) for s in (STEPS[step], f"{step}s")
        )
        if values[0] == step:
            said |= any(
                says(user, NEARBY["counting"]["steps_to"], s=s, **named)
                for s in (STEPS[step], f"{step}s")
            )
        return said, [", ".join(numbers) + "."]

    def _add(self, user, a, b):
        texts = NUMBERS["add"] + STRANGERS["numbers"]["add"]
        said = says(user, texts, a, b) or says(user, texts, IN_WORDS[a], IN_WORDS[b])
        return said, [f"{a} + {b} = {a + b}."]

    # --- what needs no memory ----------------------------------------------------------------------------------------

    def _refuse(self, user, what):
        asked = list(STORIES[what]["asked"])
        if what == "arithmetic":
            asked += [
                *STORIES["arithmetic"]["big"],
                *(text.replace("{}", "{a}") for text in NUMBERS["add"]),
            ]
        return any(shape(text).search(f" {plain(user)} ") for text in asked), STORIES[what][
            "answered"
        ]

    def _cache(self, user, answer):
        """The longest trained phrasing that stands in the line decides which answer is right."""
        line = f" {plain(user)} "
        known = QUESTIONS + YES_OR_NO
        said = [
            (len(p), right) for right, asked in known for p in asked[:-1] if f" {plain(p)} " in line
        ]
        return bool(said), [answer] if said and max(said)[1] == answer else []

    def _greet(self, user):
        name, greetings = self.facts.get("name"), STORIES["greetings"]
        right = [text.format(v=name) for text in greetings["by_name" if name else "answered"]]
        return says(user, greetings["said"]), right

    def _talk(self, user):
        known = (*STORIES["talk"], STRANGERS["goodbye"], STRANGERS["chat"])
        asked = [talk for talk in known if talks(user, talk["said"])]
        return bool(asked), [text for talk in asked for text in talk["answered"]]

    def _story(self, user, a, b):
        """Both characters are in it, and they are two; a stranger is "a fox" at first, later "the fox"."""
        told = a != b and says(self.answer, [a]) and says(self.answer, [b])
        told = told and 5 <= len(re.findall(r"[.!]", self.answer)) <= 12
        requests = [text for texts in STORIES["requests"].values() for text in texts]
        strange = (text.format(a=a, b=b, k="{k}", j="{j}") for text in STRANGERS["stories"]["told"])
        said = says(user, requests, a=a, b=b) or talks(user, strange)
        return said, [self.answer] if told else []


def talks(user: str, texts: Iterable[str]) -> bool:
    """Does one of the sentences stand in it, with any word as its {t}?"""
    return any(shape(text).search(f" {plain(user)} ") for text in texts)


def before_and_now(user: str, kind: str, value: str) -> bool:
    """Does it name what the fact was and what it is? What it was need not have been told."""
    texts = MOVED.get(kind) or MOVED["sibling" if kind in words.RELATIVES else "favourite"]
    if kind == "city" and says(user, NEARBY["settling"]["told"], v=value):
        return True
    named = (text.replace("{v}", value).replace("{x}", kind) for text in texts)
    return kind in NOW and talks(user, (text.replace("{w}", "{t}") for text in named))


def two_codes(user: str, kind: str, value: str) -> bool:
    """Is it one of the two in the sentence, and is the value its own?"""
    for named, valued in (("{a}", "{x}"), ("{b}", "{y}")):
        texts = (
            text.replace(named, kind).replace(valued, value) for text in NEARBY["codes"]["told"]
        )
        if talks(user, (re.sub(r"\{\w\}", "{t}", text) for text in texts)):
            return True
    return False


def matched(meanings, steps) -> dict[str, str] | None:
    """What stands for the letters of the meanings, if the steps are those; a letter is the same everywhere."""
    values: dict[str, str] = {}
    for meaning, step in zip(meanings, steps, strict=False):
        for part, value in zip(meaning, step, strict=False):
            if value != (values.setdefault(part[1], value) if part[0] == "{" else part):
                return None
    return values if len(meanings) == len(steps) else None


def in_words(number: int) -> str:
    """Only numbers up to 99 have words here."""
    return IN_WORDS[number] if number < len(IN_WORDS) else str(number)


def wishes(form: str) -> list[str]:
    """How a user asks for words or for digits."""
    return [text.replace("{s}", "") for text in STRANGERS["numbers"][form]]


def agreed(yes: bool, sentence: str) -> str:
    """Yes, your name is Ada."""
    return f"{'Yes' if yes else 'No'}, {sentence[0].lower()}{sentence[1:]}"


def kind_of(steps: list[tuple]) -> str:
    """What the exchange is: its last step, and whether the list came with it."""
    return (
        f"list {steps[-1][0]}"
        if steps[-1][0] != "list" and "list" in {step[0] for step in steps}
        else steps[-1][0]
    )


def check(
    messages: list[dict], log: list[list[tuple]], name="the conversation", says_again=False
) -> list[str]:
    """Read one conversation; the kind of every exchange."""
    reader, said = Reader(says_again), messages[messages[0]["role"] == "system" :]
    for i, (user, assistant, steps) in enumerate(zip(said[::2], said[1::2], log, strict=True)):
        try:
            reader.exchange(user["content"], assistant["content"], steps)
        except WrongAnswer as error:
            raise WrongAnswer(f"{name}, exchange {i}: {error}") from error
    return [kind_of(steps) for steps in log]
