"""``experiment.yaml``: what is run, checked before anything starts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast
from urllib.parse import urlsplit

from pydantic import Field, GetJsonSchemaHandler, PlainValidator, PrivateAttr, WithJsonSchema, model_validator

from edgesplit.errors import ExperimentError, TransportError, did_you_mean
from edgesplit.topology_file import (
    Count,
    NotNegative,
    NotYet,
    Positive,
    Section,
    TopologyFile,
    known_keys,
    parse,
    parse_yaml,
    read_yaml,
    refuse_not_yet,
)
from edgesplit.transport.access import CLIENT_ID, PREFIX, Access
from edgesplit.transport.address import SCHEMES

ASYNCHRONOUS = frozenset({"pipedream", "2bw", "xpipe"})
"""Methods without a common step: they skip locally and cannot clip globally."""

CodecName = Literal["raw", "fp16", "bf16", "int8"]
KEPT = 3
Place = Literal["coordinator", "device"]
COORDINATOR_ONLY: tuple[Place, ...] = ("coordinator",)
CountFrom0 = Annotated[int, Field(ge=0)]
Factor = Annotated[float, Field(ge=0, le=1)]


def _check_cut(value: Any) -> int | str:
    if isinstance(value, (int, str)) and not isinstance(value, bool):
        return value
    raise ValueError(f"is {value!r}, must be a layer's index or name")


def _check_loss_scale(value: Any) -> float | str:
    if value is False or value == "off":  # YAML's off is false
        return "off"
    if value == "dynamic":
        return "dynamic"
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ValueError(f"is {value!r}, must be off, dynamic or a number above 0")
    return float(value)


def _check_on_node_lost(value: Any) -> str:
    if isinstance(value, str) and (value in ("stop", "continue") or re.fullmatch(r"wait=\d+s", value)):
        return value
    near = did_you_mean(str(value), ("stop", "continue"))
    raise ValueError(f"is {value!r}, must be stop, continue or wait=60s{near}")


def _check_url(value: Any) -> str:
    if value == "embedded":
        return "embedded"
    try:
        url = urlsplit(value) if isinstance(value, str) else None
        fits = url is not None and url.scheme in SCHEMES and bool(url.hostname) and (url.port or 1) > 0
    except ValueError:  # a port that is none
        fits = False
    if url is None or not fits:
        near = did_you_mean(str(value), ("embedded",))
        shown = re.sub(r":[^/@]*@", ":...@", str(value))  # a password is not repeated
        raise ValueError(f"is {shown!r}, must be embedded or mqtt[s]:// or ws[s]://[user@]host[:port]{near}")
    if url.password is not None:
        raise ValueError("holds a password: put it into a file and name that in EDGESPLIT_PASSWORD_FILE")
    return str(value)


Cut = Annotated[int | str, PlainValidator(_check_cut), WithJsonSchema({"type": ["integer", "string"]})]
LossScale = Annotated[
    float | str,
    PlainValidator(_check_loss_scale),
    WithJsonSchema({"anyOf": [{"enum": ["off", False, "dynamic"]}, {"type": "number", "exclusiveMinimum": 0}]}),
]
OnNodeLost = Annotated[
    str,
    PlainValidator(_check_on_node_lost),
    WithJsonSchema({"type": "string", "pattern": r"^(stop|continue|wait=\d+s)$"}),
]
_URL_SCHEMA = {"type": "string", "pattern": "^(embedded|(mqtt|ws)s?://.+)$"}
Url = Annotated[str, PlainValidator(_check_url), WithJsonSchema(_URL_SCHEMA)]


class PlanOptions(Section):
    """Which layers run where."""

    planner: Literal["manual", "even", "msp"] = "even"
    """who decides: `manual` (you, by cuts; the default where there are any) or `even` (equal shares)"""
    cuts: list[Cut] | None = None
    """the layers, by index or name, with which the second and later stages begin"""
    cuts_by_device: dict[str, list[Cut]] | None = None
    """device -> its own cuts"""

    @model_validator(mode="before")
    @classmethod
    def _resolve(cls, data: Any) -> Any:
        if isinstance(data, dict) and "planner" not in data and (data.get("cuts") or data.get("cuts_by_device")):
            return {**data, "planner": "manual"}
        return data


class PipelineOptions(Section):
    """How micro-batches flow."""

    method: str = "1f1b"
    """the pipeline method, see `edgesplit methods`"""
    micros: Count | None = None
    """micro-batches of one device in one step; default 1 without micro_batch_size"""
    micro_batch_size: Count | None = None
    """instead of micros: samples in a micro-batch"""
    window: Annotated[int, Field(ge=1)] | None = None
    """a node runs the first ready one of its next so many actions; default 1, asynchronous methods 2"""
    split_backward: bool = False
    """run a backward as two actions: the gradient of the input is sent before that of the weights is computed"""
    share: list[str] = Field(default_factory=list)
    """tiers whose nodes share the micro-batches of all devices, by speeds that are measured; see above"""

    @model_validator(mode="before")
    @classmethod
    def _resolve(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        filled = dict(data)
        if filled.get("window") is None:
            filled["window"] = 2 if str(filled.get("method")) in ASYNCHRONOUS else 1
        if filled.get("micros") is None and filled.get("micro_batch_size") is None:
            filled["micros"] = 1
        return filled

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if self.micros is not None and self.micro_batch_size is not None:
            raise ValueError("micros and micro_batch_size are both set: remove one (or set it to null)")
        return self


class OptimizerOptions(Section):
    """The optimizer, where the task brings none; numbers mean what they mean in torch.optim."""

    name: Literal["sgd", "adam", "adamw"]
    """the algorithm"""
    lr: NotNegative
    """learning rate"""
    momentum: NotNegative | None = None
    """of sgd"""
    dampening: NotNegative | None = None
    """of sgd's momentum"""
    nesterov: bool | None = None
    """sgd with Nesterov's momentum"""
    weight_decay: NotNegative | None = None
    """decay of weights"""
    no_decay: str | None = None
    """parameters whose name this regular expression finds do not decay"""
    betas: Annotated[list[Factor], Field(min_length=2, max_length=2)] | None = None
    """of adam and adamw: decay of the two running means"""
    eps: Positive | None = None
    """of adam and adamw: added to the denominator"""


class LrScheduleOptions(Section):
    """The factor on the learning rate, by global step."""

    name: Literal["constant", "linear", "cosine", "step"]
    """the shape"""
    warmup_steps: CountFrom0 | None = None
    """steps of linear rise before it"""
    total_steps: Count | None = None
    """of linear and cosine: the step at which min_factor is reached; default: the run's last"""
    min_factor: Factor | None = None
    """what the factor does not fall below"""
    every: Count | None = None
    """of step: steps between two drops"""
    gamma: Factor | None = None
    """of step: the factor of a drop"""


class CodecOptions(Section):
    """How arrays are encoded on links."""

    up: CodecName = "raw"
    """activations on their way to the next stage"""
    down: CodecName = "raw"
    """gradients on their way back"""


class DataOptions(Section):
    """What the task's data functions get as `shard.data`, and who takes part."""

    partition: dict[str, Any] | None = None
    """how the data is divided among devices, free for the task: `{name: dirichlet, alpha: 0.5}`"""
    per_round: Count | None = None
    """devices that take part in a round, chosen from the run's seed; default: all"""


class FederationOptions(Section):
    """How replicas of a layer become one."""

    strategy: str = "fedavg"
    """the strategy, see `edgesplit methods`"""
    strategy_args: dict[str, Any] = Field(default_factory=dict)
    """the strategy's own arguments"""
    every: Literal["round", "step"] = "round"
    """`round`: weights are averaged at the round's end; `step`: gradients are added before each update"""
    tiers: list[str] | None = None
    """tiers whose replicas take part; default: every one that holds replicas"""
    optimizer_state: Literal["keep", "average", "reset"] = "keep"
    """what becomes of optimizer state at an aggregation"""
    buffers: Literal["average", "local"] = "average"
    """what becomes of buffers, such as BatchNorm's means, at an aggregation"""


class EvaluateOptions(Section):
    """When and where the model is evaluated."""

    every: CountFrom0 = 1
    """rounds between two evaluations; 0: never"""
    where: list[Place] = Field(default_factory=lambda: list(COORDINATOR_ONLY))
    """on the held-out set, on the devices' own test data, or both"""
    best: str | None = None
    """the metric that says which round was the best"""


class CheckpointOptions(Section):
    """When checkpoints are written."""

    every: CountFrom0 = 1
    """rounds between two checkpoints; 0: none"""
    keep: Count = KEPT
    """how many are kept"""


class LocalOptions(Section):
    """A whole fleet on one machine."""

    processes: Count | None = None
    """processes that the nodes are spread over; default: one a node, up to 16"""


class BrokerOptions(Section):
    """The broker; a text alone is its url."""

    url: Url = "embedded"
    """`embedded`, or `mqtt[s]://[user@]host[:port]`, or `ws[s]://[user@]host[:port]/path`"""
    ca: str | None = None
    """file of the certificates that the broker's must be signed by; default: EDGESPLIT_CA, or those of the system"""
    cert: str | None = None
    """file of the coordinator's own certificate, where the broker demands one; default: EDGESPLIT_CERT"""
    key: str | None = None
    """file of the private key to it; default: EDGESPLIT_CERT_KEY"""
    topic_prefix: str = PREFIX
    """the first levels of all topics"""
    client_id: str = CLIENT_ID
    """what client ids are made of: `{prefix}`, `{run}`, `{node}`, and `{boot}`, which is another at each start"""
    mqtt: Literal["5", "3.1.1"] | None = None
    """the version of MQTT; default: 5 where the broker speaks it"""

    @model_validator(mode="before")
    @classmethod
    def _resolve(cls, data: Any) -> Any:
        return {"url": _check_url(data)} if isinstance(data, str) else data

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.url == "embedded" and (self.ca or self.cert or self.key):
            raise ValueError("ca, cert and key have no effect with the embedded broker: remove them")
        try:
            self.access("mqtt://localhost" if self.url == "embedded" else self.url)
        except TransportError as error:
            raise ValueError(str(error)) from None
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [_URL_SCHEMA, handler(core)]}

    def access(self, url: str, base: Path | None = None) -> Access:
        """Return how to get in at ``url``; files are in the folder ``base``."""

        def file(name: str | None) -> str | None:
            return str(base / name) if base is not None and name is not None else name

        return Access(
            url,
            ca=file(self.ca),
            cert=file(self.cert),
            cert_key=file(self.key),
            prefix=self.topic_prefix,
            client_id=self.client_id,
            mqtt=self.mqtt,
        )


class SecurityOptions(Section):
    """Who is believed."""

    key: Literal["required", "optional"] | None = None
    """who must sign with the run's key: all (`required`; default if the run starts them), or who did (`optional`)"""


class LimitOptions(Section):
    """What a device may do before the run goes on without it."""

    quarantine_after: Count | None = None
    """offences of a device (what is no message, not finite, or too heavy) after which it is left out; default: never"""
    device_weight: Positive | None = None
    """the most that a sample may weigh; a device that says more commits an offence"""
    device_norm: Annotated[float, Field(ge=1)] | None = None
    """a device's change in a round is clipped to so many times the median of those that hold the same layers"""


class TimeoutOptions(Section):
    """How long is waited."""

    join_s: Positive = 60.0
    """for all nodes to join"""
    step_s: Positive = 120.0
    """for a step that makes no progress"""
    broker_s: Positive = 120.0
    """for a broker that cannot be reached"""


class Experiment(Section):
    """One run: what is trained, where, how, and for how long."""

    task: str
    """`path.py:name` or `module:name` of the Task, or of a function that returns it"""
    task_args: dict[str, Any] = Field(default_factory=dict)
    """arguments of that function"""
    topology: str
    """the topology file, from this file's folder"""
    tiers: list[str] | None = None
    """tiers of the stages of a route, from the device on; default: all of the topology, from below"""
    plan: PlanOptions = Field(default_factory=lambda: PlanOptions.model_validate({}))
    """which layers run where"""
    pipeline: PipelineOptions = Field(default_factory=lambda: PipelineOptions.model_validate({}))
    """how micro-batches flow"""
    batch_size: Count = 32
    """samples of one device in one step"""
    rounds: Count = 1
    """rounds of the run"""
    steps_per_round: Count | None = None
    """steps of a round"""
    epochs_per_round: Count | None = None
    """instead of steps_per_round: passes over a device's data in a round; default 1"""
    optimizer: OptimizerOptions | None = None
    """the optimizer, where the task brings none"""
    lr_schedule: LrScheduleOptions | None = None
    """the factor on the learning rate, where the task brings none"""
    clip_norm: Positive | None = None
    """the norm that the whole model's gradient is clipped to"""
    codec: CodecOptions = Field(default_factory=CodecOptions)
    """how arrays are encoded on links"""
    data: DataOptions = Field(default_factory=DataOptions)
    """what the task's data functions get, and who takes part"""
    federation: FederationOptions = Field(default_factory=FederationOptions)
    """how replicas of a layer become one"""
    evaluate: EvaluateOptions = Field(default_factory=EvaluateOptions)
    """when and where the model is evaluated"""
    checkpoint: CheckpointOptions = Field(default_factory=CheckpointOptions)
    """when checkpoints are written"""
    log: list[str] = Field(default_factory=list)
    """where metrics go beside the run's folder"""
    max_skipped: Count = 3
    """non-finite steps in a row that are skipped before the run ends"""
    loss_scale: LossScale = "off"
    """what losses are multiplied by: `off`, `dynamic` or a number"""
    on_node_lost: OnNodeLost = "wait=60s"
    """when a node is lost: `stop`, `wait=60s` for it, or `continue` the round without it where the others can"""
    local: LocalOptions = Field(default_factory=LocalOptions)
    """a whole fleet on one machine"""
    broker: BrokerOptions = Field(default_factory=BrokerOptions)
    """the broker: `embedded`, a url, or a mapping of what is needed to get in"""
    security: SecurityOptions = Field(default_factory=SecurityOptions)
    """who is believed"""
    limits: LimitOptions = Field(default_factory=LimitOptions)
    """what a device may do before the run goes on without it"""
    emulate: bool = False
    """whether links and nodes are as slow as the topology says; an error where this machine is too slow for it"""
    seed: CountFrom0 = 0
    """of everything that is random"""
    dtype: Literal["float32", "float64"] = "float32"
    """what the model computes in"""
    threads: Count | None = None
    """compute threads of a node; default: one where nodes share a machine"""
    timeouts: TimeoutOptions = Field(default_factory=TimeoutOptions)
    """how long is waited"""

    _base: Path = PrivateAttr(default_factory=Path)

    @model_validator(mode="before")
    @classmethod
    def _resolve(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("steps_per_round") is None and data.get("epochs_per_round") is None:
            return {**data, "epochs_per_round": 1}
        return data

    @property
    def base(self) -> Path:
        """The folder that relative paths begin at: that of the file."""
        return self._base

    @property
    def on_lost(self) -> Literal["stop", "wait", "continue"]:
        """What is done about a lost node."""
        return "wait" if self.on_node_lost.startswith("wait") else cast(Literal["stop", "continue"], self.on_node_lost)

    @property
    def patience_s(self) -> float:
        """How many seconds a lost node is waited for."""
        return float(self.on_node_lost[5:-1]) if self.on_lost == "wait" else 0.0

    @property
    def topology_path(self) -> Path:
        """Where the topology file is."""
        return self._base / self.topology

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> Self:
        """Read a file, and set what ``overrides`` say: ``pipeline.micros=4``, the value in YAML.

        Raises:
            ExperimentError: one line that names file or override, key and value.
        """
        path = Path(path)
        return cls.from_dict(read_yaml(path, ExperimentError), overrides, source=path.name, base=path.parent)

    @classmethod
    def from_dict(
        cls, data: Any, overrides: Sequence[str] = (), *, source: str = "experiment", base: str | Path = "."
    ) -> Self:
        """Check the mapping that a file holds; ``source`` begins the errors.

        Raises:
            ExperimentError: one line that names file or override, key and value.
        """
        if isinstance(data, Mapping) and "nodes" in data and "task" not in data:
            raise ExperimentError(f"{source} describes a topology: name it as 'topology' in an experiment's file")
        given = [_read_override(text) for text in overrides]
        for place, value in given:
            if isinstance(data, Mapping) and isinstance(data.get("broker"), str) and place[:1] == ("broker",):
                data = {**data, "broker": {"url": data["broker"]}}  # the override may add to it
            data = _set(data, place, value)

        def origin(place: tuple[str, ...]) -> str:
            return "override" if any(place[: len(key)] == key for key, _ in given) else source

        experiment = parse(cls, data, origin, ExperimentError)
        refuse_not_yet(experiment, NOT_YET, origin, ExperimentError)
        try:
            check_options(experiment)
        except ExperimentError as error:
            raise ExperimentError(f"{source}: {error}") from None
        experiment._base = Path(base)  # noqa: SLF001 - its own class, and not a key of the file
        return experiment

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values with every default filled in."""
        return self.model_dump(mode="json")


NOT_YET = (
    NotYet("log", " with entries", bool, "metrics are in the run's folder; leave log empty"),
    NotYet("plan.planner", " msp", lambda value: value == "msp", "use manual or even"),
)


def check_options(experiment: Experiment) -> None:
    """Refuse combinations that no model is needed to judge.

    Raises:
        ExperimentError: two options contradict each other, or one has no effect.
    """
    for refused, why in _combinations(experiment):
        if refused:
            raise ExperimentError(why)
    for tier in experiment.federation.tiers or ():
        if experiment.tiers is not None and tier not in experiment.tiers:
            near = did_you_mean(tier, experiment.tiers)
            raise ExperimentError(f"federation.tiers names {tier!r}, which is not in tiers{near}")


def _combinations(experiment: Experiment) -> list[tuple[bool, str]]:
    plan, pipeline, federation = experiment.plan, experiment.pipeline, experiment.federation
    evaluate, checkpoint, batch = experiment.evaluate, experiment.checkpoint, experiment.batch_size
    limits = experiment.limits
    by_step, free = federation.every == "step", pipeline.method in ASYNCHRONOUS
    micros, size, method = pipeline.micros or 1, pipeline.micro_batch_size or 1, f"method {pipeline.method!r}"
    return [
        (
            experiment.steps_per_round is not None and experiment.epochs_per_round is not None,
            "steps_per_round and epochs_per_round are both set: remove one (or set it to null)",
        ),
        (
            plan.planner != "manual" and (plan.cuts is not None or bool(plan.cuts_by_device)),
            f"plan.cuts has no effect with planner {plan.planner!r}: remove it, or use planner 'manual'",
        ),
        (micros > batch, f"pipeline.micros is {micros}, but batch_size is {batch}: a micro-batch needs a sample"),
        (size > batch, f"pipeline.micro_batch_size is {size}, but batch_size is {batch}: lower it"),
        (
            by_step and federation.strategy != "fedavg",
            f"federation.every: step goes with strategy 'fedavg' only, not {federation.strategy!r}: use every: round",
        ),
        (
            by_step and bool(federation.strategy_args),
            "federation.strategy_args has no effect with every: step: remove it",
        ),
        (
            by_step and federation.optimizer_state != "keep",
            f"federation.optimizer_state: {federation.optimizer_state} has no effect with every: step: remove it",
        ),
        (
            bool(pipeline.share) and not by_step,
            "pipeline.share needs federation.every: step: copies that train apart would see other data each time",
        ),
        ("device" in pipeline.share, "pipeline.share names 'device': a device's data stays on it; share other tiers"),
        (by_step and free, f"federation.every: step needs a common step, which {method} has not: use every: round"),
        (
            free and experiment.clip_norm is not None,
            f"clip_norm needs a common step, which {method} has not: remove it, or use a synchronous method",
        ),
        (
            free and experiment.loss_scale != "off",
            f"loss_scale needs a common step, which {method} has not: turn it off, or use a synchronous method",
        ),
        (
            evaluate.every == 0 and (evaluate.best is not None or tuple(evaluate.where) != COORDINATOR_ONLY),
            "evaluate.every is 0, so evaluate.where and evaluate.best have no effect: remove them",
        ),
        (
            evaluate.every > 0 and not evaluate.where,
            "evaluate.where is empty: name coordinator or device, or set evaluate.every to 0",
        ),
        (
            evaluate.best is not None and "coordinator" not in evaluate.where,
            "evaluate.best is judged on the held-out set: add coordinator to evaluate.where",
        ),
        (
            by_step and federation.tiers is not None,
            "federation.tiers has no effect with every: step: remove it",
        ),
        (
            limits.device_weight is not None and limits.quarantine_after is None,
            "limits.device_weight has no effect without limits.quarantine_after: set both",
        ),
        (
            by_step and limits.device_norm is not None,
            "limits.device_norm has no effect with every: step, where gradients are added: remove it, or set clip_norm",
        ),
        (
            limits.quarantine_after is not None and free,
            f"limits.quarantine_after needs a common step, which {method} has not: remove it",
        ),
        (
            limits.quarantine_after is not None and limits.quarantine_after > experiment.max_skipped,
            f"limits.quarantine_after is {limits.quarantine_after}: max_skipped must not be less",
        ),
        (
            checkpoint.every == 0 and checkpoint.keep != KEPT,
            "checkpoint.every is 0, so checkpoint.keep has no effect: remove it",
        ),
    ]


def schema() -> dict[str, Any]:
    """JSON schemas of the two files that a user writes: ``experiment`` and ``topology``."""
    return {"experiment": Experiment.model_json_schema(), "topology": TopologyFile.model_json_schema()}


def _read_override(text: str) -> tuple[tuple[str, ...], Any]:
    key, equals, value = text.partition("=")
    place = tuple(key.split("."))
    if not equals or not all(place):
        raise ExperimentError(f"override: {text!r} must be key=value, for example pipeline.micros=4")
    for depth, part in enumerate(place):
        known = known_keys(Experiment, place[:depth])
        if known is not None and part not in known:
            near = did_you_mean(part, known)
            raise ExperimentError(f"override: {'.'.join(place[: depth + 1])}: unknown key{near}")
    return place, parse_yaml(value, f"override: {key}", ExperimentError)


def _set(data: Any, place: tuple[str, ...], value: Any) -> Any:
    """A copy of ``data`` with ``value`` at ``place``."""
    if not place:
        return value
    within: Mapping[str, Any] = data if isinstance(data, dict) else {}
    return {**within, place[0]: _set(within.get(place[0]), place[1:], value)}
