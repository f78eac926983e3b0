"""Finds the runs of a broker by their coordinators' retained statuses: for a node that was not told which run."""

from __future__ import annotations

import time

from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion

from edgesplit.errors import FrameError, TransportError, TransportTimeout
from edgesplit.task import COORDINATOR
from edgesplit.transport.address import parse_url, password
from edgesplit.transport.frames import valid_name
from edgesplit.transport.presence import FRESH, Status

SETTLE_S = 0.5
"""How long retained statuses may take to come once the first has."""
