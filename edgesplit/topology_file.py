"""``home.yaml``: what a user writes, checked and expanded into a :class:`~edgesplit.topology.Topology`.

The reading of YAML and the one-line errors are here too; the experiment file uses them.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from edgesplit.errors import EdgesplitError, TopologyError, did_you_mean
from edgesplit.topology import DEVICE, Admission, Link, Node, Topology, unknown_parent

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Mbps = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """A mapping of a file: unknown keys are errors, values are not converted, nothing changes afterwards."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


Model = TypeVar("Model", bound=Section)


class NodeEntry(Section):
    """A node, or with ``count`` a group of like nodes."""

    tier: str
    """`device`, `edge`, `cloud`, or a name of your own; the chains of parents give the order"""
    count: Count | None = None
    """makes a group: `edge` with `count: 2` is `edge-1` and `edge-2`"""
    parent: str | None = None
    """the node, or the group, above"""
    spread: Literal["round-robin", "block"] | None = None
    """how members meet a parent group: in turn (`round-robin`, the default), or in equal runs (`block`)"""
    gflops: Positive | None = None
    """speed in 10^9 floating-point operations a second"""
    memory_mb: Positive | None = None
    """memory it may use, in 10^6 bytes"""
    up_mbps: Mbps | None = None
    """rate to the parent in 10^6 bits a second; default: no limit"""
    down_mbps: Mbps | None = None
    """rate from the parent in 10^6 bits a second; default: no limit"""
    latency_ms: NotNegative | None = None
    """latency of the link to the parent, one way; default 0"""
    processes: Count = 1
    """ranks of a cloud node's group"""
    runtime: Literal["torch", "onnx"] = "torch"
    """what computes there"""
    profile: str | None = None
    """name of a board's profile"""
    threads: Count | None = None
    """compute threads; default: the experiment's"""
    hours: str | None = None
    """of a device: when it takes part, on the coordinator's clock, like `01:00-05:00`; default: always"""
    max_mb_per_round: Positive | None = None
    """of a device: 10^6 bytes that it may send and get in a round; it sits out until the mean is within that"""
    config: dict[str, Any] = Field(default_factory=dict)
    """what the task's data functions get as `shard.config`; `{name}` in a text becomes the node's name"""


class LinkEntry(Section):
    """A connection beside those between a node and its parent."""

    between: Annotated[list[str], Field(min_length=2, max_length=2)]
    """the two nodes"""
    up_mbps: Mbps | None = None
    """rate from the first to the second in 10^6 bits a second; default: no limit"""
    down_mbps: Mbps | None = None
    """rate from the second to the first in 10^6 bits a second; default: no limit"""
    latency_ms: NotNegative = 0.0
    """latency, one way"""


class BrokerEntry(Section):
    """Where the broker runs."""

    at: str
    """the node on whose host the broker runs: messages go sender, broker's host, receiver"""


class AdmitEntry(Section):
    """How devices join that no file names."""

    tier: str
    """their tier"""
    parent: str
    """the node or group above them"""
    token_file: str
    """the file of tokens that let a device in"""
    max: Count | None = None
    """how many may join"""


class TopologyFile(Section):
    """The nodes of a fleet and how they are connected."""

    nodes: dict[str, NodeEntry]
    """name -> node or group; devices count in this order"""
    links: list[LinkEntry] = Field(default_factory=list)
    """connections beside those between a node and its parent"""
    broker: BrokerEntry | None = None
    """where the broker runs; default: beside the coordinator, and messages count as going the direct way"""
    admit: AdmitEntry | None = None
    """devices that no file names"""


class NotYet(NamedTuple):
    """A key of the design that this version refuses by name where ``refused(value)``; ``when`` says that in words."""

    key: str
    when: str
    refused: Callable[[Any], bool]
    why: str


NOT_YET = (
    NotYet("nodes.*.profile", "", lambda value: value is not None, "give gflops and memory_mb"),
    NotYet("nodes.*.runtime", " onnx", lambda value: value == "onnx", "nodes compute with torch"),
    NotYet("nodes.*.threads", "", lambda value: value is not None, "set the experiment's threads"),
    NotYet("nodes.*.processes", " above 1", lambda value: value > 1, "a node is one process"),
)


def read_topology(path: Path) -> Topology:
    """Read, check and expand a topology file.

    Raises:
        TopologyError: one line, beginning with the file's name.
    """
    return parse_topology(read_yaml(path, TopologyError), path.name, path.parent)


def parse_topology(data: Any, source: str, base: Path = Path()) -> Topology:
    """Check and expand the mapping that a topology file holds.

    Args:
        source: begins the errors.
        base: the folder that relative paths begin at.
    """
    entries = parse(TopologyFile, data, lambda _: source, TopologyError)
    refuse_not_yet(entries, NOT_YET, lambda _: source, TopologyError)
    try:
        return _expand(entries, base)
    except TopologyError as error:
        raise TopologyError(f"{source}: {error}") from None


def _expand(entries: TopologyFile, base: Path) -> Topology:
    groups = {
        name: [name] if entry.count is None else [f"{name}-{i + 1}" for i in range(entry.count)]
        for name, entry in entries.nodes.items()
    }
    owner: dict[str, str] = {}
    for name, members in groups.items():
        for member in members:
            if member in owner:
                raise TopologyError(f"{name!r} and {owner[member]!r} both make a node {member!r}: rename one")
            owner[member] = name
    counted = {name: members for name, members in groups.items() if entries.nodes[name].count is not None}
    for name in counted:
        if name in owner:
            raise TopologyError(f"{owner[name]!r} makes a node {name!r}, which is the name of a group: rename one")
    turn: Counter[str] = Counter()
    nodes = []
    for name, entry in entries.nodes.items():
        _check_effect(name, entry, counted)
        if entry.parent is not None and entry.parent not in groups and entry.parent not in owner:
            raise unknown_parent(groups[name][0], entry.parent, [*groups, *owner])
        for place, member in enumerate(groups[name]):
            parent = entry.parent
            if parent is not None and parent in counted:
                above = counted[parent]
                at = place * len(above) // len(groups[name]) if entry.spread == "block" else turn[parent]
                turn[parent] += entry.spread != "block"
                parent = above[at % len(above)]
            nodes.append(_node(member, entry, parent))
    links = [link for place, entry in enumerate(entries.links) for link in _links(place, entry, counted)]
    broker_at = entries.broker.at if entries.broker else None
    if broker_at is not None:
        _refuse_group("broker.at", broker_at, counted)
    found = Topology.of(nodes, links, broker_at)
    return found if entries.admit is None else replace(found, admit=_admission(entries.admit, groups, found, base))


def _admission(entry: AdmitEntry, groups: Mapping[str, list[str]], topology: Topology, base: Path) -> Admission:
    if entry.tier != DEVICE:
        raise TopologyError(f"admit.tier is {entry.tier!r}: only nodes of tier {DEVICE!r} can join that no file names")
    parents = groups.get(entry.parent, [entry.parent])
    for parent in parents:
        if parent not in topology.nodes:
            near = did_you_mean(parent, [*groups, *topology.nodes])
            raise TopologyError(f"admit.parent is {parent!r}, which is not a node{near}")
    return Admission(tuple(parents), str(base / entry.token_file), entry.max)


def _check_effect(name: str, entry: NodeEntry, counted: Mapping[str, list[str]]) -> None:
    if entry.parent is None:
        for key in ("up_mbps", "down_mbps", "latency_ms"):
            if getattr(entry, key) is not None:
                raise TopologyError(f"node {name!r} has no parent, so {key} has no effect: remove it, or name a parent")
    if entry.spread is not None and (entry.parent not in counted or entry.count is None):
        raise TopologyError(f"node {name!r}: spread has no effect without count and a parent with count: remove it")


def _node(name: str, entry: NodeEntry, parent: str | None) -> Node:
    values = entry.model_dump(exclude={"count", "spread", "parent", "config"}, exclude_none=True)
    return Node(name=name, parent=parent, config=_named(entry.config, name), **values)


def _named(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return {key: _named(part, name) for key, part in value.items()}
    if isinstance(value, list):
        return [_named(part, name) for part in value]
    return value.replace("{name}", name) if isinstance(value, str) else value


def _links(place: int, entry: LinkEntry, counted: Mapping[str, list[str]]) -> Iterator[Link]:
    for end in entry.between:
        _refuse_group(f"links.{place}.between", end, counted)
    first, second = entry.between
    yield Link(first, second, entry.up_mbps or math.inf, entry.latency_ms / 1000)
    yield Link(second, first, entry.down_mbps or math.inf, entry.latency_ms / 1000)


def _refuse_group(key: str, name: str, counted: Mapping[str, list[str]]) -> None:
    if name in counted:
        raise TopologyError(f"{key}: {name!r} is a group: name one of its nodes, for example {counted[name][0]!r}")


# --- from a file to checked values, in one-line errors ------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """Safe YAML, and stricter: keys are text and unique, ``5e-4`` is a number, a date stays text."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.deep_construct = True  # an alias within its own anchor is refused, instead of a value that holds itself

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[Any, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise _Refused(line, f"key {key_node.value!r} is not text: put it in quotes")
            if key in lines:
                raise _Refused(line, f"key {key!r} is there twice (first on line {lines[key]}): remove one")
            lines[key] = line
        return super().construct_mapping(node, deep=deep)


_DATE = "tag:yaml.org,2002:timestamp"
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rules if tag != _DATE]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$"), list("-+.0123456789")
)


class _Refused(Exception):
    def __init__(self, line: int, text: str) -> None:
        super().__init__(text)
        self.line = line


def read_yaml(path: Path, error: type[EdgesplitError]) -> Any:
    """Read a YAML file; raises ``error`` with the file's name and the line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as cause:
        reason = cause.strerror if isinstance(cause, OSError) else "it is not UTF-8 text"
        raise error(f"cannot read {str(path)!r}: {reason}") from None
    return parse_yaml(text, path.name, error)


def parse_yaml(text: str, source: str, error: type[EdgesplitError]) -> Any:
    """Parse YAML text; raises ``error`` beginning with ``source``."""
    try:
        return yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader
    except _Refused as refused:
        raise error(f"{source}:{refused.line}: {refused}") from None
    except yaml.MarkedYAMLError as cause:
        mark = cause.problem_mark or cause.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise error(f"{source}{line}: not YAML: {cause.problem or cause.context}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as cause:
        raise error(f"{source}: not YAML: {' '.join(str(cause).split())}") from None


def parse(
    model: type[Model], data: Any, source: Callable[[tuple[str, ...]], str], error: type[EdgesplitError]
) -> Model:
    """Validate ``data``; the first thing wrong is raised as ``error`` in one line, beginning with ``source(place)``."""
    try:
        return model.model_validate(data)
    except ValidationError as found:
        details = found.errors(include_url=False)
        # An unknown key is often a misspelt one, and then the reason why another is missing: it goes first.
        first = next((detail for detail in details if detail["type"] == "extra_forbidden"), details[0])
        place = tuple(str(part) for part in first["loc"])
        says = _sentence(model, place, first)
        joint = " " if says.startswith(("is ", "has ")) else ": "
        raise error(f"{source(place)}: {'.'.join(place)}{joint if place else ''}{says}") from None


def _sentence(model: type[Section], place: tuple[str, ...], detail: Any) -> str:
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        return f"unknown key{did_you_mean(place[-1], known_keys(model, place[:-1]) or ())}"
    if kind == "missing":
        return "is missing"
    if kind == "literal_error":
        allowed = re.findall(r"'([^']*)'", context["expected"])
        near = did_you_mean(str(value), allowed)
        return f"is {value!r}, must be {' or '.join(repr(name) for name in allowed)}{near}"
    if kind == "value_error":
        return str(context["error"])
    if kind in _COMPARED:
        return f"is {value!r}, must be {_COMPARED[kind]} {next(iter(context.values()))}"
    if kind in _WANTED:
        return f"is {value!r}, must be {_WANTED[kind]}"
    if kind in ("too_short", "too_long"):
        bound = f"at most {context['max_length']}" if kind == "too_long" else f"at least {context['min_length']}"
        return f"has {context['actual_length']} entries, must have {bound}"
    return f"is {value!r}: {detail['msg'].lower()}"


_COMPARED = {
    "greater_than": "above",
    "greater_than_equal": "at least",
    "less_than": "below",
    "less_than_equal": "at most",
}
_WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}


def known_keys(model: type[Section], place: tuple[str, ...]) -> list[str] | None:
    """The keys that a file may have at ``place``: none where there is no mapping; None where keys are free."""
    at: Any = model
    for part in place:
        if isinstance(at, type) and issubclass(at, Section):
            at = _inner(at.model_fields[part].annotation) if part in at.model_fields else None
        elif at is not Any:
            at = _inner(get_args(at)[-1]) if get_args(at) else None  # of dict[str, X] or list[X]
    if isinstance(at, type) and issubclass(at, Section):
        return list(at.model_fields)
    return None if at is Any or get_origin(at) is dict else []


def _inner(annotation: Any) -> Any:
    """``X`` of ``X | None``."""
    parts = [part for part in get_args(annotation) if part is not type(None)]
    return parts[0] if type(None) in get_args(annotation) and len(parts) == 1 else annotation


def refuse_not_yet(
    section: Section,
    table: tuple[NotYet, ...],
    source: Callable[[tuple[str, ...]], str],
    error: type[EdgesplitError],
) -> None:
    """Raise ``error`` for the first value that the table refuses."""
    for row in table:
        for place, value in _values(section, row.key.split(".")):
            if row.refused(value):
                shown = f"{value} is " if isinstance(value, (str, int)) else ""
                raise error(f"{source(place)}: {'.'.join(place)}: {shown}not supported yet in this version: {row.why}")


def _values(at: Any, parts: list[str], place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not parts:
        yield place, at
    elif parts[0] == "*":
        for key, value in at.items():
            yield from _values(value, parts[1:], (*place, key))
    elif isinstance(at, Section):
        yield from _values(getattr(at, parts[0]), parts[1:], (*place, parts[0]))
