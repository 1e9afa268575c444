"""What a user can tell about himself and ask back later: the phrasings of every kind of fact.

Each kind has statements and the answers to them, questions and the answers to those, and what an honest model says
when it was never told. {v} is the value.
"""

from dataclasses import dataclass

from nanokv.training import words


@dataclass(frozen=True)
class Fact:
    """One kind of fact: how it is drawn, told, confirmed, asked for, recalled, and missed."""

    value: object  # callable (rng, held_out) -> str
    told: tuple[str, ...]
    noted: tuple[str, ...]
    asked: tuple[str, ...]
    recalled: tuple[str, ...]
    missing: tuple[str, ...]


def _from(pool):
    return lambda rng, held_out: rng.choice(pool)


def _city(rng, held_out):
    return rng.choice(words.CITIES) if rng.random() < 0.6 else words.invent(rng, held_out).capitalize()


def _favourite(thing, pool, note):
    """Favourite colours, foods, drinks and animals are told in the same words; American spelling now and then."""
    return Fact(
        _from(pool),
        (
            f"My favourite {thing} is {{v}}.",
            f"My favorite {thing} is {{v}}.",
            f"I like {{v}} best of every {thing}.",
            f"{{v}} is my favourite {thing}.",
            f"The {thing} I like most is {{v}}.",
            f"my favourite {thing} is {{v}}",
        ),
        (note, "Noted: {v}.", "I will remember that you like {v}.", "Ok, {v}.", f"So your favourite {thing} is {{v}}."),
        (
            f"What is my favourite {thing}?",
            f"What's my favorite {thing}?",
            f"Which {thing} do I like best?",
            f"what is my favourite {thing}",
            f"Do you remember my favourite {thing}?",
            f"Can you tell me my favourite {thing}?",
            f"Which {thing} do I like most?",
        ),
        (f"Your favourite {thing} is {{v}}.",),
        (
            f"You have not told me your favourite {thing} yet.",
            f"I don't know your favourite {thing}. You have not told me.",
        ),
    )


def _both_spellings(fact):
    """A user may write color; the answer says colour."""
    american = (
        [text.replace("colour", "color") for text in fact.told],
        [text.replace("colour", "color") for text in fact.asked],
    )
    return Fact(
        fact.value,
        fact.told + tuple(american[0]),
        fact.noted,
        fact.asked + tuple(american[1]),
        fact.recalled,
        fact.missing,
    )


FACTS = {
    "name": Fact(
        words.name,
        (
            "My name is {v}.",
            "My name is {v}.",
            "I am {v}.",
            "I'm {v}.",
            "Call me {v}.",
            "Hi, I am {v}.",
            "Hello, my name is {v}.",
            "my name is {v}",
            "You can call me {v}.",
            "People call me {v}.",
            "Hi! My name is {v}.",
            "Hey, {v} here.",
            "This is {v}.",
            "Please call me {v}.",
            "My name's {v}.",
        ),
        (
            "Nice to meet you, {v}.",
            "Nice to meet you, {v}.",
            "Hello, {v}!",
            "Hi {v}, nice to meet you.",
            "Pleased to meet you, {v}.",
            "Welcome, {v}.",
        ),
        (
            "What is my name?",
            "What is my name?",
            "What's my name?",
            "Do you remember my name?",
            "Who am I?",
            "what is my name",
            "Can you tell me my name?",
            "Tell me my name.",
            "What am I called?",
            "Do you know my name?",
            "What was my name?",
            "Say my name.",
            "How am I called?",
            "What is my name again?",
        ),
        ("Your name is {v}.",),
        ("You have not told me your name yet.", "I don't know your name. You have not told me."),
    ),
    "city": Fact(
        _city,
        (
            "I live in {v}.",
            "I live in {v}.",
            "My home is in {v}.",
            "My city is {v}.",
            "I moved to {v}.",
            "My home town is {v}.",
            "i live in {v}",
            "I am from {v}.",
            "I come from {v}.",
        ),
        (
            "{v} sounds nice.",
            "I will remember that you live in {v}.",
            "Noted: {v}.",
            "So you live in {v}.",
            "I would like to see {v}.",
        ),
        (
            "Where do I live?",
            "Where do I live?",
            "Which city do I live in?",
            "In which city do I live?",
            "What is my city?",
            "where do i live",
            "Do you remember where I live?",
            "What city am I from?",
            "Where am I from?",
            "Can you tell me where I live?",
        ),
        ("You live in {v}.",),
        ("You have not told me where you live.", "I don't know where you live. You have not told me."),
    ),
    "colour": _both_spellings(_favourite("colour", words.COLOURS, "{v} is a lovely colour.")),
    "food": _favourite("food", words.FOODS, "Mmm, {v}."),
    "drink": _favourite("drink", words.DRINKS, "{v} is good."),
    "animal": _favourite("animal", words.ANIMALS, "I like that: {v}."),
    "job": Fact(
        _from(words.JOBS),
        ("I work as a {v}.", "I am a {v}.", "My job is {v}.", "I'm a {v}.", "I am a {v} by trade."),
        ("So you work as a {v}.", "That sounds like good work.", "Noted: {v}.", "I will remember that you are a {v}."),
        (
            "What is my job?",
            "What do I work as?",
            "What do I do for a living?",
            "What's my job?",
            "Do you remember my job?",
            "what is my job",
            "What is my work?",
        ),
        ("You work as a {v}.",),
        ("You have not told me your job.", "I don't know your job. You have not told me."),
    ),
    "hobby": Fact(
        _from(words.HOBBIES),
        (
            "My hobby is {v}.",
            "I love {v}.",
            "I enjoy {v}.",
            "In my free time I like {v}.",
            "I spend my weekends with {v}.",
        ),
        ("{v} is a fine hobby.", "{v} sounds like fun.", "Noted: {v}.", "I will remember your hobby."),
        (
            "What is my hobby?",
            "What do I do in my free time?",
            "What's my hobby?",
            "Do you remember my hobby?",
            "what is my hobby",
            "What do I enjoy?",
        ),
        ("Your hobby is {v}.",),
        ("You have not told me your hobby.", "I don't know your hobby. You have not told me."),
    ),
    "friend": Fact(
        words.name,
        (
            "My best friend is {v}.",
            "My best friend is called {v}.",
            "My friend's name is {v}.",
            "I have a friend called {v}.",
            "my friend is called {v}",
        ),
        ("Say hello to {v}.", "{v} is lucky to have you.", "Noted: {v}.", "I will remember {v}."),
        (
            "What is my friend's name?",
            "Who is my best friend?",
            "What is my best friend called?",
            "What is my friend called?",
            "Do you remember my friend's name?",
            "Who is my friend?",
        ),
        ("Your friend is called {v}.",),
        ("You have not told me about a friend.", "I don't know your friend. You have not told me."),
    ),
    "sister": Fact(
        words.name,
        (
            "My sister is called {v}.",
            "My sister's name is {v}.",
            "I have a sister called {v}.",
            "I have a sister, {v}.",
        ),
        ("Say hello to {v}.", "{v} is a nice name.", "Noted: {v}.", "I will remember {v}."),
        (
            "What is my sister's name?",
            "What is my sister called?",
            "Who is my sister?",
            "Do you remember my sister's name?",
            "what's my sister's name?",
        ),
        ("Your sister is called {v}.",),
        ("You have not told me about a sister.", "I don't know your sister. You have not told me."),
    ),
    "brother": Fact(
        words.name,
        (
            "My brother is called {v}.",
            "My brother's name is {v}.",
            "I have a brother called {v}.",
            "I have a brother, {v}.",
        ),
        ("Say hello to {v}.", "{v} is a nice name.", "Noted: {v}.", "I will remember {v}."),
        (
            "What is my brother's name?",
            "What is my brother called?",
            "Who is my brother?",
            "Do you remember my brother's name?",
            "what's my brother's name?",
        ),
        ("Your brother is called {v}.",),
        ("You have not told me about a brother.", "I don't know your brother. You have not told me."),
    ),
    "age": Fact(
        lambda rng, held_out: str(rng.randint(5, 99)),
        ("I am {v} years old.", "My age is {v}.", "I'm {v} years old.", "I am {v}."),
        ("{v} is a good age.", "Noted: {v} years.", "I will remember that you are {v}."),
        ("How old am I?", "What is my age?", "How old am I?", "Do you remember my age?", "how old am i"),
        ("You are {v} years old.",),
        ("You have not told me your age.", "I don't know your age. You have not told me."),
    ),
    "number": Fact(
        lambda rng, held_out: str(rng.randint(1, 999)),
        (
            "My lucky number is {v}.",
            "Remember the number {v}.",
            "The number is {v}.",
            "My number is {v}.",
            "Please remember this number: {v}.",
        ),
        ("Ok, the number is {v}.", "Noted: {v}.", "I will remember {v}."),
        (
            "What is my number?",
            "What was the number?",
            "Which number did I tell you?",
            "What is my lucky number?",
            "Do you remember the number?",
            "What is the number?",
        ),
        ("The number is {v}.",),
        ("You have not told me a number.", "I don't know a number. You have not told me."),
    ),
    "word": Fact(
        lambda rng, held_out: words.invent(rng, held_out),
        (
            "The secret word is {v}.",
            "Remember the word {v}.",
            "My code word is {v}.",
            "The password is {v}.",
            "Please remember this word: {v}.",
            "The word is {v}.",
        ),
        ("Ok, the word is {v}.", "Noted: {v}.", "I will remember {v}."),
        (
            "What is the secret word?",
            "What was the word?",
            "Which word did I tell you?",
            "What is the code word?",
            "What is the password?",
            "Do you remember the word?",
            "What is the word?",
        ),
        ("The word is {v}.",),
        ("You have not told me a word.", "I don't know a word. You have not told me."),
    ),
}

PET_TOLD = (
    "I have a {k} called {v}.",
    "My {k} is called {v}.",
    "My {k}'s name is {v}.",
    "I have a {k} named {v}.",
    "I have a {k}. Its name is {v}.",
    "My pet is a {k} called {v}.",
    "my {k} is called {v}",
    "I got a {k} and called it {v}.",
)
PET_NOTED = (
    "{v} is a nice name for a {k}.",
    "Say hello to {v}.",
    "A {k} called {v}, how nice.",
    "I like {k}s. {v} is a good name.",
    "Noted: {v} the {k}.",
)
PET_NAME_ASKED = (
    "What is my {k} called?",
    "What is the name of my {k}?",
    "What is my {k}'s name?",
    "Do you remember the name of my {k}?",
    "what's my {k}'s name?",
    "How is my {k} called?",
    "Do you remember my {k}'s name?",
    "What did I call my {k}?",
    "Who is my {k}?",
)
PET_ASKED = (
    "What is my pet called?",
    "What is the name of my pet?",
    "What is my pet's name?",
    "Which pet do I have?",
    "What pet do I have?",
    "Do I have a pet?",
    "What animal do I have?",
    "Tell me about my pet.",
)
PET_NAME_RECALLED = "Your {k} is called {v}."
PET_RECALLED = "You have a {k} called {v}."
PET_MISSING = ("You have not told me about a pet.", "I don't know of a pet. You have not told me.")
KIND_MISSING = ("You have not told me about a {k}.", "I don't know of a {k}. You have not told me.")
CHANGED = (
    "No, wait. {s}",
    "Actually, {l}",
    "I made a mistake: {l}",
    "Sorry, that was wrong. {s}",
    "Now {l}",
    "Things changed. {s}",
)
