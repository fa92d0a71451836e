"""Memory for gradients: which push it holds, and rows that come in any number."""

from __future__ import annotations

import pickle

import torch

from mmrpc.train.arena import Arena
from mmrpc.train.member import Member, link_for
from mmrpc.train.messages import Join, Link, Push
from mmrpc.train.rows import RowMemory
from mmrpc.train.slot import Slot
from mmrpc.train.table import Spec

SPEC = Spec(torch.float32, (4,))
MAPPED = Link("live", "mapped", "")


def test_it_says_which_push_it_holds() -> None:
    """Only between complete and the next begin is there a whole gradient."""
    slot = Slot.create({"w": SPEC}, {})
    assert not slot.holds(1)
    slot.begin(1)
    slot.gradients["w"].fill_(3)
    assert not slot.holds(1)
    slot.complete(1)
    assert slot.holds(1)
    assert not slot.holds(2)
    slot.begin(2)
    assert not slot.holds(1)


def test_both_processes_see_the_same_memory() -> None:
    """What is sent of a slot is a reference to it."""
    slot = Slot.create({"w": SPEC}, {"mean": SPEC})
    other = Slot(Arena(pickle.loads(pickle.dumps(slot.data))))
    other.gradients["w"].fill_(2)
    other.buffers["mean"].fill_(5)
    other.begin(7)
    other.complete(7)
    assert slot.holds(7)
    assert slot.gradients["w"].tolist() == [2] * 4
    assert slot.buffers["mean"].tolist() == [5] * 4


def member(slot: Slot | None, **push) -> Member:
    return Member("t", 1, MAPPED, slot, Push("t", 1, 3, 0, **push))


def test_a_member_whose_slot_moved_on_is_not_whole() -> None:
    """A gradient counts while its memory is that of the push, and one that was sent always."""
    slot = Slot.create({"w": SPEC, "v": SPEC}, {})
    slot.begin(3)
    slot.complete(3)
    mapped = member(slot, untouched=frozenset({"v"}))
    assert mapped.is_whole
    assert set(mapped.gradient().dense) == {"w"}
    slot.begin(4)
    assert not mapped.is_whole
    sent = member(None, dense={"w": torch.ones(4)}, buffers={"mean": torch.ones(1)})
    assert sent.is_whole
    assert set(sent.gradient().dense) == {"w"}
    assert set(sent.buffers()) == {"mean"}


def test_a_settled_member_has_nothing_waiting() -> None:
    """Its answer is kept for a repeated push."""
    told = member(None)
    told.settle(is_used=True, staleness=2, error=None)
    assert (told.answered, told.is_used, told.staleness) == (3, True, 2)
    assert told.push is None
    assert not told.is_whole
    assert told.gradient() is None
    assert told.buffers() == {}
    told.settle(is_used=False, staleness=9, error=None)
    assert told.is_used


def test_links() -> None:
    """Who is where decides what is mapped, and the reason is given."""
    from mmrpc.core.system import host

    here, memory = host.host_id(), host.memory_host_id()

    def link(**changes) -> str:
        asked = {"trainer": "t", "host": here, "memory_host": memory, "specs": {}, **changes}
        return str(link_for(Join(**asked), "live"))

    assert link() == "parameters live, gradients mapped: it is on the same host"
    assert link(host="x").startswith("parameters published, gradients values: it is on another")
    assert link(memory_host="x").startswith("parameters live, gradients values: it is in another P")
    assert link(by_value=True).startswith("parameters values, gradients values: it cannot map")


def test_rows_grow() -> None:
    """Any number of rows fits, also none; the memory is used again where it is large enough."""
    memory = RowMemory(torch.float32, (2,))
    places = []
    for count in (3, 0, 64, 65, 200, 1):
        numbers, values = torch.arange(count), torch.randn(count, 2)
        sent_numbers, sent_values = memory.write(numbers, values)
        assert torch.equal(sent_numbers, numbers)
        assert torch.equal(sent_values, values)
        places.append(sent_values.data_ptr())
    assert places[0] == places[2]
    assert places[4] == places[5]
    assert len(pickle.dumps(memory.write(torch.arange(200), torch.randn(200, 2)))) < 800
