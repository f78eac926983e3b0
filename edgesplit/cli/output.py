"""What commands print: one JSON object, or lines; and whether a run's first step is done."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, nothing else there.")]

_started = False


class Refused(Exception):
    """A command has said itself what is wrong; exit with ``status``."""

    def __init__(self, status: int) -> None:
        self.status = status


def mark_started() -> None:
    """Note that the first step is done: an error from now on is a failure, not a refusal."""
    global _started  # noqa: PLW0603 - one command line, one process
    _started = True


def started() -> bool:
    """Whether the first step is done."""
    return _started


def say(text: str) -> None:
    """Print a line for people, on stderr."""
    sys.stderr.write(text + "\n")


def show(text: str) -> None:
    """Print a result for people, on stdout."""
    sys.stdout.write(text + "\n")


def show_json(values: Any) -> None:
    """Print the one JSON object, on stdout."""
    from edgesplit.rundir import plain

    sys.stdout.write(json.dumps(plain(values), default=str) + "\n")


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table on stdout, as wide as it needs where stdout is no terminal."""
    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))  # a plain string would be searched for markup
    console = Console()
    Console(width=None if console.is_terminal else 160).print(table)
