"""The vocabulary of the synthetic corpus: pools of words, and functions that make up new words.

Words are split into a training half and a held-out half. The checksum of a word's letters decides
which half it belongs to, whatever the seed. So a name, a secret word or a list item of the
evaluation never had that role in training.

Both halves share the short pools: colours, cities, foods, animals. A story or a question of the
training may mention any noun.
"""

import zlib
from collections.abc import Callable, Sequence
from random import Random

NAMES = """Ada Adam Aisha Alan Alba Ali Alma Amir Amy Ana Anders Anna Anton Arun Astrid Aya Bea Ben
Bianca Boris Bruno Carla Carlos Carmen Cem Chen Chloe Clara Colin Dan Dana Daria David Dina Diego
Dora Edith Elena Elif Eli Ella Emil Emma Eric Esther Eva Farid Felix Fiona Frank Freya Gita Grace
Greta Hana Hans Hasan Hector Heidi Helen Henry Hugo Ian Ida Igor Ilse Imani Ines Ingrid Iris Isaac
Ivan Ivy Jack Jamal Jan Jana Jane Jasper Jin Joan Jonas Jose Juan Julia Kai Karim Karl Kate Kenji
Kim Klara Kofi Lara Laura Lea Lee Lena Leo Lily Lina Lisa Louis Lucia Lukas Luna Maja Malik Marco
Maria Marta Max Maya Mei Mia Mila Milo Mina Mira Mona Nadia Naomi Nia Nico Nina Noah Nora Olga
Oliver Omar Oscar Otto Pablo Paul Pavel Pedro Petra Pia Priya Raj Rania Rita Robert Rosa Ruth Sam
Samir Sara Sasha Selma Simon Sofia Sven Tara Theo Tim Tina Tom Uma Vera Victor Wei Will Yara Yuki
Yusuf Zara Zoe""".split()
NOUNS = """apple arrow badge ball banana basket bean bell belt bench berry bird boat book boot
bottle bowl box branch bread brick bridge broom brush bucket bus butter button cable cake camera
candle carpet carrot castle chain chair chalk cherry clock cloud coat coin comb cork corn couch cow
crab crown cup curtain desk diamond doll donkey door dragon dress drum duck eagle engine fan farm
feather fence ferry field finger flag flame flute forest fork fox frog garden gate ghost giant glass
globe glove goat grape grass guitar hammer harbor hat hill honey hook horse house island ivory
jacket jar jelly kettle key kite knife ladder lake lamp leaf lemon letter lion lizard map marble
mask meadow melon milk mirror moon mountain mouse mug nail needle nest net nut oak ocean olive onion
orange oven owl paddle paint palace paper pear pebble pencil pepper piano pillow pilot pine pipe
plate plum pocket potato pumpkin purse puzzle queen rabbit rain ribbon rice ring river road robot
rocket roof root rope rose saddle sail salt sand scarf shadow sheep shell ship shirt shoe silver
skirt sky snail snow soap sock spoon spring square stamp star stone storm stove straw street sugar
sun swan table tail tea tent thread thunder ticket tiger toast tomato tower train tree trumpet tulip
tunnel turtle umbrella valley vase violin wagon wall wave whale wheel whistle wind window wolf wood
wool yarn zebra""".split()
COLOURS = """red blue green yellow purple orange pink brown black white grey teal violet silver gold
turquoise crimson indigo beige scarlet olive maroon navy lilac amber""".split()
CITIES = """Oslo Paris London Berlin Madrid Rome Vienna Prague Lisbon Dublin Athens Cairo Nairobi
Lagos Accra Tunis Delhi Mumbai Tokyo Osaka Kyoto Seoul Beijing Shanghai Hanoi Bangkok Manila Jakarta
Sydney Perth Auckland Lima Quito Bogota Santiago Havana Boston Chicago Denver Seattle Austin Toronto
Montreal Warsaw Krakow Zagreb Sofia Riga Helsinki Stockholm Copenhagen Hamburg Munich Zurich Geneva
Milan Naples Porto Seville Glasgow Cardiff Leeds Izmir Baku Tbilisi Almaty""".split()
FOODS = """pizza pasta soup rice curry bread cheese salad sushi noodles pancakes beans potatoes
tomatoes apples mangoes grapes chocolate honey dumplings falafel lasagna tacos waffles porridge
omelette risotto couscous strawberries cherries""".split()
DRINKS = "tea coffee water milk juice lemonade cocoa cider cola soda".split()
ANIMALS = """cat dog rabbit hamster parrot turtle horse goat snake lizard mouse duck hen pig pony
ferret frog goldfish canary gecko""".split()
JOBS = """baker teacher doctor nurse pilot farmer singer painter writer carpenter gardener driver
cook lawyer dentist sailor plumber tailor librarian engineer fisherman photographer mechanic judge
waiter""".split()
HOBBIES = """painting swimming reading dancing cooking hiking chess running singing fishing
gardening skiing knitting climbing sailing drawing cycling football tennis astronomy
pottery""".split()
PLACES = """kitchen garden garage cellar attic bedroom office drawer cupboard car bag library hall
tower barn box shed basement bathroom closet""".split()
SPORTS = """football tennis basketball hockey rowing judo cricket rugby volleyball badminton golf
boxing skating surfing baseball handball archery""".split()
SEASONS = "spring summer autumn winter".split()
FRUITS = """apples bananas mangoes pears plums cherries oranges figs melons kiwis peaches lemons
papayas dates""".split()
FLOWERS = "roses tulips lilies daisies orchids violets sunflowers irises poppies peonies".split()
INSTRUMENTS = """piano violin guitar cello flute drums trumpet harp oboe banjo clarinet saxophone
accordion""".split()
GAMES = """chess checkers poker bridge go dominoes solitaire darts backgammon scrabble mahjong
bingo""".split()
SUBJECTS = "maths physics history biology chemistry geography art music latin french".split()
RELATIVES = """sister brother mother father son daughter wife husband cousin uncle aunt neighbour
teacher boss grandmother grandfather colleague roommate""".split()
FAVOURITES = "place dessert tree bird vegetable planet singer writer toy month shop country".split()
LANGUAGES = """English French German Spanish Italian Dutch Polish Turkish Arabic Hindi Japanese
Korean Greek Swedish Portuguese Swahili""".split()
CODES = (  # things with a number or password that a user may mention
    "PIN",
    "door code",
    "gate code",
    "locker code",
    "alarm code",
    "safe code",
    "bike lock",
    "phone code",
    "wifi code",
    "room number",
    "flat number",
    "house number",
    "locker number",
    "bus number",
    "seat number",
    "wifi password",
    "laptop password",
    "customer number",
    "lock code",
    "card PIN",
    "postcode",
    "code",
    "alarm",
    "locker",
    "tablet code",
    "suitcase lock",
    "shed code",
    "mailbox code",
    "garage code",
    "ticket number",
    "table number",
    "garden lock",
)
TITLES = ("Dr.", "Captain", "Professor", "Mr.", "Mrs.", "Doctor", "Sir", "Lady")
BESIDE = (  # where things lie
    "under",
    "behind",
    "on",
    "next to",
    "beside",
    "above",
    "in front of",
    "in",
    "on top of",
    "near",
)
ORDINALS = (
    "first",
    "second",
    "third",
    "fourth",
    "fifth",
    "sixth",
    "seventh",
    "eighth",
    "ninth",
    "tenth",
)
_TO_NINETEEN = """zero one two three four five six seven eight nine ten eleven twelve thirteen
fourteen fifteen sixteen seventeen eighteen nineteen""".split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()

ACCENTS = {
    "a": "áàäåãâ",
    "e": "éèëê",
    "i": "íï",
    "o": "óöøô",
    "u": "úü",
    "c": "ç",
    "n": "ñ",
    "s": "š",
    "z": "ž",
}

# English words that no made-up word may equal.
COMMON = set(
    """and the they them then that this what where when which who why how she you not has had have
was will with""".split()
)

_ONSETS = """b br c ch d dr f fl g gr h j k kl l m n p ph pl qu r s sh sk st t th tr v w y z bl gl
sn sp cr wh x""".split()
_VOWELS = "a e i o u a e i o u ai ee oo ia ou y ea".split()
_CODAS = "b ck d g l ll m n nd ng nk p r rk s sh st t th x z rt lf mp".split() + [""] * 16
_PIECES = tuple(NOUNS + NAMES)  # the words that splice() cuts up


def number(n: int) -> str:
    """0 to 99 in words: twenty-one."""
    if n < 20:
        return _TO_NINETEEN[n]
    tens = _TENS[n // 10 - 2]
    if n % 10 == 0:
        return tens
    return f"{tens}-{_TO_NINETEEN[n % 10]}"


def is_held_out(word: str) -> bool:
    """Whether a word is kept for the evaluation: one word in eight, decided by its letters."""
    return zlib.crc32(word.lower().encode()) % 8 == 0


def pick(rng: Random, pool: Sequence[str], held_out: bool) -> str:
    """A word of the pool that belongs to the requested half."""
    while True:
        word = rng.choice(pool)
        if is_held_out(word) == held_out:
            return word


def invent(rng: Random, held_out: bool, most: int = 3) -> str:
    """A made-up word of 1 to `most` syllables and 3 to 12 letters, in lower case: whapim, spi."""
    while True:
        word = ""
        for _ in range(rng.randint(1, most)):
            word += rng.choice(_ONSETS)
            word += rng.choice(_VOWELS)
            if rng.random() < 0.6:
                word += rng.choice(_CODAS)
        if _is_usable(word, held_out):
            return word


def splice(rng: Random, held_out: bool, pool: Sequence[str] = _PIECES) -> str:
    """The front of one word and the back of another: apple and window give "apdow".

    In a long training every token that is part of a word comes up, so the model learns to copy it.
    """
    while True:
        front = rng.choice(pool).lower()
        back = rng.choice(pool).lower()
        word = front[: rng.randint(1, len(front) - 1)]
        word += back[rng.randint(1, len(back) - 1) :]
        if _is_usable(word, held_out):
            return word


def _is_usable(word: str, held_out: bool) -> bool:
    """A made-up word has 3 to 12 letters, is not a common English word and is in the right half."""
    return 3 <= len(word) <= 12 and word not in COMMON and is_held_out(word) == held_out


def name(rng: Random, held_out: bool) -> str:
    """A first name: more than half of them are made up, a few have an accent."""
    if rng.random() < 0.4:
        return pick(rng, NAMES, held_out)
    if rng.random() < 0.3:
        word = splice(rng, held_out)
    else:
        word = invent(rng, held_out)
    word = word.capitalize()
    if rng.random() < 0.05:
        return accented(rng, word)
    return word


def accented(rng: Random, word: str) -> str:
    """The word with an accent on one letter, if a letter can have one.

    An accented letter has two bytes in UTF-8, and so usually two tokens.
    """
    places = [i for i, letter in enumerate(word) if letter in ACCENTS]
    if not places:
        return word
    i = rng.choice(places)
    return word[:i] + rng.choice(ACCENTS[word[i]]) + word[i + 1 :]


def strange(rng: Random, held_out: bool) -> str:
    """One or two words that no pool contains, as users mention them: kefir, pangolin, oat milk."""
    word = varied_word(rng, held_out).lower()
    if rng.random() < 0.2:
        before = varied_word(rng, held_out).lower()
        return f"{before} {word}"
    return word


def list_word(rng: Random, held_out: bool) -> str:
    """A word for a list: mostly a noun, sometimes a made-up word, a food, an animal or a name."""
    kind = rng.random()
    if kind < 0.6:
        return pick(rng, NOUNS, held_out)
    if kind < 0.9:
        return invent(rng, held_out)
    if kind < 0.96:
        return pick(rng, FOODS + ANIMALS, held_out)
    return pick(rng, NAMES, held_out)


def varied_word(rng: Random, held_out: bool) -> str:
    """A word for a list, of more kinds than list_word draws: half are spliced or capitalised."""
    kind = rng.random()
    if kind < 0.5:
        return list_word(rng, held_out)
    if kind < 0.9:
        return splice(rng, held_out)
    return invent(rng, held_out).capitalize()


def distinct(rng: Random, count: int, make: Callable[[], str]) -> list[str]:
    """`count` different words; `make` draws one."""
    words: list[str] = []
    while len(words) < count:
        word = make()
        if word not in words:
            words.append(word)
    return words
