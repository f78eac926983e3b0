"""Fixtures that many tests share."""

from __future__ import annotations

from tests.brokers import embedded_broker, mosquitto, pytest_collection_modifyitems, start_mosquitto

__all__ = ["embedded_broker", "mosquitto", "pytest_collection_modifyitems", "start_mosquitto"]
