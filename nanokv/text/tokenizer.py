"""Text ↔ token ids, as in transformers.

The `tokenizers` library runs tokenizer.json. nanokv.text.template renders the checkpoint's chat
template. StreamDecoder decodes token by token and never emits half a character.

Byte-level BPE (Qwen, GPT-2 and relatives) and BPE with byte fallback (Gemma): every token is a run
of bytes, so a text can be decoded token by token. Training a tokenizer is in
nanokv.school.training.
"""

import codecs
import functools
import heapq
import os
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import tokenizers

from nanokv.errors import TokenizerError, UnknownArgument, foreign
from nanokv.support.habits import ENCODE, TOKENIZER, Elsewhere, unknown_name
from nanokv.text import chat_templates, render_process
from nanokv.text.fewest_tokens import FewestTokens
from nanokv.text.ids import Ids, id_list
from nanokv.text.template import ChatTemplate
from nanokv.text.token_bytes import spelling
from nanokv.text.token_names import read_names, with_names
from nanokv.text.tokenizer_file import read_backend, write_tokenizer
from weights_loader.control_texts import TURN_ENDS
from weights_loader.strict import read_object

LONG_TEXT = 10_000  # characters; from this length the library's batch call is faster
# Tags that belong to the visible text.
SPOKEN = ("<think>", "</think>", "<tool_call>", "</tool_call>")


class Tokenizer:
    """Ids are 0 … vocab_size-1. `special_tokens` maps each added token to its id.

    A text may contain the added tokens literally. `control_ids` are the added tokens that a reader
    should not see: marked special by the checkpoint, or known to end a turn. The tags of thoughts
    and tool calls are not among them, although some checkpoints mark them special.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        names: Mapping[str, str] | None = None,
        chat_template: str | Mapping[str, str] | None = None,
        rows: int = 0,
        config: dict[str, Any] | None = None,
        last_id: int | None = None,
    ):
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self._spelling = spelling(backend)
        added = backend.get_added_tokens_decoder()
        self.special_tokens = {token.content: id for id, token in sorted(added.items())}
        self.marked_ids = frozenset(id for id, token in added.items() if token.special)
        control = {id for id, token in added.items() if token.special or token.content in TURN_ENDS}
        self.control_ids = frozenset(control - {self.special_tokens.get(tag) for tag in SPOKEN})
        if last_id is None:
            last_id = max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.vocab_size = last_id + 1
        # The embedding may be padded: Qwen3-0.6B has 151,936 rows for 151,669 ids.
        self.rows = max(rows, self.vocab_size)
        self.names = dict(names or {})  # {"eos_token": "<|im_end|>", …}, visible to the template
        self.chat_template = chat_template  # type: ignore[assignment]  # setter also takes a dict
        self.config = dict(config or {})  # tokenizer_config.json, for write_files
        self._added_ids = frozenset(added)

    @classmethod
    def from_folder(cls, path: str | os.PathLike[str], rows: int | None = None) -> "Tokenizer":
        """Read tokenizer.json, tokenizer_config.json and the chat templates of a folder.

        rows: number of rows of the embedding; None reads it from config.json, if that exists.
        Raises TokenizerError.
        """
        folder = Path(path)
        config = _json_object(folder / "tokenizer_config.json")
        if templates := chat_templates.read_templates(folder, config):
            # The process starts while the files are read, so the first render need not wait.
            render_process.start()
        backend, last_id = read_backend(folder / "tokenizer.json")
        if rows is None:
            size = _json_object(folder / "config.json").get("vocab_size")
            rows = size if type(size) is int else 0
        return cls(backend, read_names(folder, config), templates, rows, config, last_id)

    from_pretrained = Elsewhere(TOKENIZER["from_pretrained"])

    if not TYPE_CHECKING:  # a type checker that sees it accepts mistyped names

        def __getattr__(self, name: str) -> NoReturn:
            raise unknown_name(self, name, TOKENIZER)

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise UnknownArgument(
            "a Tokenizer is not called", f"{ENCODE}, tokenizer.render(messages) a prompt"
        )

    def __repr__(self) -> str:
        ids = f"{self.vocab_size:,} ids, {len(self.control_ids)} control tokens"
        template = "a chat template" if self.chat_template else "no chat template"
        eos = repr(self.eos_token)[:30]
        return f"<Tokenizer: {ids}, {template}, eos {eos}>"

    @property
    def chat_template(self) -> str | None:
        """The template named default, else the first; None for a base model.

        `chat_templates` holds all of them.
        """
        default = self.chat_templates.get(chat_templates.DEFAULT)
        return default or next(iter(self.chat_templates.values()), None)

    @chat_template.setter
    def chat_template(self, value: str | Mapping[str, str] | None) -> None:
        if isinstance(value, str):
            value = {chat_templates.DEFAULT: value}
        self.chat_templates = dict(value or {})

    @property
    def eos_token(self) -> str | None:
        return self.names.get("eos_token")

    @property
    def pad_token(self) -> str | None:
        return self.names.get("pad_token")

    @property
    def bos_token(self) -> str | None:
        return self.names.get("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        if self.eos_token is None:
            return None
        return self.backend.token_to_id(self.eos_token)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Ids of `text`.

        A control token that is typed in the text becomes that token, as in transformers. Check
        untrusted text with `special_tokens_in` first.

        add_special_tokens: also add the tokens that the checkpoint puts around a text, such as
        Llama's bos, but bos never twice. For text that a base model continues; a chat template
        writes these tokens itself.
        """
        if not isinstance(text, str):
            raise TokenizerError(f"only text can be encoded, got {type(text).__name__}")
        with foreign(f"text of {len(text):,} characters cannot be encoded", TokenizerError):
            try:
                if len(text) < LONG_TEXT:
                    ids = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
                else:  # computes no offsets, and releases the GIL
                    ids = self.backend.encode_batch_fast(
                        [text], add_special_tokens=add_special_tokens
                    )[0].ids
            except (TypeError, UnicodeError) as error:
                raise TokenizerError(
                    f"text cannot be encoded: {_bad_character(text) or error}"
                ) from error
        if add_special_tokens and self.bos_token:
            bos = self.backend.token_to_id(self.bos_token)
            if ids[:2] == [bos, bos]:
                return ids[1:]
        return ids

    def special_tokens_in(self, text: str) -> list[str]:
        """The added tokens that `encode` would find in this text, each once, in order.

        Only their places are encoded: a text of megabytes costs a search.
        """
        present = [token for token in self.special_tokens if token and token in text]
        places = heapq.merge(*(_places(text, token) for token in present))
        found: dict[int, None] = {}
        seen = set()
        for start, end in _joined(places):
            if len(found) == len(present):
                break
            near = text[max(0, start - 1) : end + 1]  # a token can demand a whole word
            if near not in seen:
                seen.add(near)
                found |= dict.fromkeys(id for id in self.encode(near) if id in self._added_ids)
        return [self.backend.id_to_token(id) or "" for id in found]

    def fewest_tokens(self, text: str) -> int:
        """A lower bound of the number of ids of `text`, in a small part of the time of `encode`."""
        return self._fewest.of(text)

    @functools.cached_property
    def _fewest(self) -> FewestTokens:
        return FewestTokens(self.backend, self._spelling)

    def decode(self, ids: Ids, skip_special_tokens: bool = False) -> str:
        """Text of ids (a list, an array or a tensor). Invalid UTF-8 becomes U+FFFD.

        skip_special_tokens leaves out the tokens that the checkpoint marks special, as in
        transformers. `text_of` gives the text for a reader.
        """
        return self._text(ids, self.marked_ids if skip_special_tokens else frozenset())

    def text_of(self, ids: Ids) -> str:
        """`decode` without control tokens. Tags of thoughts and tool calls always stay."""
        return self._text(ids, self.control_ids)

    def _text(self, ids: Ids, hidden: Set[int]) -> str:
        shown = (self._bytes_of(id) for id in id_list(ids, self.rows) if id not in hidden)
        return b"".join(shown).decode("utf-8", "replace")

    def pieces(self, ids: Ids) -> list[str]:
        r"""One string per token, for tables. Bytes of an incomplete character are written \xe2."""
        return [
            self._bytes_of(id).decode("utf-8", "backslashreplace") for id in id_list(ids, self.rows)
        ]

    def token_bytes(self, id: int) -> bytes:
        """The bytes of one token; b"" for a padding row of the embedding."""
        if type(id) is not int or not 0 <= id < self.rows:
            (id,) = id_list([id], self.rows)  # converts numpy's ints; raises for anything else
        return self._bytes_of(id)

    def _bytes_of(self, id: int) -> bytes:
        token = self.backend.id_to_token(id) or ""
        if id in self._added_ids:
            return self._spelling.added(token)
        return self._spelling.of(token)

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        **template_kwargs: Any,
    ) -> str:
        """Messages → prompt text by the checkpoint's chat template, as in transformers.

        chat_template: the name of one of `chat_templates`, or a template's source. By default
        "tool_use" if there are tools and such a template, else "default".
        template_kwargs: variables of the template, for example enable_thinking=False.
        Raises TemplateError, also if the template would leave out tools or tool_calls.
        """
        template = self.template(chat_template, tools)
        return template.render_all(messages, tools, add_generation_prompt, **template_kwargs)

    def template(
        self, choice: str | None = None, tools: list[dict[str, Any]] | None = None
    ) -> ChatTemplate:
        """The compiled template for this choice and these tools."""
        return _compiled(
            chat_templates.pick(self.chat_templates, choice, tools), tuple(self.names.items())
        )

    def write_files(self, folder: str | os.PathLike[str]) -> None:
        """Write tokenizer.json, tokenizer_config.json and the chat templates for `from_folder`."""
        fields = {"tokenizer_class": "PreTrainedTokenizerFast"} | with_names(
            self.config, self.names
        )
        write_tokenizer(Path(folder), self.backend, fields, self.chat_templates)


class StreamDecoder:
    """Decode token by token, whole characters only.

    The pieces of `put` and the final `flush` join to the full decode. A UTF-8 sequence has at most
    4 bytes, so at most 3 bytes are held back. O(1) per token: no history is decoded again.

    Ids in `skip` add no text; `hidden` gives their text, because a stop string can name it. Unlike
    in tokenizers' DecodeStream, a character that the end cuts is not lost: it becomes U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, skip: Set[int] = frozenset()):
        self.tokenizer = tokenizer
        self.skip = skip
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def put(self, id: int) -> str:
        piece = self.tokenizer.token_bytes(id)
        return "" if id in self.skip else self._decoder.decode(piece)

    def hidden(self, id: int) -> str:
        """The text of a token in `skip`, which `put` does not give; "" for other tokens."""
        if id not in self.skip:
            return ""
        return self.tokenizer.token_bytes(id).decode("utf-8", "replace")

    def flush(self) -> str:
        """The held-back bytes as U+FFFD. Afterwards the decoder is ready for another text."""
        tail = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return tail


@functools.lru_cache(maxsize=8)
def _compiled(source: str, names: tuple[tuple[str, str], ...]) -> ChatTemplate:
    return ChatTemplate(source, dict(names))


def _places(text: str, token: str) -> Iterator[tuple[int, int]]:
    """(start, end) of every occurrence of a token in a text, in order."""
    start = text.find(token)
    while start >= 0:
        yield start, start + len(token)
        start = text.find(token, start + 1)


def _joined(places: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Sorted spans, overlapping ones joined."""
    first, last = next(places, (0, 0))
    for start, end in places:
        if start >= last:
            yield first, last
            first = start
        last = max(last, end)
    if last:
        yield first, last


def _bad_character(text: str) -> str:
    for position, character in enumerate(text):
        code = ord(character)
        if 0xDC80 <= code <= 0xDCFF:
            # Python's surrogateescape: a byte of a command line argument that is not UTF-8.
            return f"position {position}: byte 0x{code - 0xDC00:02x} is not UTF-8"
        if 0xD800 <= code <= 0xDFFF:
            return f"position {position}: U+{code:04X} is half a character"
    return ""


def _json_object(path: Path) -> dict[str, Any]:
    """The object in a file; {} if the file does not exist."""
    if not path.is_file():
        return {}
    return read_object(path, TokenizerError)
