"""Fixtures that many tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.brokers import (
    authority,
    embedded_broker,
    mark_mosquitto,
    mosquitto,
    mosquitto_tls,
    start_mosquitto,
    web_broker,
)
from tests.distribution import in_order, pytest_xdist_auto_num_workers

__all__ = [
    "authority",
    "embedded_broker",
    "mosquitto",
    "mosquitto_tls",
    "pytest_xdist_auto_num_workers",
    "start_mosquitto",
    "web_broker",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_mosquitto(items)
    in_order(items)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch computes with one thread: many small threads of nodes are slower with more."""
    import torch  # not for tests of the core without torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
