"""With several processes (`pytest -n`): a test that was given out and never came back makes the run fail."""


class EveryTestRan:
    """A plugin of the process that gives the tests out."""

    def __init__(self):
        self.expected, self.finished = set(), set()

    def pytest_xdist_node_collection_finished(self, node, ids):
        self.expected |= set(ids)

    def pytest_runtest_logreport(self, report):
        self.finished.add(report.nodeid)

    def missing(self) -> set:
        return self.expected - self.finished

    def pytest_sessionfinish(self, session):
        if (
            self.missing()
            and not (session.shouldfail or session.shouldstop)
            and session.exitstatus in (0, 1)
        ):
            session.exitstatus = 1

    def pytest_terminal_summary(self, terminalreporter):
        if self.missing():
            lost = sorted(self.missing())
            terminalreporter.write_line(
                f"{len(lost)} tests were collected and not run: {lost[:5]}", red=True
            )
