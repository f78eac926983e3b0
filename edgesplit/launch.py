"""A whole run from an experiment file: folder, broker, nodes, session, and what is left of it at the end."""

from __future__ import annotations

import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from edgesplit import checkpoint
from edgesplit.admission import Admissions
from edgesplit.assembly import build_model, remarks
from edgesplit.costs import ProfileCosts
from edgesplit.effects import StepDone
from edgesplit.errors import ExperimentError
from edgesplit.experiment import Experiment
from edgesplit.fleet import Elsewhere, Fleet, Processes, node_command
from edgesplit.loading import load_task
from edgesplit.methods import method_of, predict
from edgesplit.observe.progress import Progress
from edgesplit.observe.recorder import Recorder
from edgesplit.observe.report import bubble, step_seconds
from edgesplit.observe.trace import write_trace
from edgesplit.placement import placement
from edgesplit.plan import Plan
from edgesplit.rundir import RunDirectory
from edgesplit.session import Session
from edgesplit.sharing import Router, expected_seconds, with_peers
from edgesplit.sheets import Agenda, Cutting, number
from edgesplit.task import COORDINATOR
from edgesplit.topology import Topology
from edgesplit.transport.access import Access
from edgesplit.transport.broker import EmbeddedBroker
from edgesplit.transport.key import Key
from edgesplit.transport.mqtt import MqttTransport

PREDICTED_STEPS = 3

RESTARTS = 5
"""How often in a minute a node's process that is killed is started again."""

KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": "268435456", "MALLOC_MMAP_THRESHOLD_": "134217728"}
"""For glibc: memory that a message was received into is used again, not given back and faulted in anew (a receiver of
large messages spends nearly half of its time on that otherwise)."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What a user asked for on the command line, see ``edgesplit run --help``."""

    experiment: Path
    overrides: Sequence[str] = ()
    name: str | None = None
    out: Path | None = None
    resume: bool = False
    deterministic: bool = False
    style: str = "auto"
    say: Callable[[str], None] = lambda text: None
    on_step: Callable[[StepDone], None] = lambda done: None


def prepare(launch: Launch) -> tuple[Experiment, Any, Any, Plan]:
    """Read, import, prove and plan; nothing is started. Returns experiment, loaded Task, model and plan."""
    experiment = Experiment.load(launch.experiment, launch.overrides)
    topology = Topology.load(experiment.topology_path)
    loaded = load_task(experiment.task, experiment.task_args, experiment.base)
    model = build_model(loaded.task, experiment, source=loaded.source)
    return experiment, loaded, model, placement(model, topology, experiment)


def run(launch: Launch) -> dict[str, Any]:
    """Run an experiment and return its summary, which is ``metrics.json`` too.

    Raises:
        EdgesplitError: it was refused, or it failed; the folder and the last checkpoint stay.
    """
    experiment, loaded, model, plan = prepare(launch)
    folder = RunDirectory.open(name=launch.name, out=launch.out, stem=launch.experiment.stem, resume=launch.resume)
    launch.say(f"run {folder.name} in {folder.path}")
    for line in remarks(model, plan, experiment):
        launch.say(line)
    predicted = predicted_step(plan, experiment)
    reference = {"reference": loaded.reference, "args": dict(loaded.args)}
    topology = Topology.load(experiment.topology_path)
    admissions = Admissions(topology.admit, folder.name) if topology.admit is not None else None
    with ExitStack() as stack:
        recorder = stack.enter_context(Recorder(folder.path / "events.jsonl"))
        access = _access(experiment, stack)
        transport = stack.enter_context(
            MqttTransport(
                access,
                run=folder.name,
                node=COORDINATOR,
                give_up=experiment.timeouts.broker_s,
                key=Key.read(folder.key_file),
                key_required=_key_required(experiment),
            )
        )
        fleet = _fleet(experiment, access, folder, loaded.reference, plan, launch)
        stack.callback(fleet.stop, 5.0)
        session = stack.enter_context(
            Session(
                plan,
                loaded.task,
                experiment=experiment,
                model=model,
                transport=transport,
                fleet=fleet,
                reference=reference,
                identity=folder.identity,
                resume=launch.resume,
                admit=admissions.admit if admissions is not None else None,
                directory=folder.path,
                recorder=recorder,
                callbacks=[Progress(experiment.rounds, style=launch.style)],
                on_step=launch.on_step,
                say=launch.say,
            )
        )
        launch.say(f"all {len(plan.nodes())} nodes have joined")
        if launch.resume:
            _say_resumed(session, folder, launch.say)
        start = time.perf_counter()
        session.fit()
        seconds = time.perf_counter() - start
        session.close()
        return _write(folder, session, experiment, plan, predicted, seconds)


def _access(experiment: Experiment, stack: ExitStack) -> Access:
    """How the broker is reached; the embedded one is started."""
    options = experiment.broker
    if options.url != "embedded":
        return options.access(options.url, experiment.base)
    broker = stack.enter_context(EmbeddedBroker())
    return options.access(broker.url_v3 if options.mqtt == "3.1.1" else broker.url)


def _elsewhere(experiment: Experiment) -> bool:
    """Whether somebody else starts the nodes."""
    return experiment.broker.url != "embedded" and experiment.local.processes is None


def _key_required(experiment: Experiment) -> bool:
    wanted = experiment.security.key
    return wanted == "required" if wanted is not None else not _elsewhere(experiment)


def _fleet(
    experiment: Experiment, access: Access, folder: RunDirectory, reference: str, plan: Plan, launch: Launch
) -> Fleet:
    """Local processes over the embedded broker; over another broker only where ``local`` says so."""
    if _elsewhere(experiment):
        _invite(experiment, access, folder, reference, plan, launch.say)
        return Elsewhere()
    command = node_command(access, folder.name, reference, folder.key_file, state=folder.path / "state")
    command += ["--broker-s", str(experiment.timeouts.broker_s)]
    command += ["--threads", str(experiment.threads or 1)]
    if launch.deterministic:
        command.append("--deterministic")
    count = experiment.local.processes or min(len(plan.nodes()), 16)
    env = {"OMP_NUM_THREADS": str(experiment.threads or 1), **KEEP_MEMORY}
    restarts = 0 if experiment.on_lost == "stop" else RESTARTS
    return Processes(command, folder.path / "logs", count=count, env=env, restarts=restarts)


def _invite(
    experiment: Experiment,
    access: Access,
    folder: RunDirectory,
    reference: str,
    plan: Plan,
    say: Callable[[str], None],
) -> None:
    """Say how each node is to be started."""
    options = ["--broker", access.url, *access.options(), "--run", folder.name, "--task", reference]
    files = "the same task file"
    if access.file("cert"):
        files += ", of its own certificate"
    if _key_required(experiment):
        options += ["--key-file", str(folder.key_file)]
        files += " and of this key"
    else:
        say(f"nodes may join without --key-file {folder.key_file}: what they send is not proven to be theirs")
    say(f"waiting for {len(plan.nodes())} nodes; start each of them as (with the place of {files} there)")
    for node in plan.nodes():
        say(f"  edgesplit node {node} {shlex.join(options)}")


def _say_resumed(session: Session, folder: RunDirectory, say: Callable[[str], None]) -> None:
    for line in session.changed:
        say(f"changed since the checkpoint: {line}")
    if session.next_round > session.experiment.rounds:
        raise ExperimentError(
            f"{folder.path} has done its {session.experiment.rounds} rounds: set rounds higher to go on"
        )


def predicted_step(plan: Plan, experiment: Experiment) -> float | None:
    """Return the simulated seconds of a full step, or None where nothing is known of the fleet's speed."""
    profile, topology = plan.profile, plan.topology
    if profile is None or topology is None:
        return None
    plan = with_peers(plan, experiment.pipeline.share)
    router = Router(expected_seconds(plan))
    agenda = Agenda({route.device: [experiment.batch_size] for route in plan.routes})
    cutting = Cutting(experiment.pipeline.micros, experiment.pipeline.micro_batch_size)
    devices = [route.device for route in plan.routes]
    steps, first = [], 0
    for draft in agenda.round(devices, steps=PREDICTED_STEPS):
        steps.append(number(draft, cutting, first, devices, partial(router.routes, plan)))
        first += len(steps[-1].micros)
    method = method_of(experiment.pipeline.method)
    codecs = {"up": experiment.codec.up, "down": experiment.codec.down}
    timeline = predict(
        method,
        plan,
        steps,
        ProfileCosts(plan, steps, profile, Topology.from_dict(topology), codecs),
        window=experiment.pipeline.window,
        split_backward=experiment.pipeline.split_backward,
        update_all=experiment.federation.every == "step",
    )
    return statistics.median(step_seconds(timeline.events).values())  # as the measured ones are counted


def _write(
    folder: RunDirectory,
    session: Session,
    experiment: Experiment,
    plan: Plan,
    predicted: float | None,
    seconds: float,
) -> dict[str, Any]:
    events = session.recorder.events
    write_trace(folder.path / "trace.json", events)
    plan.save(folder.path / "plan.json")
    weights = session.weights()
    digest = checkpoint.weights_hash(weights)
    model = folder.path / "model.safetensors"
    checkpoint.save_model(model, weights, {"run": folder.name, "task": experiment.task})
    rounds = session.rounds
    metrics = dict(rounds[-1].metrics) if rounds else {}
    samples, training = sum(r.samples for r in rounds), sum(r.seconds for r in rounds)
    steps = list(step_seconds(events).values())
    summary = {
        "run": folder.name,
        "directory": str(folder.path),
        "accuracy": metrics.get("test/accuracy"),
        "metrics": metrics,
        "rounds": rounds[-1].number if rounds else 0,
        "steps": sum(r.steps for r in rounds),
        "skipped": sum(r.skipped for r in rounds),
        "loss": rounds[-1].loss if rounds else None,
        "best": session.best,
        "seconds": seconds,
        "samples_per_s": samples / training if training else 0.0,
        "nodes": _nodes(session, plan),
        "links": session.links(),
        "missed": {
            device: {"steps": len(steps), "samples": sum(steps.values())}
            for device, steps in session.training.conductor.coordinator.missed.items()
        },
        "quarantined": dict(session.training.conductor.coordinator.offences.barred),
        "bubble": bubble(events) if events else None,
        "predicted_s": predicted,
        "measured_s": statistics.median(steps) if steps else None,
        "seed": experiment.seed,
        "weights": digest,
        "model": str(model),
        "history": [
            {"round": r.number, "loss": r.loss, "samples": r.samples, "seconds": r.seconds, **r.metrics} for r in rounds
        ],
        "versions": versions(),
        "experiment": experiment.to_dict(),
    }
    folder.write_json("metrics.json", summary)
    return summary


def _nodes(session: Session, plan: Plan) -> dict[str, Mapping[str, Any]]:
    tiers = plan.tiers()
    return {
        node: {
            "pid": session.hellos.get(node, {}).get("pid"),
            "tier": tiers.get(node),
            "layers": [plan.layers[i] for i in plan.layers_of(node)],
        }
        for node in plan.nodes()
    }


def versions() -> dict[str, str]:
    """Return the versions of what a result depends on."""
    found = {"python": sys.version.split()[0], "platform": platform.platform()}
    for package in ("edgesplit", "torch", "numpy", "flwr", "paho-mqtt", "iotcore", "safetensors"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
