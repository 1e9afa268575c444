"""The picture in the README is what the program shows today: the same conversation, recorded again, but for timings."""

import html
import re

import pytest

from record_chat import MESSAGES, PICTURE, record
from small_model import needs_kernels

TIMES = r"[\d.,]+ (ms|s|tok/s)"


def without_times(text: str) -> list[str]:
    return [re.sub(TIMES, "…", line) for line in text.splitlines() if line.strip()]


@needs_kernels
@pytest.mark.slow
def test_the_picture_shows_what_the_program_does():
    fresh = "\n".join(line.plain for line in record())
    stored = PICTURE.with_suffix(".txt").read_text(encoding="utf-8")
    assert all(message in stored for message in MESSAGES)
    assert without_times(fresh) == without_times(stored)


def test_picture_and_its_text_are_one_recording():
    """Every word of the text stands in the SVG, in order."""
    drawn = re.findall(r"<text [^>]*>(.*?)</text>", PICTURE.read_text(encoding="utf-8"))
    drawn = html.unescape("".join(drawn)).replace("\xa0", "")
    words = "".join(PICTURE.with_suffix(".txt").read_text(encoding="utf-8").split())
    assert words in re.sub(r"\s", "", drawn)
