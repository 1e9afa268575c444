"""One statement of an article, and what is true of it."""

from collections.abc import Callable
from dataclasses import dataclass

from nanokv.errors import CourseError
from nanokv.school.course.answers import same


@dataclass(frozen=True)
class Article:
    """An article that was checked. `address`: where it is read; empty where no lasting address is known."""

    title: str
    address: str = ""

    @property
    def where(self) -> str:
        """In Markdown, for a page of its claims."""
        if self.address:
            return f"Read it at <{self.address}>."
        return "No lasting address of this article is known; its title finds it."


@dataclass(frozen=True)
class Claim:
    """`says` is a paraphrase; `printed` the article's own number where it has one; `where` a notebook.

    `implied`: the number does not stand in the article, but follows from what stands there.
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

    def confirm(self, verdict: str, found=None) -> None:
        """CourseError unless verdict and number are the registry's (to a thousandth)."""
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
