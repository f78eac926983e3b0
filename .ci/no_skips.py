"""A pytest plug-in: a skipped test fails the run, except one marked ``gpu`` or ``docker``."""

from __future__ import annotations

import pytest

ALLOWED = {"gpu", "docker"}
skipped: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail") and not ALLOWED & set(report.keywords):
        skipped.append(report.nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped:
        skipped.append(report.nodeid)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if skipped and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if skipped:
        terminalreporter.section("skipped, which fails this run", red=True)
        terminalreporter.write_line("\n".join(skipped))
