"""How batches are cut into micro-batches, numbered, and handed out step by step."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgesplit.errors import ExperimentError
from edgesplit.schedule import Micro
from edgesplit.sheets import Agenda, Cutting, Draft, Share, evaluation, number


@given(st.integers(1, 200), st.integers(1, 40))
def test_a_batch_in_near_equal_parts(samples: int, micros: int) -> None:
    bounds = Cutting(micros).bounds(samples)
    sizes = [stop - start for start, stop in bounds]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == samples
    assert all(before[1] == after[0] for before, after in pairwise(bounds))
    assert len(bounds) == min(micros, samples)
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1
    assert sizes == sorted(sizes, reverse=True)


@given(st.integers(1, 200), st.integers(1, 40))
def test_a_batch_in_parts_of_a_size(samples: int, size: int) -> None:
    bounds = Cutting(None, size).bounds(samples)
    sizes = [stop - start for start, stop in bounds]
    assert bounds[0][0] == 0
    assert all(before[1] == after[0] for before, after in pairwise(bounds))
    assert sum(sizes) == samples
    assert set(sizes[:-1]) <= {size}
    assert 1 <= sizes[-1] <= size


@pytest.mark.parametrize("cutting", [Cutting(3), Cutting(None, 3)])
def test_no_samples_no_parts(cutting: Cutting) -> None:
    assert cutting.bounds(0) == []


shares = st.dictionaries(
    st.sampled_from("abcd"), st.builds(Share, st.integers(0, 3), st.integers(0, 3), st.integers(0, 9)), min_size=1
)


@given(shares, st.integers(1, 5), st.integers(0, 1000))
def test_numbers_go_up_without_gaps_and_every_sample_is_in_one(
    drawn: dict[str, Share], micros: int, first: int
) -> None:
    step = number(Draft(7, drawn, 0.5), Cutting(micros), first, "dcba")
    assert (step.step, step.lr) == (7, 0.5)
    assert [micro.micro for micro in step.micros] == list(range(first, first + len(step.micros)))
    samples = Counter((m.device, i) for m in step.micros for i in range(m.start, m.stop))
    assert samples == Counter((device, i) for device, share in drawn.items() for i in range(share.samples))
    assert step.batches == {d: (s.epoch, s.index) for d, s in drawn.items() if s.samples}
    for device in drawn:
        starts = [m.start for m in step.micros if m.device == device]
        assert starts == sorted(starts)


def test_devices_alternate_by_their_shares() -> None:
    draft = Draft(0, {"a": Share(0, 0, 4), "b": Share(0, 0, 2), "x": Share(0, 0, 9)})
    step = number(draft, Cutting(None, 1), 10, ["b", "a"])
    assert step.micros == tuple(
        Micro(10 + i, device, at, at + 1)
        for i, (device, at) in enumerate([("a", 0), ("b", 0), ("a", 1), ("a", 2), ("b", 1), ("a", 3)])
    )
    assert "x" not in step.batches


# --- agenda ---------------------------------------------------------------------------------------------------------


def test_unequal_devices_in_one_epoch() -> None:
    agenda = Agenda({"a": [4, 4, 2], "b": [4], "none": []}, lambda step: 1 / (1 + step))
    drafts = agenda.round(["a", "b", "none"], epochs=1)
    assert [{d: (s.epoch, s.index, s.samples) for d, s in draft.shares.items()} for draft in drafts] == [
        {"a": (0, 0, 4), "b": (0, 0, 4)},
        {"a": (0, 1, 4)},
        {"a": (0, 2, 2)},
    ]
    assert [(draft.step, draft.lr) for draft in drafts] == [(0, 1.0), (1, 1 / 2), (2, 1 / 3)]
    assert agenda.step == 3
    assert agenda.done == {"a": 3, "b": 1}


def test_epochs_roll_over_and_steps_never_restart() -> None:
    agenda = Agenda({"a": [4, 2], "b": [3]})
    shares_ = [d.shares for d in [*agenda.round(["a", "b"], steps=3), *agenda.round(["b"], steps=1)]]
    assert [(s["a"].epoch, s["a"].index) for s in shares_[:3]] == [(0, 0), (0, 1), (1, 0)]
    assert [(s["b"].epoch, s["b"].index) for s in shares_] == [(0, 0), (1, 0), (2, 0), (3, 0)]
    drafts = agenda.round(["a", "b"], epochs=2)
    assert [d.step for d in drafts] == [4, 5, 6, 7]
    assert [(d.shares["a"].epoch, d.shares["a"].index) for d in drafts] == [(1, 1), (2, 0), (2, 1), (3, 0)]
    assert ["b" in d.shares for d in drafts] == [True, True, False, False]


@given(
    st.dictionaries(st.sampled_from("abc"), st.lists(st.integers(1, 5), max_size=4), min_size=1),
    st.lists(st.sampled_from([("steps", 1), ("steps", 3), ("epochs", 1), ("epochs", 2)]), max_size=4),
    st.integers(0, 9),
)
def test_an_agenda_goes_on_from_where_another_stood(
    sizes: dict[str, list[int]], rounds: list[tuple[str, int]], stop: int
) -> None:
    if not any(sizes.values()):
        return
    whole = Agenda(sizes)
    drafts = [whole.round(sorted(sizes), **{kind: count}) for kind, count in rounds]
    first = Agenda(sizes)
    got = [first.round(sorted(sizes), **{kind: count}) for kind, count in rounds[:stop]]
    second = Agenda(sizes, done=dict(first.done), step=first.step)
    got += [second.round(sorted(sizes), **{kind: count}) for kind, count in rounds[stop:]]
    assert got == drafts
    flat = [draft for round_ in drafts for draft in round_]
    assert [draft.step for draft in flat] == list(range(len(flat)))
    for device, mine in sizes.items():
        turns = [(s.epoch, s.index) for draft in flat if (s := draft.shares.get(device))]
        assert turns == [divmod(i, len(mine)) for i in range(len(turns))]


@pytest.mark.parametrize("sizes", [{}, {"a": [], "b": []}, {"a": [0, 0]}])
def test_no_samples_at_all_are_refused(sizes: dict[str, list[int]]) -> None:
    with pytest.raises(ExperimentError, match="no device has any samples"):
        Agenda(sizes)


@pytest.mark.parametrize("kind", ["steps", "epochs"])
def test_a_round_of_devices_without_samples_has_no_steps_to_wait_for(kind: str) -> None:
    agenda = Agenda({"a": [4], "none": []})
    assert agenda.round(["none"], **{kind: 2}) == []
    assert agenda.step == 0


def test_evaluation_goes_once_through_every_test_set() -> None:
    drafts = list(evaluation({"a": [3, 2], "b": [1]}, 8))
    assert [draft.step for draft in drafts] == [8, 9]
    assert drafts[0].shares == {"a": Share(-1, 0, 3), "b": Share(-1, 0, 1)}
    assert drafts[1].shares == {"a": Share(-1, 1, 2)}
    assert list(evaluation({}, 8)) == []
