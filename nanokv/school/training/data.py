"""From conversations to batches: the tokenizer's training, and rows of token ids with loss masks.

A row is one conversation, cut at the end of the row. Rows are not packed, so tokens never attend to
another conversation and no document mask is needed. A few rows are stories without a chat. Rows
have several lengths, so first turns and long contexts are both common.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

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

from nanokv.school.training.conversation import Stage
from nanokv.school.training.corpus import FIRST, begin, conversation, grow, plain_story
from nanokv.text.tokenizer_file import write_tokenizer

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Qwen's split: contractions, words with their leading space, single digits, punctuation, line
# breaks, spaces.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# A user's text begins with a space, so that its first word is the same token as within a sentence.
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' "
    "+ (' ' if message.role == 'user' else '') + message.content }}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
TOKENS_AN_EXCHANGE = 36  # on average; if a row is not full, more exchanges are drawn
PLAIN_SHARE = 0.03  # share of rows that are stories without a chat
ROW_LENGTHS = ((64, 2), (128, 5), (256, 8), (512, 3), (1024, 1.5), (2048, 0.5))  # (tokens, weight)

Row = tuple[list[int], list[bool]]  # ids, and which of them count in the loss
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # inputs, targets, which targets count


def render(messages: Iterable[Mapping[str, str]]) -> str:
    """The messages in ChatML, the same text as from CHAT_TEMPLATE."""
    return "".join(map(_render, messages))


def _render(message: Mapping[str, str]) -> str:
    role = message["role"]
    content = message["content"]
    if role == "user":
        content = " " + content
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


def train_tokenizer(seed: int, vocab_size: int, conversations: int = 6000) -> Tokenizer:
    """Train byte-level BPE with Qwen's pre-tokenizer: each digit is a token, every text has tokens.

    `vocab_size` includes the special tokens. `conversations` is how many it learns from.
    """
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


def save_tokenizer(tokenizer: Tokenizer, folder: str | Path) -> None:
    """Write tokenizer.json and tokenizer_config.json as transformers does."""
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
    """Batches of rows by step number.

    Batch i depends on the seed and on i alone, so a resumed run trains on the same batches.
    `longest` is the most tokens of a row.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        seed: int,
        tokens_per_batch: int,
        longest: int = 2048,
        stage: Stage = FIRST,
    ):
        self.tokenizer = tokenizer
        self.seed = seed
        self.tokens_per_batch = tokens_per_batch
        self.stage = stage
        self.lengths = [
            (length, weight)
            for length, weight in stage.lengths or ROW_LENGTHS
            if length <= min(longest, tokens_per_batch)
        ]
        self.assistant = tokenizer.encode("<|im_start|>assistant\n").ids

    def batch(self, step: int) -> Batch:
        """(B,T) inputs, (B,T) targets, (B,T) bool: which targets count in this step's loss."""
        rng = random.Random(f"{self.seed}:{step}")
        lengths, weights = zip(*self.lengths, strict=True)
        length = rng.choices(lengths, weights)[0]
        return self.rows([self.row(rng, length) for _ in range(self.tokens_per_batch // length)])

    def held_out(self, count: int, length: int = 512) -> Batch:
        """A batch of rows with held-out names and words, the same at every call.

        Only answers count in its loss.
        """
        rngs = [random.Random(f"held out:{i}") for i in range(count)]
        return self.rows([self.row(rng, length, held_out=True) for rng in rngs])

    def row(self, rng: random.Random, length: int, held_out: bool = False) -> Row:
        """length + 1 ids of one conversation, which grows until it fills the row."""
        if not held_out and rng.random() < PLAIN_SHARE:
            return self.plain_row(rng, length)
        talk = begin(rng, held_out, self.stage)
        done = 0  # messages that are encoded
        ids: list[int] = []
        said: list[bool | None] = []
        while len(ids) <= length:
            missing = (length - len(ids)) // TOKENS_AN_EXCHANGE
            grow(talk, len(talk.log) + max(2, missing))
            more, answers = self.encode(talk.messages[done:])
            ids += more
            said += answers
            done = len(talk.messages)
        share = self.stage.user_share  # the model learns to answer, not what users say
        if held_out:
            share = 0
        counts = [
            answered is not None and (answered or rng.random() < share)
            for answered in said[: length + 1]
        ]
        return ids[: length + 1], counts

    def plain_row(self, rng: random.Random, length: int) -> Row:
        """length + 1 ids of stories, each ended by <|endoftext|>; every token counts."""
        ids: list[int] = []
        while len(ids) <= length:
            ids += self.tokenizer.encode(plain_story(rng) + "<|endoftext|>").ids
        return ids[: length + 1], [True] * (length + 1)

    def encode(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[bool | None]]:
        """Ids of the messages in ChatML. The tokens that the assistant generates count.

        These are its text and <|im_end|>, without the header and the line break after it. None for
        the tokens of another assistant, which never count. An empty message is left out.
        """
        ids: list[int] = []
        said: list[bool | None] = []
        messages = [message for message in messages if message["content"]]
        header = len(self.assistant)
        texts = [render([message]) for message in messages]
        encoded = self.tokenizer.encode_batch_fast(texts)  # one thread per core
        for message, encoding in zip(messages, encoded, strict=True):
            new = encoding.ids
            ids += new
            if message.get("foreign"):
                said += [None] * len(new)
                continue
            answer = message["role"] == "assistant"
            said += [False] * header + [answer] * (len(new) - header - 1) + [False]
        return ids, said

    @staticmethod
    def rows(rows: Sequence[Row]) -> Batch:
        """The rows as tensors, shifted by one: position t predicts token t + 1."""
        ids = torch.tensor([ids for ids, _ in rows])  # (B,T+1)
        counts = torch.tensor([counts for _, counts in rows])  # (B,T+1)
        return ids[:, :-1], ids[:, 1:], counts[:, 1:]
