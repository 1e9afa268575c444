"""Small stories with the characters that the user names, and the small talk around them; the texts are in stories.toml.

A story has five parts, each drawn from several, so a handful of lines gives thousands of different stories.
{a} and {b} are the characters, {p} a place, {t} a thing.
"""

from nanokv.training.phrases import phrases

_TEXTS = phrases("stories")
REQUESTS, SINGLE_REQUESTS, OPEN_REQUESTS = (_TEXTS["requests"][name] for name in ("two", "one", "open"))
PARTS = tuple(_TEXTS["parts"].values())
GREETINGS, GREETED, GREETED_BY_NAME = (_TEXTS["greetings"][name] for name in ("said", "answered", "by_name"))
TALK = [(talk["said"], talk["answered"]) for talk in _TEXTS["talk"]]  # (what users say, what nanokv answers)
UNKNOWN, HONEST = (_TEXTS["unknown"][name] for name in ("asked", "answered"))
IMPOSSIBLE, REFUSED = (_TEXTS["impossible"][name] for name in ("asked", "answered"))
SYSTEM_PROMPTS = _TEXTS["system"]["prompts"]
