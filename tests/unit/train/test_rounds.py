"""Who makes a step with whom, in every order of events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrpc.errors import ConfigError
from mmrpc.train.rounds import Policy, Rounds


def rounds(*members: str, **policy) -> Rounds:
    made = Rounds(Policy(**{"trainers": len(members), **policy}))
    for member in members:
        made.join(member)
    return made


def test_all_are_waited_for() -> None:
    """A step needs a push of every trainer, and the next one needs all again."""
    both = rounds("b", "a")
    both.offer("b")
    assert not both.is_ready
    assert both.missing == {"a"}
    both.offer("a")
    assert both.is_ready
    assert both.take() == ["a", "b"]
    assert not both.is_ready


def test_the_first_step_waits_until_all_have_joined() -> None:
    """Who is early does not train alone."""
    early = Rounds(Policy(trainers=2))
    early.join("a")
    early.offer("a")
    assert not early.is_ready
    early.join("b")
    assert not early.is_ready
    early.offer("b")
    assert early.is_ready


def test_a_quorum_is_enough() -> None:
    """With a quorum the step does not wait for the slowest."""
    three = rounds("a", "b", "c", quorum=2)
    three.offer("a")
    assert not three.is_ready
    three.offer("c")
    assert three.is_ready
    assert three.take() == ["a", "c"]


def test_who_leaves_is_not_waited_for_but_what_it_pushed_counts() -> None:
    """The gradient of a trainer that was killed after its push is as good as any."""
    both = rounds("a", "b")
    both.offer("a")
    both.leave("b")
    assert both.is_ready
    both = rounds("a", "b")
    both.offer("a")
    both.leave("a")
    assert not both.is_ready
    both.offer("b")
    assert both.take() == ["a", "b"]


def test_who_joins_again_begins_anew() -> None:
    """The push of its earlier life is forgotten."""
    both = rounds("a", "b")
    both.offer("a")
    both.join("a")
    both.offer("b")
    assert not both.is_ready


@given(
    st.integers(1, 4),
    st.none() | st.integers(1, 4),
    st.lists(st.tuples(st.sampled_from(["offer", "leave", "join"]), st.sampled_from("abcd"))),
)
def test_nobody_waits_for_nobody(trainers: int, quorum: int | None, events) -> None:
    """Whatever happens, once begun, a step is ready or somebody is named who is missing."""
    quorum = None if quorum is None else min(quorum, trainers)
    some = rounds(*"abcd"[:trainers], quorum=quorum)
    for what, who in events:
        if what != "offer" or who in some.members:
            getattr(some, what)(who)
        assert some.is_ready or not some.waiting or some.missing
        if some.is_ready:
            taken = some.take()
            assert taken == sorted(taken)
            assert not some.waiting


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"update": "both"}, "update: it must be 'sync' or 'async', not 'both'"),
        ({"trainers": 0}, "trainers: it must be a whole number of at least 1, not 0"),
        ({"trainers": True}, "trainers: it must be a whole number of at least 1, not True"),
        ({"trainers": 1.5}, "trainers: .* not 1.5"),
        ({"trainers": 2, "quorum": 3}, "quorum: 3 are more than the trainers, which are 2"),
        ({"trainers": 2, "quorum": 0}, "quorum: it must be a whole number of at least 1"),
        ({"update": "async", "quorum": 1}, "quorum: it is for sync. In async"),
        ({"accumulate": 2}, "accumulate: it is for async. In sync"),
        ({"update": "async", "accumulate": float("nan")}, "accumulate: .* not nan"),
        ({"max_staleness": -1}, "max_staleness: it must be a whole number of at least 0, not -1"),
    ],
)
def test_what_does_not_go_together_is_refused(values, problem: str) -> None:
    """A policy says at once what is wrong with it."""
    with pytest.raises(ConfigError, match=problem):
        Policy(**values)


def test_staleness() -> None:
    """Late gradients are dropped with a quorum, and otherwise only when asked for."""
    assert not Policy(update="async").is_too_stale(1000)
    assert Policy(update="async", max_staleness=2).is_too_stale(3)
    assert not Policy(update="async", max_staleness=2).is_too_stale(2)
    assert Policy(trainers=2, quorum=1).is_too_stale(1)
    assert not Policy(trainers=2, quorum=1, max_staleness=1).is_too_stale(1)
