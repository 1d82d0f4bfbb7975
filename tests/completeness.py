"""A pytest plugin: the session fails unless every test that was collected was also executed.

The parallel run hands tests to its workers by node id, so two tests that share one id become one test there,
and nothing says so. This plugin counts the ids that were collected and the tests that were reported.
"""

from __future__ import annotations

from collections import Counter

import pytest


class Completeness:
    """Compares the tests that were collected with those that were executed or skipped."""

    def __init__(self) -> None:
        self.collected: Counter[str] = Counter()
        self.executed: Counter[str] = Counter()
        self.complaints: list[str] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """One process: pytest itself has collected. (The controller of a parallel run collects nothing.)"""
        self.collected = Counter(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """A parallel run: each worker says what it has collected, and all say the same."""
        self.collected = Counter(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Every test, skipped or not, reports its setup once. A worker that crashed reports "???"."""
        if report.when in ("setup", "???"):
            self.executed[report.nodeid] += 1

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail the session if the counts differ, unless it was asked to stop early."""
        if session.shouldstop or session.shouldfail or session.config.option.collectonly:
            return
        if session.exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return
        for test, times in self.collected.items():
            if times > 1:
                self.complaints.append(f"{times} tests share the node id {test}")
            if self.executed[test] != times:
                self.complaints.append(f"{test}: collected {times}, executed {self.executed[test]}")
        if self.complaints:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say which tests are missing."""
        if self.complaints:
            terminalreporter.section("not every collected test was executed", red=True)
            for complaint in self.complaints:
                terminalreporter.line(complaint)


def pytest_configure(config: pytest.Config) -> None:
    """Count in the process that sees all reports, which is not a worker of a parallel run."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Completeness(), "completeness")
