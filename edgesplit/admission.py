"""Devices that no file names: how they prove that they may join, and where they go. No I/O but reading the tokens."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgesplit.errors import RunError, TopologyError
from edgesplit.plan import Plan, Route, Stage
from edgesplit.topology import Admission

SHORTEST = 16
"""Characters of a token, at least."""


def proof_of(token: str, run: str, node: str, life: str) -> str:
    """Return what a node shows instead of its token: it says nothing about the token, and is of no use to others."""
    return hmac.new(token.encode(), f"{run}/{node}/{life}".encode(), hashlib.sha256).hexdigest()


def read_token(path: Path) -> str:
    """Read a node's own token: the first line of its file. Raises TopologyError where there is none."""
    return next(iter(_lines(path)))[-1]


def _lines(path: Path) -> list[list[str]]:
    try:
        lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise TopologyError(f"cannot read the tokens in {path}: {reason}") from None
    found = [words for words in lines if words and not words[0].startswith("#")]
    for words in found:
        if len(words) > 2 or len(words[-1]) < SHORTEST:
            raise TopologyError(
                f"{path}: a line must be a token of at least {SHORTEST} characters, or a device's name and its token"
            )
    if not found:
        raise TopologyError(f"{path} holds no token: write one a line, for example of 'openssl rand -hex 16'")
    return found


class Admissions:
    """Decides who may join, and finds a place for it.

    Args:
        admit: what the topology says.
        run: the run's name.

    Raises:
        TopologyError: the tokens cannot be read.
    """

    def __init__(self, admit: Admission, run: str) -> None:
        self._admit, self._run = admit, run
        self._tokens = _lines(Path(admit.token_file))
        self._joined: set[str] = set()

    def admit(self, node: str, hello: Mapping[str, Any], plan: Plan) -> Plan:
        """Return the plan with another device's route, like that of a device under the same parent.

        Raises:
            RunError: it may not join, or there is no place like that.
        """
        proof = str(hello.get("admission") or "")
        good = [
            hmac.compare_digest(proof, proof_of(words[-1], self._run, node, str(hello.get("life"))))
            for words in self._tokens
            if words[0] == node or len(words) == 1
        ]
        if not any(good):
            raise RunError(
                f"{node!r} is not named in the topology, and shows no token that lets it in: use --token-file"
            )
        if node not in self._joined and self._admit.max is not None and len(self._joined) >= self._admit.max:
            raise RunError(f"{node!r} cannot join: the run takes {self._admit.max} devices that no file names")
        found = self._place(node, plan)
        self._joined.add(node)
        return found

    def _place(self, node: str, plan: Plan) -> Plan:
        rows = [dict(row) for row in (plan.topology or {}).get("nodes", [])]
        parents = {row["name"]: row.get("parent") for row in rows}
        under = {route.device: parents.get(route.device) for route in plan.routes}
        count = {parent: list(under.values()).count(parent) for parent in self._admit.parents}
        like = [route for route in plan.routes if under[route.device] in count]
        if not like:
            raise RunError(f"{node!r} cannot join: no device of this run is under {', '.join(self._admit.parents)}")
        template = min(like, key=lambda route: count[under[route.device] or ""])
        stages = tuple(Stage(node if s.node == template.device else s.node, s.start, s.stop) for s in template.stages)
        rows += [{**row, "name": node, "config": {}} for row in rows if row["name"] == template.device]
        topology = {**plan.topology, "nodes": rows} if plan.topology is not None else None
        return replace(plan, routes=(*plan.routes, Route(node, stages)), topology=topology)
