"""One statement of an article, with its verdict and the truth."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nanokv.errors import CourseError
from nanokv.school.course.answers import same


@dataclass(frozen=True)
class Article:
    """An article that was checked. `address`: its URL, or "" if no permanent one is known."""

    title: str
    address: str = ""

    @property
    def where(self) -> str:
        """A sentence in Markdown that says where to read the article."""
        if self.address:
            return f"Read it at <{self.address}>."
        return "No permanent address of this article is known; search for its title."


@dataclass(frozen=True)
class Claim:
    """A claim of an article, and the truth.

    `says`: the claim, paraphrased. `value`: () → the true number, in `unit`. `printed`: the
    article's number. `implied`: the article does not print that number, but it follows from the
    text. `where`: the notebook that shows the truth.
    """

    id: str
    verdict: str
    says: str
    truth: str
    where: str
    value: Callable | None = None
    printed: float | None = None
    unit: str = ""
    implied: bool = False

    def confirm(self, verdict: str, found: Any = None) -> None:
        """Raises CourseError unless verdict and number (within 0.1 %) agree with the registry."""
        if verdict != self.verdict:
            raise CourseError(f"claim {self.id} is filed as {self.verdict}, not as {verdict!r}")
        if (
            self.value
            and found is not None
            and not isinstance(found, str)
            and not same(found, self.value(), rel=1e-3)
        ):
            raise CourseError(
                f"claim {self.id}: found {found}, but the registry computes {self.value()}"
            )
