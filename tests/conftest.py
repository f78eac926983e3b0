"""Fixtures that many tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.brokers import (
    authority,
    embedded_broker,
    mosquitto,
    mosquitto_tls,
    pytest_collection_modifyitems,
    start_mosquitto,
    web_broker,
)

__all__ = [
    "authority",
    "embedded_broker",
    "mosquitto",
    "mosquitto_tls",
    "pytest_collection_modifyitems",
    "start_mosquitto",
    "web_broker",
]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch computes with one thread: many small threads of nodes are slower with more."""
    import torch  # not for tests of the core without torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
