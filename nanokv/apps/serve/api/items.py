"""The newest items of /v1/responses in memory: a later request of the same key may refer to them.

Each key has its own, so no request finds an item of another key. Items of a request with
`store: false` are not kept, and the process forgets all at its end.
"""

import json
from typing import Any

from nanokv.apps.serve.api.errors import ApiError
from weights_loader.strict import loads

MOST_ITEMS = 1_000  # of one key
MOST_BYTES = 4_000_000  # of one key; also of all items that one request refers to


class Items:
    """Output items by key and id. Written in the event loop, read in any thread."""

    def __init__(self) -> None:
        self._kept: dict[str, dict[str, bytes]] = {}  # key → id → item as JSON, oldest first

    def keep(self, key: str, items: list[dict]) -> None:
        """Keep the items of a response, and drop the oldest ones beyond the limits."""
        kept = self._kept.setdefault(key, {})
        for item in items:
            kept[item["id"]] = json.dumps(bare(item)).encode()
        size = sum(map(len, kept.values()))
        while len(kept) > MOST_ITEMS or size > MOST_BYTES:
            size -= len(kept.pop(next(iter(kept))))

    def filled(self, key: str, fields: dict) -> dict:
        """The fields of a request with items in place of references.

        References to other items stay; `responses` refuses them. ApiError beyond MOST_BYTES.
        """
        given = fields.get("input")
        if not isinstance(given, list):
            return fields
        kept = self._kept.get(key, {})
        texts = [kept.get(reference(item), b"") for item in given]
        size = sum(map(len, texts))
        if size > MOST_BYTES:
            words = f"input refers to {size:,} bytes of items, at most {MOST_BYTES:,} are read"
            raise ApiError(400, words, "input")
        pairs = zip(given, texts, strict=True)
        return fields | {"input": [loads(text) if text else item for item, text in pairs]}


def bare(item: dict) -> dict:
    """The item without log-probabilities, which no prompt needs."""
    content = [{"type": part["type"], "text": part["text"]} for part in item.get("content", [])]
    return item | {"content": content}


def reference(item: Any) -> str:
    """The id to which an item refers; "" for other items. A reference may leave out its type."""
    if not isinstance(item, dict):
        return ""
    kind = item.get("type")
    if kind == "item_reference" or (kind is None and "role" not in item and "id" in item):
        return str(item.get("id"))
    return ""
