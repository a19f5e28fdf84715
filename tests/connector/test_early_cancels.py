"""A reader that cancels a push before P's worker half knows the prefill. P can't tell it from one that P asked in vain
before another took the request: it is the only one that is turned away. Who else may come is known to P's worker, which
hears from the decode worker that nobody will when the prefill has ended (`Gone`), and releases it.
"""

from __future__ import annotations

import pytest

from connector.side_channel import Cancelled
from tests.connector.simulated_push import SETTINGS
from tests.connector.test_push_laws import Pushing


@pytest.fixture
def world() -> Pushing:
    """P has prefilled what D cancelled before."""
    world = Pushing()
    world.offers.say_cancel(world.source, world.key_of(1), "aborted before it had blocks", world.now)
    world.settle()
    while world.to_p:
        world.p_hears(world.to_p.pop(0))
    assert [type(answer) for answer in world.to_d] == [Cancelled]
    world.talk()
    world.begin_prefill(2)
    world.compute(0)
    world.compute(0)
    return world


def test_its_blocks_are_free_as_soon_as_p_is_told_to_release_it(world: Pushing):
    assert list(world.prefills) == ["r1"]

    world.abort_or_release(0)

    assert not world.prefills


def test_another_reader_gets_them(world: Pushing):
    world.start_d()
    world.receive(1, 0)
    world.talk()
    assert world.jobs
    world.write_all()
    world.talk()

    assert (list(world.receivers), list(world.prefills)) == ([], [])
    assert world.reported == {"r1"}


def test_the_same_reader_gets_none(world: Pushing):
    world.receive(1, 0)
    world.talk()

    assert not world.receivers
    assert not world.jobs
    assert list(world.prefills) == ["r1"]


def test_told_by_nobody_p_frees_them_when_their_time_is_over(world: Pushing):
    world.wait(SETTINGS.kv_hold_s - 0.1)
    assert list(world.prefills) == ["r1"]

    world.wait(0.2)

    assert not world.prefills
