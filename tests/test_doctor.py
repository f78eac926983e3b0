"""What the doctor says of the installation and of this host's clock; of brokers: ``test_doctor_broker.py``."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import pytest

from edgesplit import doctor
from edgesplit.doctor import Finding, examine, installation
from edgesplit.doctor.installation import OPTIONAL, REQUIRED, clock


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    assert len({finding.name for finding in findings}) == len(findings)
    return {finding.name: finding for finding in findings}


@pytest.fixture
def no_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine_broker", lambda url, name="broker", **options: [Finding(name, True, url)])


@pytest.mark.usefixtures("no_broker")
def test_packages() -> None:
    found = by_name(examine("mqtt://nowhere"))
    assert {"python", "clock", "broker", *REQUIRED, *OPTIONAL} == set(found)
    assert all(finding.ok for finding in found.values())
    assert found["numpy"].text == metadata.version("numpy")


@pytest.mark.usefixtures("no_broker")
def test_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name in {"paho-mqtt", "torch", "iotcore"}:
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    found = by_name(examine())
    assert found["paho-mqtt"] == Finding("paho-mqtt", False, "not installed: pip install paho-mqtt")
    assert found["torch"].ok, "a device may do without"
    assert "pip install 'edgesplit[torch]'" in found["torch"].text
    assert "embedded broker" not in found, "it is not installed, so there is none to look at"


@pytest.mark.usefixtures("no_broker")
def test_what_is_installed_and_does_not_import(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise RuntimeError("built for another interpreter")

    monkeypatch.setattr(installation.importlib, "import_module", broken)
    found = by_name(examine("mqtt://nowhere"))
    assert not found["flwr"].ok
    assert found["flwr"].text.endswith("but does not import: built for another interpreter")


def test_a_clock_that_is_obviously_wrong() -> None:
    assert clock(1_764_536_400.0) == Finding(
        "clock", True, "2025-11-30 21:00:00 UTC", values={"epoch_s": 1_764_536_400.0}
    )
    wrong = clock(3600.0)
    assert (wrong.mark, wrong.text) == ("FAIL", "1970-01-01 01:00:00 UTC: that is wrong")
    assert "set-ntp true" in wrong.hint


def test_marks() -> None:
    assert Finding("x", True, "t").mark == "ok"
    assert Finding("x", True, "t", "do this").mark == "hint"
    assert Finding("x", False, "t", "do this").mark == "FAIL"
    assert Finding("x", True, "t", values={"a": 1}).to_json() == {
        "name": "x", "ok": True, "text": "t", "hint": "", "values": {"a": 1},
    }  # fmt: skip
