"""kv_transfer_params and typed values."""

from __future__ import annotations

import json

import pytest

from connector.params import (
    ParamsError,
    PullConsumer,
    PullProducer,
    PushConsumer,
    PushProducer,
    params_from_ticket,
    params_of,
    parse,
)
from pdq.wire.types import KvSource, KvTicket, Pair, pack_ids

TICKET = KvTicket(
    transfer_id="r1",
    pair=Pair(gen=2, attempt=3),
    engine_id="p",
    epoch="p-1",
    host="10.0.0.1",
    port=7000,
    tp_size=1,
    block_size=16,
    num_tokens=33,
    block_ids=pack_ids([5, 6, 9]),
)
PAIR = Pair(gen=1, attempt=0)
SOURCE = KvSource(engine_id="p", epoch="p-1", host="10.0.0.1", port=7000, tp_size=1, block_size=16)


@pytest.mark.parametrize(
    "value",
    [
        PullProducer(transfer_id="r1", pair=PAIR),
        PullConsumer(ticket=TICKET),
        PushProducer(transfer_id="r1", pair=PAIR),
        PushConsumer(transfer_id="r1", pair=PAIR, source=SOURCE),
    ],
)
def test_values_survive_the_dict_and_json(value):
    assert parse(json.loads(json.dumps(params_of(value)))) == value


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": False}, {"somebody": "else's"}])
def test_other_requests_have_nothing_to_do_with_kv_transfer(params):
    assert parse(params) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"do_remote_decode": True}, "both set"),
        ({"pdq_port": "7000"}, "pdq_port: expected a number"),
        ({"pdq_port": True}, "pdq_port"),
        ({"pdq_epoch": ""}, "pdq_epoch: expected a text"),
        ({"pdq_gen": -1}, "pdq_gen"),
        ({"pdq_block_ids": None}, "pdq_block_ids"),
        ({"pdq_block_ids": [1, -2, 3]}, "pdq_block_ids"),
        ({"pdq_block_ids": [5, 6]}, "2 blocks, but 33 tokens in blocks of 16 are 3"),
    ],
)
def test_a_wrong_value_is_named(change, message):
    with pytest.raises(ParamsError, match=message):
        parse({**params_from_ticket(TICKET), **change})
