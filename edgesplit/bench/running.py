"""A session over real processes, one a node, that are gone when it ends."""

from __future__ import annotations

import contextlib
import secrets
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from edgesplit.assembly import Model
from edgesplit.effects import StepDone
from edgesplit.experiment import Experiment
from edgesplit.fleet import Processes, node_command
from edgesplit.plan import Plan
from edgesplit.session import Session
from edgesplit.task import COORDINATOR
from edgesplit.transport.mqtt import MqttTransport


class Mortal(Processes):
    """Processes of which one may be killed for good."""

    def kill(self, node: str) -> None:
        """Kill a node's process; it is not started again."""
        process = self._processes.pop(node)
        process.kill()
        process.wait()


@contextlib.contextmanager
def processes(
    url: str,
    plan: Plan,
    model: Model,
    experiment: Experiment,
    on_step: Callable[[StepDone], None] = lambda done: None,
    *,
    keep: bool = True,
) -> Iterator[Session]:
    """Start the plan's nodes as processes of one compute thread each.

    Args:
        url: the broker's.
        experiment: the options; its ``task`` is ``module:name``.
        on_step: called with each step that ends.
        keep: nodes keep their state after each step.
    """
    with mortal(url, plan, model, experiment, lambda done, fleet: on_step(done), keep=keep) as session:
        yield session


@contextlib.contextmanager
def mortal(
    url: str,
    plan: Plan,
    model: Model,
    experiment: Experiment,
    on_step: Callable[[StepDone, Mortal], None],
    *,
    keep: bool = True,
) -> Iterator[Session]:
    """As :func:`processes`, where ``on_step`` may kill some."""
    run = f"bench-{secrets.token_hex(4)}"
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="edgesplit-bench-")))
        transport = stack.enter_context(MqttTransport(url, run=run, node=COORDINATOR))
        command = node_command(url, run, experiment.task, state=logs / "state" if keep else None)
        fleet = Mortal(command, logs, env={"OMP_NUM_THREADS": "1"})
        stack.callback(fleet.stop, 5.0)
        reference = {"reference": experiment.task, "args": {}}
        yield stack.enter_context(
            Session(
                plan,
                model.task,
                experiment=experiment,
                model=model,
                transport=transport,
                fleet=fleet,
                reference=reference,
                on_step=lambda done: on_step(done, fleet),
            )
        )
