"""A notebook's function on several processes: what comes back, and what is told when one of them fails."""

import pytest
import torch

from nanokv.errors import CourseError
from nanokv.school.course.ranks import on_ranks

pytestmark = pytest.mark.slow


def total(group, x):
    found = group.gather(torch.tensor(x) * (group.rank + 1))
    return {
        "rank": group.rank,
        "of": group.size,
        "all": found.tolist(),
        "sum": int(group.sum(torch.tensor(x))),
    }


def fails(group, number):
    if group.rank == number:
        raise ValueError("no such thing")
    group.gather(torch.zeros(1))


def test_each_rank_gets_the_arguments_and_returns_its_result():
    assert on_ranks(total, 3, x=5) == [
        {"rank": rank, "of": 3, "all": [5, 10, 15], "sum": 15} for rank in range(3)
    ]


def test_the_reason_is_the_one_of_the_rank_that_failed_and_not_of_the_one_that_waited():
    with pytest.raises(CourseError, match="fails failed on rank 1: ValueError: no such thing"):
        on_ranks(fails, 2, number=1)
