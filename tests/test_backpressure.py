"""Nobody runs away from the slowest: what waits at a node has a bound, and who waits for whom is named."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from edgesplit.mailbox import Mailbox
from edgesplit.methods import order_of
from edgesplit.node import NodeMachine, Outcome, Run
from edgesplit.plan import Plan
from edgesplit.protocol import Commit, Sheet
from edgesplit.schedule import Micro, Step
from edgesplit.transport.base import Message
from tests.cases import RULES, chain, identical, points_task, run, tree

pytestmark = pytest.mark.usefixtures("one_thread")


def device(method: str = "pipedream", synchronous: bool = False) -> NodeMachine:
    plan = chain(points_task(), [2, 4], ["d", "e", "c"])
    return NodeMachine(
        "d", plan, order=lambda steps: order_of(method, plan, steps, "d"), synchronous=synchronous, window=1
    )


def sheet(steps: int, *, evaluate: bool) -> Message:
    found = tuple(Step(n, (Micro(2 * n, "d", 0, 1), Micro(2 * n + 1, "d", 1, 2)), {"d": (0, n)}) for n in range(steps))
    return Message(kind="sheet", sender="coordinator", meta=Sheet(found, evaluate).meta())


def forwards(machine: NodeMachine) -> list[int]:
    """Do what there is to do; return the micro-batches that went forward. No gradients are needed."""
    ran = []
    while (work := machine.next()) is not None:
        machine.done(work, Outcome(target={}))
        if isinstance(work, Run) and work.action.op == "F":
            ran.append(work.action.micro)
    return ran


def ended(step: int) -> Message:
    return Message(kind="ended", sender="coordinator", meta={"step": step})


@pytest.mark.parametrize("evaluate", [True, False], ids=["evaluation", "frozen, asynchronous"])
def test_a_device_that_needs_nothing_back_waits_for_the_others(evaluate: bool) -> None:
    machine = device()
    machine.receive(sheet(50, evaluate=evaluate))
    assert machine.lead == 7
    assert forwards(machine) == list(range(2 + 7))
    told = "the others to end step 0, before it may run 0F9 of step 4"
    assert machine.waiting_for() == told
    machine.receive(ended(0))
    assert forwards(machine) == [9, 10]
    machine.receive(ended(2))
    assert forwards(machine) == [11, 12, 13, 14]
    machine.receive(ended(49))
    assert forwards(machine)[-1] == 99


def test_what_was_ahead_of_a_sheet_that_has_ended_holds_up_no_other() -> None:
    machine = device("1f1b", synchronous=True)
    machine.receive(sheet(1, evaluate=True))
    assert forwards(machine) == [0, 1]
    machine.receive(Message(kind="sheet", sender="coordinator", meta=later(100).meta()))
    assert len(forwards(machine)) >= 1


def later(first: int) -> Sheet:
    return Sheet((Step(3, (Micro(first, "d", 0, 1),), {"d": (0, 3)}),))


class Sleeps(nn.Module):
    """Takes its time; and two of the first layers need no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.004)
        return torch.tanh(x)


def model(slow: bool = True) -> nn.Module:
    first = nn.Linear(6, 10).requires_grad_(False)
    return nn.Sequential(first, nn.Tanh(), Sleeps() if slow else nn.Tanh(), nn.Linear(10, 4)).double()


def most_held(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The most messages that any node held at a time."""
    found = {"most": 0}
    put = Mailbox.put

    def counted(self: Mailbox, message: Message) -> None:
        put(self, message)
        found["most"] = max(found["most"], len(self._held) + sum(map(len, self._early.values())))

    monkeypatch.setattr(Mailbox, "put", counted)
    return found


EVALUATED = {"evaluate": {"every": 1, "where": ["device"]}}


@pytest.mark.parametrize(
    ("how", "devices"), [({"method": "pipedream"}, 1), ({"method": "pipedream"}, 4), (EVALUATED, 1)], ids=str
)
def test_a_slow_consumer_slows_its_producers(
    how: dict[str, Any], devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """400 micro-batches pass a node that is slow, from devices that could send them all at once."""
    found = most_held(monkeypatch)
    test = type(
        "Tests", (), {"__len__": lambda self: 200, "__getitem__": lambda self, i: points_task().train(SHARD)[0]}
    )
    task = points_task([200] * devices, model=model, test=lambda shard: test())
    plan: Plan = chain(task, [2], ["d", "c"]) if devices == 1 else tree(task, [1, 2])
    run(plan, task, micros=2, batch_size=4, steps_per_round=50 if "method" in how else 1, **how, **RULES["sgd"])
    # A kind of message for each micro-batch of the lead and of the step that the fleet is at.
    most = 2 * (2 * (2 if devices == 1 else 7) + 2 + 2 * devices)
    assert 2 <= found["most"] <= most


SHARD: Any = type("Shard", (), {"index": 0})


def test_it_changes_no_result() -> None:
    task = points_task([80], model=lambda: model(slow=False))
    plan = chain(task, [1, 2], ["d", "e", "c"])
    runs = [run(plan, task, method="pipedream", micros=2, batch_size=4, **RULES["sgd"]) for _ in range(2)]
    assert identical(runs[0].weights, runs[1].weights)


def test_what_may_not_go_on_is_not_overtaken() -> None:
    """Else the weights that it sees would depend on how fast the others are."""
    machine = device()
    machine.window, machine.lead = 2, 0
    machine.receive(sheet(3, evaluate=False))
    assert [str(action) for action in machine._pending][:4] == ["0F0", "0F1", "0F2", "0B0"]
    assert forwards(machine) == [0, 1]
    assert [str(action) for action in machine._pending][:2] == ["0F2", "0B0"]
    assert machine.waiting_for() == "the others to end step 0, before it may run 0F2 of step 1"
    machine.receive(ended(0))
    assert forwards(machine)[:2] == [2, 3]


def test_under_a_synchronous_method_commits_hold_back_a_device_that_needs_nothing_back() -> None:
    machine = device("1f1b", synchronous=True)
    machine.receive(sheet(10, evaluate=False))
    assert forwards(machine) == [0, 1, 2, 3], "two steps"
    assert machine.waiting_for() == "the commit of step 0"
    machine.receive(Message(kind="commit", sender="coordinator", meta=Commit(0, True).meta()))
    assert forwards(machine) == [4, 5]
