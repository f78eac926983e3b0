"""The command line. Heavy modules are imported inside the commands: ``--help`` is quick."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from types import FrameType

import click
import typer

from edgesplit.cli import bench, doctor, node, planning, run, tables, trace
from edgesplit.cli.output import Refused, started
from edgesplit.errors import EdgesplitError, notes

app = typer.Typer(
    name="edgesplit",
    help="Train one PyTorch model across devices, edge servers and cloud, exactly.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for part in (run, node, planning, tables, trace, doctor, bench):
    part.register(app)

REFUSED, FAILED, INTERRUPTED = 2, 1, 130


def main() -> None:
    """Run the command line and exit: 0 succeeded, 2 refused before the first step, 1 failed after it, 130 Ctrl-C."""
    signal.signal(signal.SIGTERM, _interrupt)
    sys.exit(_status())


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _status() -> int:
    try:
        result = app(standalone_mode=False)
    except Refused as error:
        return error.status
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return REFUSED
    except click.ClickException as error:
        return _say(error.format_message(), REFUSED)
    except (KeyboardInterrupt, click.exceptions.Abort):
        return _say("interrupted", INTERRUPTED)
    except EdgesplitError as error:
        return _say(str(error), FAILED if started() else REFUSED)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _say(f"{where}{error.strerror or error}{notes(error)}", FAILED if started() else REFUSED)
    except ImportError as error:
        return _say(f"{error}: install it, for example with pip install 'edgesplit[demo]'", REFUSED)
    except Exception as error:
        if os.environ.get("EDGESPLIT_DEBUG"):
            raise
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"({last.filename}:{last.lineno}; EDGESPLIT_DEBUG=1 shows more)"
        return _say(f"{type(error).__name__}: {error}{notes(error)} {where}", FAILED if started() else REFUSED)
    if result == INTERRUPTED:  # typer makes this of a KeyboardInterrupt, without a word
        return _say("interrupted", INTERRUPTED)
    return result if isinstance(result, int) else 0


def _say(text: str, status: int) -> int:
    line = " ".join(text.split())
    sys.stderr.write(f"error: {line[:1].lower()}{line[1:]}\n" if line.startswith("No such") else f"error: {line}\n")
    return status
