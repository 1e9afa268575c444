"""A reader of training conversations that works every answer out again, from the text of the conversation alone.

It knows English sentences, not the generator: its own patterns say what a user told and asked, and its own arithmetic
what the answer must be. `check(messages)` returns the kind of every exchange, or raises WrongAnswer.
"""

import re
from collections.abc import Callable

from nanokv.training import stories, words
from nanokv.training.cache_questions import QUESTIONS

ORDINALS = "first second third fourth fifth sixth seventh eighth".split()
SHORT_ORDINALS = "1st 2nd 3rd 4th 5th 6th 7th 8th".split()
NUMBERS = "zero one two three four five six seven eight nine ten".split()
ORD = rf"({'|'.join((*ORDINALS, *SHORT_ORDINALS, 'last'))})"
ANIMAL = rf"({'|'.join(words.ANIMALS)})"
STARTS = r"My|I|I'm|Call|Please|Remember|The|You|People|This|In|Hi|Hello|Hey"  # they begin a sentence, no second name
FULL_NAME = rf"([A-Za-z]+(?: (?!(?:{STARTS})\b)[A-Z][a-z]+\b(?! is my))?)"
NAME, WORD, NUMBER = r"([A-Za-z]+)", r"([A-Za-z]+)", r"(\d+)"
TOLD = [  # (kind, what the user says); a favourite's kind is the thing itself
    ("pet", rf"I (?:have|got) a {ANIMAL}(?: called|\. Its name is| named| and called it) {NAME}"),
    ("pet", rf"My {ANIMAL}(?: is called|'s name is) {NAME}"),
    ("pet", rf"My pet is a {ANIMAL} called {NAME}"),
    ("friend", rf"My best friend is (?:called )?{NAME}"),
    ("friend", rf"(?:My friend's name is|I have a friend called|My friend is called) {NAME}"),
    ("sister", rf"(?:My sister is called|My sister's name is|I have a sister called|I have a sister,) {NAME}"),
    ("brother", rf"(?:My brother is called|My brother's name is|I have a brother called|I have a brother,) {NAME}"),
    ("favourite", rf"My favou?rite (\w+) is {WORD}"),
    ("favourite", rf"The (\w+) I like most is {WORD}"),
    ("favourite reversed", rf"I like {WORD} best of every (\w+)"),
    ("favourite reversed", rf"(?!What ){WORD} is my favou?rite (\w+)"),
    ("hobby", rf"(?:My hobby is|I love|I enjoy|In my free time I like|I spend my weekends with) {WORD}"),
    ("city", rf"(?:I live in|My home is in|My city is|I moved to|My home town is|I am from|I come from) {WORD}"),
    ("age", rf"(?:I am|I'm) {NUMBER} years old"),
    ("age", rf"(?:My age is|I am) {NUMBER}"),
    ("number", rf"(?:My lucky number is|Remember the number|The number is|My number is) {NUMBER}"),
    ("number", rf"Please remember this number: {NUMBER}"),
    ("word", rf"(?:The secret word is|Remember the word|My code word is|The password is|The word is) {WORD}"),
    ("word", rf"Please remember this word: {WORD}"),
    ("job", rf"(?:I work as a|I am a|I'm a|My job is) {WORD}(?: by trade)?"),
    ("name", rf"(?:My name is|My name's|I am|I'm|Call me|You can call me|People call me|This is) {FULL_NAME}"),
    ("name", rf"Please call me {FULL_NAME}"),
    ("name", rf"{FULL_NAME} here"),
]
TOLD = [(kind, re.compile(pattern)) for kind, pattern in TOLD]
BETWEEN = re.compile(
    r"\s*(?:No, wait\. |Actually, |I made a mistake: |Sorry, that was wrong\. |Things changed\. |Now |and "
    r"|Hi[,!] |Hello, |Hey, |[.!]\s*)",
)
ASKED = [
    ("name", r"\bmy name\b|who am i\b|(?:what|how) am i called"),
    ("city", r"where do i live|which city|my city|city am i from|where am i from|where i live"),
    ("job", r"my job|i work as|for a living|my work\b"),
    ("hobby", r"my hobby|my free time|what do i enjoy"),
    ("friend", r"my (?:best )?friend"),
    ("sister", r"my sister"),
    ("brother", r"my brother"),
    ("age", r"how old am i|my age"),
    ("number", r"\b(?:my|the|which|lucky) number"),
    ("word", r"secret word|the word\b|which word did|code word|password"),
]
RECALLED = {
    "name": "Your name is {}.", "city": "You live in {}.", "job": "You work as a {}.", "hobby": "Your hobby is {}.",
    "friend": "Your friend is called {}.", "sister": "Your sister is called {}.", "age": "You are {} years old.",
    "brother": "Your brother is called {}.", "number": "The number is {}.", "word": "The word is {}.",
}  # fmt: skip
FRAMES = {  # what may stand before a list, depending on the stage of the training
    "repeat": "You said: ", "list again": "You said: ", "reverse": "Reversed: ", "list backwards": "Reversed: ",
}  # fmt: skip
NOTED = (  # answers to a statement that need not say the value
    "I will remember that.", "Thank you, I will remember that.", "That sounds like good work.",
    "I will remember your hobby.",
)  # fmt: skip
LEAD_IN = re.compile(
    r"^(?:Hey|So|And|Now|Ok|Please tell me|Quick question|By the way|Wait|Hmm|Let me test you)[,:]? (?=\w)"
)


class WrongAnswer(AssertionError):
    """The conversation gives one answer, the text says another."""


def items_of(text: str) -> list[str]:
    """`a, b and c`, `a b c`, `a, b.` → the words."""
    return [word for word in re.findall(r"[A-Za-z]+", text) if word != "and"]


class Reader:
    """What a careful listener knows after every line."""

    def __init__(self):
        self.facts: dict[str, str] = {}
        self.pets: dict[str, str] = {}
        self.owners: dict[str, tuple[str, str]] = {}
        self.objects: dict[str, str] = {}
        self.list: list[str] = []
        self.drawn: set[str] = set()  # names, secret words, list items, other people's things: what must be new

    def exchange(self, user: str, answer: str) -> str:
        """The kind of this exchange, once its answer is verified."""
        for reader in (
            self.addition, self.counting, self.own_list, self.new_list, self.third_person, self.stories,
            self.small_talk, self.cache, self.statement, self.pet_question, self.about_me, self.question, self.unknown,
        ):  # fmt: skip
            kind = reader(user, answer)
            if kind:
                self._collect()
                return kind
        raise WrongAnswer(f"nobody understands {user!r} → {answer!r}")

    def _collect(self):
        own = (self.facts.get(kind, "") for kind in ("name", "friend", "sister", "brother", "word"))
        things = (thing for _, thing in self.owners.values())
        for value in (*own, *self.pets.values(), *self.owners, *things, *self.objects, *self.list):
            self.drawn.update(value.split())

    def expect(self, kind: str, user: str, answer: str, *right: str) -> str:
        """One of the right answers, capitals aside (a value may begin a sentence)."""
        if kind in FRAMES:
            answer = answer.removeprefix(FRAMES[kind])
        if answer.casefold() not in {text.casefold() for text in right}:
            raise WrongAnswer(f"{kind}: {user!r} → {answer!r}, not {right}")
        return kind

    # --- numbers and lists --------------------------------------------------------------------------------------

    def addition(self, user, answer):
        found = re.search(r"(\d+) ?(?:\+|plus|and) ?(\d+)", user)
        if not found or "ount" in user or "umbers" in user:
            return None
        a, b = map(int, found.groups())
        return self.expect("add", user, answer, f"{a} + {b} = {a + b}.")

    def counting(self, user, answer):
        found = re.search(r"(?:[Cc]ount|numbers)\b(.*?)(\d+) to (\d+)", user)
        if not found:
            return None
        a, b = int(found[2]), int(found[3])
        down = "down" in found[1] or "backwards" in found[1]
        if down != (a > b):
            raise WrongAnswer(f"count: {user!r} asks for the other direction")
        numbers = range(a, b - 1, -1) if down else range(a, b + 1)
        return self.expect("count", user, answer, ", ".join(map(str, numbers)) + ".")

    def own_list(self, user, answer):
        """Questions about `my list`, the latest that the user gave."""
        ask, items = LEAD_IN.sub("", user), self.list
        known = bool(items)
        forms = [
            ("again", r"(?:Repeat (?:my|the) list|Say the list again|What (?:is on my|was the) list"
                      r"|Which words did I tell you|What do I need to buy)\W*$", lambda m: ", ".join(items) + "."),
            ("backwards", r"(?:Say my list backwards|Reverse (?:my|the) list|Say the list in reverse order"
                          r"|Now backwards|backwards)\W*$", lambda m: ", ".join(items[::-1]) + "."),
            ("length", r"(?:How many (?:words|items) are on|How long is) (?:my|the) list\W*$",
             lambda m: f"There are {NUMBERS[len(items)]}."),
            ("member", rf"(?:Is {WORD} on (?:my|the) list|Does my list have {WORD})\W*$", self._member),
            ("next", rf"(?:What comes after|Which word comes after|What is after) {WORD}(?: on my list)?\W*$",
             lambda m: f"After {m[1]} comes {items[items.index(m[1]) + 1]}."),
            ("which", rf"(?:Which|What) (?:was|is) the {ORD}(?: word)?(?: on (?:my|the) list)?\W*$", self._position),
        ]  # fmt: skip
        for kind, pattern, right in forms:
            if found := re.match(pattern, ask, re.IGNORECASE):
                missing = "You have not given me a list yet."
                return self.expect(f"list {kind}", user, answer, right(found) if known else missing)
        return None

    def _member(self, found):
        word = found[1] or found[2]
        return f"Yes, {word} is on the list." if word in self.list else f"No, {word} is not on the list."

    def _position(self, found):
        return self._nth(found[1], self.list)

    @staticmethod
    def _nth(ordinal: str, items: list[str]) -> str:
        if ordinal == "last":
            return f"The last is {items[-1]}."
        i = (ORDINALS if ordinal in ORDINALS else SHORT_ORDINALS).index(ordinal)
        return f"The {ORDINALS[i]} is {items[i]}."

    def new_list(self, user, answer):
        """A list in this very line: repeat, reverse, which is the third, remember."""
        which = (
            rf"(?:Which is the|Which word is the|What is the|Tell me the) {ORD}(?: word| item)?"
            r"(?::| of this list:| of) (.+)"
        )
        after = rf"(?:Here is a list: |List: )?(.+?)[.:] (?:[Ww]hich|[Ww]hat) is the {ORD}(?: word)?\W*$"
        if (found := re.match(which, user)) or (found := re.match(after, user)):
            first, second = found.groups()
            ordinal, text = (first, second) if re.fullmatch(ORD, first) else (second, first)
            self.list = items_of(text)
            return self.expect("nth", user, answer, self._nth(ordinal, self.list))
        if found := re.match(
            r"(?:Remember this list:|Remember these words:|My list is|Please remember:|Here is my list:|I need to buy"
            r"|My shopping list:) (.+)", user,
        ):  # fmt: skip
            self.list = items_of(found[1])
            number = NUMBERS[len(self.list)]
            short = "Ok, I will remember the list.", f"I will remember these {number} words."
            return self.expect("remember", user, answer, f"Ok, I will remember {', '.join(self.list)}.", *short)
        return self._say_again(user, answer)

    def _say_again(self, user, answer):
        backwards = re.match(
            r"(?:(?:Can you )?[Rr]everse(?: this list| these words| the words)?|Say these words backwards|Say backwards"
            r"|Say in reverse order|Turn this list around):? (.+)", user,
        )  # fmt: skip
        forwards = re.match(
            r"(?:(?:Can you |Please )?[Rr]epeat(?: these words| after me| this list| the words)?|Say(?: these words)?)"
            r":? (?!my name)(.+)", user,
        )  # fmt: skip
        found = backwards or forwards
        if not found:
            return None
        self.list = items_of(found[1])
        said = self.list[::-1] if backwards else self.list
        return self.expect("reverse" if backwards else "repeat", user, answer, ", ".join(said) + ".")

    # --- others and things --------------------------------------------------------------------------------------

    def third_person(self, user, answer):
        ask = user.rstrip(".?")
        if found := re.fullmatch(r"(\w+) (?:has|bought|owns) an? (\w+) (\w+)", ask):
            self.owners[found[1]] = found[2], found[3]
            right = f"Good for {found[1]}.", re.sub(" (bought|owns) ", " has ", f"So {ask}.")
            return self.expect("owner told", user, answer, *right, *NOTED)
        if found := re.fullmatch(r"(?:The|I put the|My) (\w+)(?: is)? in the (\w+)", ask):
            self.objects[found[1]] = found[2]
            right = f"Ok, the {found[1]} is in the {found[2]}.", f"The {found[2]}, noted."
            return self.expect("object told", user, answer, *right, *NOTED)
        if found := re.fullmatch(r"Where (?:is the|is my|did I put the) (\w+)", ask):
            right = f"The {found[1]} is in the {self.objects[found[1]]}."
            return self.expect("object", user, answer, right)
        if found := re.fullmatch(r"What does (\w+) have", ask):
            colour, thing = self.owners[found[1]]
            article = "an" if colour[0] in "aeiou" else "a"
            return self.expect("owner", user, answer, f"{found[1]} has {article} {colour} {thing}.")
        if found := re.fullmatch(r"Who has the (\w+) (\w+)", ask):
            having = [who for who, what in self.owners.items() if what == found.groups()]
            return self.expect("owner", user, answer, *(f"{who} has the {found[1]} {found[2]}." for who in having))
        if found := re.fullmatch(r"What colour is the (\w+) of (\w+)", ask):
            colour, thing = self.owners[found[2]]
            right = [f"The {thing} of {found[2]} is {colour}."] if thing == found[1] else []
            return self.expect("owner", user, answer, *right)
        return None

    def stories(self, user, answer):
        """The characters that the user names are the ones of the story."""
        if not re.search(r"\bstory\b", user, re.IGNORECASE):
            return None
        found = re.search(r"story (?:about|with) (.+?)(?: and (.+?))?(?:, please)?[.?]?$", user)
        for who in found.groups() if found else ():
            if who and not re.search(rf"\b{re.escape(who)}\b", answer, re.IGNORECASE):
                raise WrongAnswer(f"story without {who}: {answer!r}")
        if not 4 <= answer.count(".") + answer.count("!") <= 12:
            raise WrongAnswer(f"not a story: {answer!r}")
        return "story"

    # --- facts about the user -----------------------------------------------------------------------------------

    def statement(self, user, answer):
        """One or two facts, maybe with a change of mind before them; nothing else in the line."""
        told, at = [], 0
        while at < len(user):
            if skipped := BETWEEN.match(user, at):
                at = skipped.end()
            elif (fact := self._fact(user, at)) is not None:
                kind, value, at = fact
                told.append((kind, value))
            elif user[at] == " ":
                at += 1
            else:
                return None
        if not told:
            return None
        for (where, key), value in told:
            (self.pets if where == "pet" else self.facts)[key] = value
        if answer not in NOTED and not any(re.search(rf"\b{re.escape(v)}\b", answer, re.IGNORECASE) for _, v in told):
            raise WrongAnswer(f"told: {user!r} → {answer!r} confirms something else")
        return "pet told" if any(where == "pet" for (where, _), _ in told) else "told"

    @staticmethod
    def _fact(user, at):
        text = user[at].upper() + user[at + 1 :]  # joined sentences begin small
        for kind, pattern in TOLD:
            if found := pattern.match(text):
                key, *values = (kind, *found.groups())
                if kind == "favourite reversed":
                    values.reverse()
                if kind.startswith("favourite"):
                    key = values[0].replace("color", "colour")
                return ("pet", values[0]) if kind == "pet" else ("fact", key), values[-1], at + found.end()
        return None

    def pet_question(self, user, answer):
        asked = rf"\b(?:my {ANIMAL}(?:'s name)?(?: called)?|name of my {ANIMAL})\W*$"
        if "fix" not in user and re.search(asked, user, re.IGNORECASE):
            kind = re.search(rf"\b{ANIMAL}\b", user)[1]
            if kind not in self.pets:
                missing = f"You have not told me about a {kind}.", f"I don't know of a {kind}. You have not told me."
                return self.expect("pet missing", user, answer, *missing)
            return self.expect("pet", user, answer, f"Your {kind} is called {self.pets[kind]}.")
        if re.search(r"\b(?:my pet|pet do I have|have a pet|animal do I have)", user):
            if not self.pets:
                missing = "You have not told me about a pet.", "I don't know of a pet. You have not told me."
                return self.expect("pet missing", user, answer, *missing)
            ((kind, name),) = self.pets.items()
            return self.expect("pet", user, answer, f"You have a {kind} called {name}.")
        return None

    def about_me(self, user, answer):
        if not re.search(r"(?:know|tell you) about me", user):
            return None
        known = [kind for kind in ("name", "city", "job", "age") if kind in self.facts]
        true = [RECALLED[kind].format(self.facts[kind]).casefold() for kind in known]
        said = re.findall(r"you(?:r name is| live in| work as| are) .+?\.", answer.casefold())
        if not true:
            return self.expect("everything", user, answer, "Nothing yet. Tell me something about you.")
        if " ".join(said) != answer.casefold() or len(said) != min(3, len(true)) or set(said) - set(true):
            raise WrongAnswer(f"everything: {answer!r} of {true}")
        return "everything"

    def question(self, user, answer):
        """What is my name? Also two at once, and things that were never told."""
        parts = re.split(r"[?.]? And (?=\w)", LEAD_IN.sub("", user))
        kinds = [self._kind_asked(part) for part in parts]
        if None in kinds:
            return None
        options = [""]
        for kind in kinds:
            forms = self._answers(kind)
            options = [f"{head} {form}".strip() for head in options for form in forms]
        name = "recall" if all(kind in self.facts for kind in kinds) else "recall missing"
        return self.expect(name, user, answer, *options)

    @staticmethod
    def _kind_asked(text):
        if found := re.search(r"favou?rite (\w+)|[Ww]hich (\w+) do i like", text, re.IGNORECASE):
            return (found[1] or found[2]).replace("color", "colour")
        return next((kind for kind, pattern in ASKED if re.search(pattern, text, re.IGNORECASE)), None)

    def _answers(self, kind) -> list[str]:
        if kind in self.facts:
            return [RECALLED.get(kind, f"Your favourite {kind} is {{}}.").format(self.facts[kind])]
        what = {
            "city": "where you live", "friend": "about a friend", "sister": "about a sister",
            "brother": "about a brother", "number": "a number", "word": "a word",
        }.get(kind, f"your {kind}" if kind in RECALLED else f"your favourite {kind}")  # fmt: skip
        short = {"friend": "your friend", "sister": "your sister", "brother": "your brother"}.get(kind, what)
        told = f"You have not told me {what}"
        return [f"{told}.", f"{told} yet.", f"I don't know {short}. You have not told me."]

    # --- what needs no memory -----------------------------------------------------------------------------------

    def small_talk(self, user, answer):
        def same(text: str) -> str:
            return text.rstrip(".?!")

        for said, answers in stories.TALK:
            if same(user) in map(same, said):
                return self.expect("small talk", user, answer, *answers)
        if same(user) not in map(same, stories.GREETINGS):
            return None
        name = self.facts.get("name")
        greeted = stories.GREETED_BY_NAME if name else stories.GREETED
        return self.expect("greeting", user, answer, *(text.format(v=name) for text in greeted))

    def cache(self, user, answer):
        """The longest trained phrasing that stands in the line decides which answer is right."""
        line = user.casefold()
        matches = [
            (len(phrasing), right)
            for right, phrasings in QUESTIONS
            for phrasing in phrasings[:-1]
            if phrasing.casefold().rstrip(".?") in line
        ]
        return self.expect("cache", user, answer, max(matches)[1]) if matches else None

    def unknown(self, user, answer):
        if answer in stories.REFUSED:
            return "refused" if re.match(r"(?:Write|Translate|Draw|Sing|Search|Play|Open|Book)", _bare(user)) else None
        asks = re.match(r"(?:What|Who|When|How|Why|Where|Which|Do you know|Is) ", _bare(user), re.IGNORECASE)
        return "unknown" if answer in stories.HONEST and asks else None


def _bare(user: str) -> str:
    text = LEAD_IN.sub("", user)
    return text[0].upper() + text[1:]


def check(messages: list[dict], note: Callable[[str], None] = lambda kind: None) -> Reader:
    """Read one conversation; `note` hears the kind of every exchange. Returns the reader with all that it knows."""
    reader, rest = Reader(), list(messages)
    if rest[0]["role"] == "system":
        rest = rest[1:]
    for user, assistant in zip(rest[::2], rest[1::2], strict=True):
        assert (user["role"], assistant["role"]) == ("user", "assistant")
        note(reader.exchange(user["content"], assistant["content"]))
    return reader
