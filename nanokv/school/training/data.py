"""From conversations to batches: tokenizer training, and rows of token ids with the tokens that count in the loss.

A row is one conversation, cut at the row's end: no packing, so nothing leaks from one conversation into the next and
no document mask is needed. A few rows are stories without a chat around them. Rows of several lengths are mixed, so
first turns and long contexts are both common.
"""

import random
from pathlib import Path

import torch
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from nanokv.school.training.corpus import FIRST, Stage, begin, conversation, grow, plain_story
from nanokv.text.tokenizer_file import write_tokenizer

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Qwen's split: contractions, words with their leading space, single digits, punctuation, line breaks, spaces.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# A space before a user's text: his first word has the token that it has inside of a sentence.
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + (' ' if message.role == 'user' else '') + message.content }}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
# Of the user's tokens count in the loss: the model is to answer, not to guess what users say.
USER_SHARE = 0.1
TOKENS_AN_EXCHANGE = 36  # about: more exchanges are drawn where a row is not full
PLAIN_SHARE = 0.03  # of the rows are stories without a chat
# (tokens per row, how often).
ROW_LENGTHS = ((64, 2), (128, 5), (256, 8), (512, 3), (1024, 1.5), (2048, 0.5))


def render(messages) -> str:
    """ChatML, exactly what CHAT_TEMPLATE gives."""
    return "".join(
        f"<|im_start|>{m['role']}\n{' ' if m['role'] == 'user' else ''}{m['content']}<|im_end|>\n"
        for m in messages
    )


def train_tokenizer(seed: int, vocab_size: int, conversations: int = 6000) -> Tokenizer:
    """Byte-level BPE with Qwen's pre-tokenizer, so every digit is a token and every text can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (
        m["content"]
        for i in range(conversations)
        for m in conversation(random.Random(f"{seed}:bpe:{i}"), 12)
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder):
    """tokenizer.json and tokenizer_config.json, as transformers writes them."""
    special = {
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
        "special": True,
    }
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "model_max_length": 2048,
        "add_prefix_space": False,
        "add_bos_token": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "errors": "replace",
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": False,
        "chat_template": CHAT_TEMPLATE,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(t)): {"content": t} | special for t in SPECIAL_TOKENS
        },
    }
    write_tokenizer(Path(folder), tokenizer, config)


class Rows:
    """Batches by step number: batch i is the same whatever was drawn before, so a resumed run sees the same data."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        seed: int,
        tokens_per_batch: int,
        longest: int = 2048,
        stage=FIRST,
    ):
        self.tokenizer, self.seed, self.tokens_per_batch = tokenizer, seed, tokens_per_batch
        self.stage: Stage = stage
        self.lengths = [
            (length, weight)
            for length, weight in ROW_LENGTHS
            if length <= min(longest, tokens_per_batch)
        ]
        self.assistant = tokenizer.encode("<|im_start|>assistant\n").ids

    def batch(self, step: int):
        """(B,T) inputs, (B,T) targets, (B,T) bool: which targets count in this step's loss."""
        rng = random.Random(f"{self.seed}:{step}")
        length = rng.choices(*zip(*self.lengths, strict=True))[0]
        return self.rows([self.row(rng, length) for _ in range(self.tokens_per_batch // length)])

    def held_out(self, count: int, length: int = 512):
        """Rows of conversations whose names and words training never uses, only answers count; the same every time."""
        return self.rows(
            [self.row(random.Random(f"held out:{i}"), length, held_out=True) for i in range(count)]
        )

    def row(self, rng, length: int, held_out: bool = False) -> tuple[list[int], list[bool]]:
        """length + 1 ids and whether each counts, from a conversation that grows until it fills the row."""
        if not held_out and rng.random() < PLAIN_SHARE:
            return self.plain_row(rng, length)
        talk, done = begin(rng, held_out, self.stage), 0
        ids: list[int] = []
        said: list[bool] = []
        while len(ids) <= length:
            grow(talk, len(talk.log) + max(2, (length - len(ids)) // TOKENS_AN_EXCHANGE))
            more, answers = self.encode(talk.messages[done:])
            ids, said, done = ids + more, said + answers, len(talk.messages)
        share = 0 if held_out else USER_SHARE
        return ids[: length + 1], [
            answered or rng.random() < share for answered in said[: length + 1]
        ]

    def plain_row(self, rng, length: int) -> tuple[list[int], list[bool]]:
        """Stories, each ended by <|endoftext|>; every token counts."""
        ids: list[int] = []
        while len(ids) <= length:
            ids += self.tokenizer.encode(plain_story(rng) + "<|endoftext|>").ids
        return ids[: length + 1], [True] * (length + 1)

    def encode(self, messages) -> tuple[list[int], list[bool]]:
        """Ids of the messages in ChatML; is each a token that the assistant says, its end included?"""
        ids: list[int] = []
        said: list[bool] = []
        header = len(self.assistant)
        # A thread a core.
        encoded = self.tokenizer.encode_batch_fast([render([message]) for message in messages])
        for message, new in zip(messages, (encoding.ids for encoding in encoded), strict=True):
            ids += new
            answer = message["role"] == "assistant"
            # The last one is a line break.
            said += [False] * header + [answer] * (len(new) - header - 1) + [False]
        return ids, said

    @staticmethod
    def rows(rows):
        """Shift by one: position t predicts token t + 1."""
        ids = torch.tensor([ids for ids, _ in rows])  # (B,T+1)
        counts = torch.tensor([counts for _, counts in rows])  # (B,T+1)
        return ids[:, :-1], ids[:, 1:], counts[:, 1:]
