"""A learner's progress: how many exercises and questions of a notebook were last answered right.

The answers come from a log (log.py); a learner's notebook keeps its own, progress.jsonl beside it.
"""

from nanokv.school.course import checking


def results(number: str, events: list[dict], seed: int | None) -> dict[str, str]:
    """{id: state of its last answer}.

    States: right, wrong, "wrong: MISTAKE", unanswered, missing, or "other variant" (the check had
    a seed other than `seed`).
    """
    module = checking.exercises(number)
    found = {item.id: "missing" for item in (*module.CHECKS, *module.QUESTIONS)}
    for event in events:
        id = str(event.get("id"))
        if event["event"] not in ("check", "answer") or id not in found:
            continue
        if event["event"] == "check" and seed is not None and event.get("seed") != seed:
            found[id] = "other variant"
            continue
        state = str(event.get("state"))
        mistake = str(event.get("mistake") or "")
        found[id] = f"{state}: {mistake}" if mistake else state
    return found


def counts(number: str, events: list[dict]) -> tuple[int, int, list[str], list[str]]:
    """(how many are right, how many there are, ids answered wrong, ids without an answer)."""
    found = results(number, events, seed=None)
    wrong = [id for id, state in found.items() if state.startswith("wrong")]
    open_ = [id for id, state in found.items() if state in ("unanswered", "missing")]
    return len(found) - len(wrong) - len(open_), len(found), wrong, open_


def line(number: str, events: list[dict]) -> str:
    """A line such as "05: 5 of 8 right. Not yet: 05.2. Not answered: 05.q1, 05.q2."."""
    right, of, wrong, open_ = counts(number, events)
    parts = [f"{number}: {right} of {of} right."]
    if wrong:
        parts.append(f"Not yet: {', '.join(wrong)}.")
    if open_:
        parts.append(f"Not answered: {', '.join(open_)}.")
    return " ".join(parts)


def table(numbers: list[str], events: list[dict]) -> str:
    """A line per notebook, a short one if it has no answers, and a line with the sum."""
    lines = []
    all_right = 0
    all_of = 0
    for number in numbers:
        right, of, _, open_ = counts(number, events)
        all_right += right
        all_of += of
        if len(open_) < of:
            lines.append(line(number, events))
        else:
            lines.append(f"{number}: {right} of {of} right. Not begun.")
    return "\n".join([*lines, f"all: {all_right} of {all_of} right."]) + "\n"
