from __future__ import annotations

import json
import threading

import pytest

from edgesplit.costs import UnitCosts
from edgesplit.errors import RunError
from edgesplit.methods import predict
from edgesplit.observe.recorder import Recorder, read_events
from edgesplit.observe.report import bubble, compare, gantt_text, step_seconds
from edgesplit.observe.trace import perfetto, write_trace
from edgesplit.plan import Plan, Route, Stage
from edgesplit.schedule import Action, Event, even_steps


def run(method="1f1b", micros=4, steps=1, **options):
    path = "abcd"
    plan = Plan(tuple("wxyz"), (Route("a", tuple(Stage(n, i, i + 1) for i, n in enumerate(path))),))
    return predict(method, plan, even_steps(plan, micros, steps=steps), **options)


def test_events_are_written_at_once_and_read_back(tmp_path):
    path = tmp_path / "events.jsonl"
    events = run(steps=2).events
    with Recorder(path) as recorder:
        for event in events:
            recorder.add(event)
        assert read_events(path) == events  # without waiting for the end
    recorder.close()
    assert recorder.events == events
    line = json.loads(path.read_text().splitlines()[0])
    assert line == {"node": "a", "action": "0F0", "start": 0.0, "end": 1.0, "step": 0, "version": 0}


def test_a_resumed_run_appends(tmp_path):
    path = tmp_path / "events.jsonl"
    event = Event("a", Action("F", 0, 0, 2), 1.0, 2.0, 3, 4)
    for _ in range(2):
        with Recorder(path) as recorder:
            recorder.add(event)
    assert read_events(path) == [event, event]


def test_threads_do_not_mix_lines(tmp_path):
    path = tmp_path / "events.jsonl"
    with Recorder(path) as recorder:

        def add(node):
            for micro in range(200):
                recorder.add(Event(node, Action("F", 0, micro), 0.0, 1.0))

        threads = [threading.Thread(target=add, args=(f"n{i}",)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = read_events(path)
    assert len(found) == 800
    for i in range(4):
        assert [e.action.micro for e in found if e.node == f"n{i}"] == list(range(200))


def test_a_line_cut_short_by_a_crash_is_left_out(tmp_path):
    path = tmp_path / "events.jsonl"
    with Recorder(path) as recorder:
        recorder.add(Event("a", Action("F", 0, 0), 0.0, 1.0))
    with path.open("a") as file:
        file.write('{"node": "a", "act')
    assert len(read_events(path)) == 1


@pytest.mark.parametrize(
    "line", ["no json", "[]", '{"node": "a"}', '{"node":"a","action":"x","start":0,"end":1,"step":0,"version":0}']
)
def test_a_line_that_is_no_event_is_an_error(tmp_path, line):
    path = tmp_path / "events.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(RunError, match=r"events\.jsonl line 1 is not an event"):
        read_events(path)


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(RunError, match="cannot read"):
        read_events(tmp_path / "none.jsonl")


def test_the_trace_has_a_track_a_node_and_an_arrow_a_hop(tmp_path):
    timeline = run(micros=2, costs=UnitCosts(latency=0.5))
    later = [event._replace(start=event.start + 1e9, end=event.end + 1e9) for event in timeline.events]
    write_trace(tmp_path / "t.json", later, timeline.transfers)
    rows = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = {r["args"]["name"]: (r["pid"], r["tid"]) for r in rows if r["name"] == "thread_name"}
    assert set(names) == {"a", "b", "c", "d"} | {
        f"{x} -> {y}" for pair in ("ab", "bc", "cd", "ad") for x, y in (pair, pair[::-1]) if (x, y) != ("d", "a")
    }
    slices = [r for r in rows if r["ph"] == "X" and r["pid"] == 1]
    assert len(slices) == len(timeline.events)
    first = next(r for r in slices if r["name"] == "1F0")
    assert (first["pid"], first["tid"]) == names["b"]
    assert first["ts"] == pytest.approx(1.5e6, abs=1)
    assert first["dur"] == pytest.approx(1e6, abs=1)
    assert first["args"] == {"step": 0, "stage": 1, "micro": 0, "version": 0}
    begins, ends = ([r for r in rows if r["ph"] == ph] for ph in "sf")
    assert len(begins) == len(ends) == 2 * 2 * 3  # forwards and backwards of two micro-batches over three hops
    for begin, end in zip(begins, ends, strict=True):
        assert begin["id"] == end["id"]
        assert begin["ts"] < end["ts"]
        for row in (begin, end):  # each end is inside a slice of its track, or the viewer drops the arrow
            assert any(s["tid"] == row["tid"] and s["ts"] <= row["ts"] <= s["ts"] + s["dur"] for s in slices)


def test_an_empty_trace_is_a_trace():
    assert [r["ph"] for r in perfetto([])["traceEvents"]] == ["M"]


def test_the_bubble_of_events_is_that_of_the_timeline():
    timeline = run()
    later = [event._replace(start=event.start + 50, end=event.end + 50) for event in timeline.events]
    assert bubble(later) == pytest.approx(timeline.bubble) == pytest.approx(3 / 4)
    assert bubble([]) == 0.0


def test_predicted_and_measured_steps_are_compared():
    predicted = run(steps=3)
    measured = [event._replace(start=7 + 2 * event.start, end=7 + 2 * event.end) for event in predicted.events]
    assert step_seconds(predicted.events) == {0: 21.0, 1: 21.0, 2: 21.0}
    found = compare(predicted, measured)
    assert found.steps == dict.fromkeys(range(3), (21.0, 42.0))
    assert found.ratio == 2.0
    assert found.bubbles == (pytest.approx(0.75), pytest.approx(0.75))
    assert "2.00" in str(found)
    with pytest.raises(RunError, match="predicted steps 0-2 and measured steps 10-12 have none in common"):
        compare(predicted, [event._replace(step=event.step + 10) for event in measured])


def test_the_picture_of_1f1b():
    plan = Plan(("x", "y"), (Route("a", (Stage("a", 0, 1), Stage("edge", 1, 2))),))
    assert gantt_text(predict("1f1b", plan, even_steps(plan, 3)).events, unit=1.0).splitlines() == [
        "a     01..aa2bb.cc",
        "edge  .0aa1bb2cc..",
    ]
    wide = gantt_text(run(steps=4).events, width=60)
    assert {len(line) for line in wide.splitlines()} == {63}
    assert gantt_text([]) == ""
