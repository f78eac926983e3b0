"""Devices that no file names: with a token they join a run between two rounds."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from edgesplit.admission import Admissions, proof_of, read_token
from edgesplit.assembly import build_model
from edgesplit.errors import EdgesplitError, RunError, TopologyError
from edgesplit.fleet import Threads
from edgesplit.options import options
from edgesplit.plan import Plan
from edgesplit.session import Session
from edgesplit.topology import Admission, Node, Topology
from edgesplit.transport.memory import MemoryTransport
from edgesplit.worker import Worker
from tests.cases import RULES, points_task, tree
from tests.test_replanning import plan_of, routes

TOKEN, OTHER = "0123456789abcdef", "fedcba9876543210"
ROWS: list[dict[str, Any]] = [
    {"name": "d1", "tier": "device", "parent": "e1"},
    {"name": "d2", "tier": "device", "parent": "e1"},
    {"name": "d3", "tier": "device", "parent": "e2"},
    {"name": "e1", "tier": "edge", "parent": "c"},
    {"name": "e2", "tier": "edge", "parent": "c"},
    {"name": "c", "tier": "cloud", "parent": None},
]


def admissions(tmp_path: Path, *lines: str, most: int | None = None) -> Admissions:
    file = tmp_path / "tokens.txt"
    file.write_text("\n".join(["# tokens", *lines, ""]))
    return Admissions(Admission(("e1", "e2"), str(file), most), "run")


def hello(node: str, token: str, run: str = "run") -> dict[str, str]:
    return {"life": "1", "admission": proof_of(token, run, node, "1")}


def test_a_token_lets_a_device_in_under_the_parent_with_the_fewest(tmp_path: Path) -> None:
    plan = plan_of("d1 e1:2 c:4", "d2 e1:2 c:4", "d3 e2:1 c:4 d3:5", topology={"nodes": ROWS})
    found = admissions(tmp_path, TOKEN).admit("new", hello("new", TOKEN), plan)
    assert routes(found) == ["d1 e1 c", "d2 e1 c", "d3 e2 c d3", "new e2 c new"]
    assert found.routes[-1].stages[1][1:] == (1, 4)
    assert found.tiers()["new"] == "device"


def test_what_is_refused(tmp_path: Path) -> None:
    plan = plan_of("d1 e1:2 c:4", topology={"nodes": ROWS})
    gate = admissions(tmp_path, TOKEN, f"mine {OTHER}", most=1)
    for node, told in (
        ("new", {"life": "1"}),
        ("new", hello("new", "x" * 16)),
        ("new", hello("new", OTHER)),  # another's own
        ("new", hello("old", TOKEN)),
        ("new", hello("new", TOKEN, run="another")),
        ("new", hello("new", TOKEN) | {"life": "2"}),
        ("new", {"life": "1", "admission": ["x"]}),
    ):
        with pytest.raises(RunError, match="shows no token that lets it in"):
            gate.admit(node, told, plan)
    gate.admit("mine", hello("mine", OTHER), plan)
    gate.admit("mine", hello("mine", OTHER), plan)
    with pytest.raises(RunError, match="takes 1 devices"):
        gate.admit("new", hello("new", TOKEN), plan)


@pytest.mark.parametrize(("text", "says"), [("", "holds no token"), ("short\n", "at least 16"), ("a b c\n", "a line")])
def test_files_of_tokens(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "tokens.txt"
    file.write_text(text)
    with pytest.raises(TopologyError, match=says):
        read_token(file)
    with pytest.raises(TopologyError, match="cannot read the tokens"):
        read_token(tmp_path / "nothing")


def test_the_topology_says_who_may_join(tmp_path: Path) -> None:
    file = tmp_path / "home.yaml"
    nodes = "nodes:\n  c: {tier: cloud}\n  e: {tier: edge, count: 2, parent: c}\n  d: {tier: device, parent: e-1}\n"
    file.write_text(nodes + "admit: {tier: device, parent: e, token_file: tokens.txt, max: 300}\n")
    assert Topology.load(file).admit == Admission(("e-1", "e-2"), str(tmp_path / "tokens.txt"), 300)
    for line, says in (("tier: edge, parent: e", "only nodes of tier 'device'"), ("tier: device, parent: f", "'f'")):
        file.write_text(nodes + f"admit: {{{line}, token_file: t}}\n")
        with pytest.raises(TopologyError, match=says):
            Topology.load(file)


def test_a_device_joins_a_run_between_two_rounds(tmp_path: Path) -> None:
    task = points_task([45, 30, 20])
    plan = tree(task, [1, 4], ["d1", "d3"])
    rows = [{key: value for key, value in row.items() if value is not None} for row in ROWS if row["name"] != "d2"]
    plan = Plan(plan.layers, plan.routes, Topology.of([Node(**row) for row in rows]).to_dict())
    experiment = options(dtype="float64", evaluate={"every": 0}, rounds=50, batch_size=20, **RULES["sgd"])
    model = build_model(task, experiment)
    transport = MemoryTransport()
    fleet = Threads(lambda node: transport, lambda assignment: model.kit)
    gate = admissions(tmp_path, TOKEN)
    said: list[str] = []

    def join(name: str, token: str) -> threading.Thread:
        def serve() -> None:
            worker = Worker(
                name,
                transport,
                lambda assignment: model.kit,
                prove=lambda life: proof_of(token, "run", name, life),
                say=said.append,
            )
            try:
                worker.run()
            except EdgesplitError as error:
                said.append(str(error))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        return thread

    with Session(
        plan, task, experiment=experiment, model=model, admit=gate.admit, transport=transport, fleet=fleet
    ) as session:
        first = session.fit(1)[-1].samples
        threads = [join("new", TOKEN), join("stranger", OTHER)]
        while len(session.plan.routes) < 3 and session.next_round < 50:
            session.fit(1)
        assert [route.device for route in session.plan.routes] == ["d1", "d3", "new"]
        assert session.fit(1)[-1].samples > first
    for thread in threads:
        thread.join(10.0)
    assert any("it joins with the next round" in line for line in said)
    assert any("'stranger' is not named in the topology" in line for line in said)
