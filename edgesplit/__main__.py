"""``python -m edgesplit``."""

from __future__ import annotations

from edgesplit.cli import main

main()
