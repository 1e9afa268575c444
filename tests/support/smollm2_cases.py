"""What the tokenizer and the chat template of SmolLM2 are asked, the same every time: 2,000 texts, 50 conversations.

Standard library only: record_llama_cpp.py runs where neither torch nor nanokv is installed.
"""

import random

SPELLED = (  # by hand; their ids are recorded in full
    "",
    " ",
    "  ",
    "\n",
    "\n\n",
    "\r\n",
    "\t",
    "a",
    " a",
    "a ",
    "a  2",
    "a  2 12",
    "  a",
    "   a   ",
    "a\n\n\n b",
    "\n \n",
    "Hello, world!",
    "Don't, we'll, I'VE, they'd",
    "1234567890",
    "3.14159",
    "1,000,000",
    "2+2=4",
    "x1y22z333",
    "v1.2.3",
    "½ ² ③ Ⅳ ٣ ५ 七",
    "naïve café",
    "cafe\u0301",
    "Ångström",
    "straße",
    "ﬁne",
    "İstanbul",
    "привет мир",
    "你好,世界",
    "こんにちは",
    "한국어",
    "مرحبا بالعالم",
    "שלום",
    "नमस्ते",
    "สวัสดี",
    "🙂",
    "👩\u200d👩\u200d👧\u200d👦",
    "🇫🇷🇩🇪",
    "e\u0301\u0302\u0303",
    "\u200b",
    "\ufeffa",
    "\u00a0",
    "a\u00a0b",
    "\u3000x",
    "\u2028",
    "\x00",
    "a\x00b",
    "\x1b[31m",
    "\x7f",
    "\ufffd",
    "\U0010ffff",
    "\ue000",
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|im_start",
    "|im_end|>",
    "< |im_end|>",
    "<|im_end|> ",
    " <|im_end|>",
    "<|im_end|><|im_end|>",
    "<repo_name>",
    "<file_sep>x",
    "<issue_start>",
    "<jupyter_code>1",
    "<empty_output>",
    "<|IM_END|>",
    "<s>",
    "</s>",
    "[INST]",
    "def f(x):\n    return x  # twice\n",
    "if (a && b) { c++; }\r\n",
    "SELECT * FROM t WHERE id = 10;",
    "https://example.com/?q=1&r=2#3",
    "C:\\temp\\new",
    "\\n",
    "a_b_c __init__",
    '#!/bin/sh\necho "$1"\n',
    "<html>\n\t<p>x</p>\n</html>",
    '{"a": [1, 2.5, null]}',
    "$\\frac{1}{2}$",
    "100%",
    "£5 €6 ¥7",
    "it''s",
    "'''",
    '"""',
    "--- ... ***",
    "!!!???",
    "aaaaaaaaaaaaaaaaaaaaaaaa",
    " " * 17,
    "\n" * 9,
    "\t\t\tx",
    " \t \n \t x",
    "word" + " " * 200 + "word",
    "0" * 50,
    "=" * 81,
    "ĠĠ Ċ",
    "Ġ",
    "don’t",
    "CamelCaseHTTPServer2",
    "ALL CAPS",
    "ﷺ",
    "𝕳𝖊𝖑𝖑𝖔",
    "𓀀",
    "\u0300",
    "a\u0300b",
    "\ud7ff",
)
WORDS = (
    "the cache holds keys and values of every token that was read so far while a small model answers questions about "
    "Paris France water planets seven days Monday Tuesday don't we'll it's I'm they've he'd can't O'Brien naïve über "
    "import return def class None True self print range len lambda await async yield"
).split()
RANGES = (  # first and last code point
    (0x20, 0x7E),
    (0xA0, 0xFF),
    (0x100, 0x17F),
    (0x300, 0x36F),
    (0x370, 0x3FF),
    (0x400, 0x4FF),
    (0x5D0, 0x5EA),
    (0x620, 0x66F),
    (0x900, 0x97F),
    (0xE01, 0xE5B),
    (0x1100, 0x11FF),
    (0x2000, 0x206F),
    (0x20A0, 0x20BF),
    (0x2150, 0x218B),
    (0x2200, 0x22FF),
    (0x2460, 0x24FF),
    (0x3000, 0x30FF),
    (0x4E00, 0x4FFF),
    (0xAC00, 0xADFF),
    (0xE000, 0xE0FF),
    (0xFE00, 0xFE0F),
    (0xFF01, 0xFF5E),
    (0x1D7CE, 0x1D7FF),
    (0x1F300, 0x1F64F),
    (0x20000, 0x200FF),
)
SPACES = (" ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", "\u00a0", " \n ", " " * 8)
CONTROL = (
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<repo_name>",
    "<file_sep>",
    "<|im_start",
    "im_end|>",
)
SIGNS = "()[]{}<>=+-*/%&|^~!?.,;:'\"`@#$_\\"


def anything(random_: random.Random) -> str:
    """One character of a random script."""
    return chr(random_.randint(*random_.choice(RANGES)))


PIECES = (  # each draws one piece of a text
    lambda r: r.choice(WORDS),
    lambda r: " " + r.choice(WORDS),
    lambda r: " " + r.choice(WORDS).upper(),
    lambda r: r.choice(SPACES),
    lambda r: " " * r.randint(1, 70),
    lambda r: "\n" * r.randint(1, 12),
    lambda r: str(r.randint(0, 10 ** r.randint(1, 12))),
    lambda r: f" {r.random():.{r.randint(1, 9)}f}",
    lambda r: "".join(r.choices(SIGNS, k=r.randint(1, 5))),
    lambda r: r.choice(CONTROL),
    anything,
    anything,
    lambda r: "".join(anything(r) for _ in range(r.randint(2, 8))),
    lambda r: f"\n{'    ' * r.randint(0, 4)}",
)


def texts() -> list[str]:
    """2,000: those above, then runs of random pieces."""
    random_ = random.Random("SmolLM2 texts")
    drawn = [
        "".join(random_.choice(PIECES)(random_) for _ in range(random_.randint(1, 24)))
        for _ in range(2_000 - len(SPELLED))
    ]
    return [*SPELLED, *drawn]


def conversations() -> list[list[dict]]:
    """50, each ending with a question: with and without a system message, one to four turns."""
    random_, found = random.Random("SmolLM2 conversations"), []
    said = [
        *(text for text in SPELLED if text.strip() and "\x00" not in text),
        *texts()[len(SPELLED) :],
    ]
    for number in range(50):
        messages = []
        if number % 3 == 0:
            messages.append(
                {
                    "role": "system",
                    "content": random_.choice(["", "Be brief.", " \n", said[number]]),
                }
            )
        for turn in range(random_.randint(1, 4)):
            if turn:
                messages.append({"role": "assistant", "content": random_.choice(said)})
            messages.append({"role": "user", "content": random_.choice(said)})
        found.append(messages)
    return found
