"""Answers that come once more when their question is over: none is taken for the answer to the next one."""

from __future__ import annotations

from dataclasses import replace

from connector.side_channel import Opened, Verified
from tests.connector.test_laws import Transfers
from tests.connector.test_push_laws import Pushing


def test_an_opened_from_before_a_failed_write_opens_nothing_after_it():
    """Law 2: D would give its blocks back while the failed call's bytes are still on their way there."""
    world = Pushing()
    world.start_both(2, is_only_told=True)
    world.talk()
    world.compute(0)
    key = world.key_of(1)
    before = Opened(
        epoch=world.d_epoch,
        transfer_id=key.transfer_id,
        pair=key.pair,
        transport_address=f"d:{world.generation}",
        transport_generation=world.generation,
    )
    world.break_write(is_abort=False)
    world.write_all()
    assert world.late

    world.p_hears(before)
    world.compute(0)
    world.write_all()
    world.talk()

    assert world.receivers, "D has to fence before it is done"
    world.teardown()


def test_a_verified_of_the_load_before_does_not_verify_the_next_one():
    """Law 3: the first one was P's Done, and what the second has read is not this prefill's any more."""
    world = Transfers()
    world.hand_over(0, 2, False)
    d, prefill = world.consumers[0], world.newest
    for _ in prefill.blocks:
        world.copy(0)
    world.message(0, True, "deliver")
    world.message(0, False, "repeat")
    assert [type(answer) for answer in d.from_p] == [Verified], "the same once more"
    assert (d.loading, world.freed) == ({}, [prefill.name])

    world._load(0, prefill, False)
    for _ in prefill.blocks:
        world.copy(0)
    world.message(0, False, "deliver")

    assert list(d.loading) == [prefill.name], "P has not been asked for this one"
    world.teardown()


def test_a_verified_of_a_former_version_names_no_load():
    world = Transfers()
    world.hand_over(0, 2, False)
    d = world.consumers[0]
    for _ in world.newest.blocks:
        world.copy(0)
    world.message(0, True, "deliver")
    (verified,) = d.from_p
    assert isinstance(verified, Verified)
    d.from_p[0] = replace(verified, load=None)

    world.message(0, False, "deliver")

    assert not d.loading
    world.teardown()
