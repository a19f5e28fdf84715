"""kv_transfer_params <-> typed values: the only place that knows that dict.

P's request:   do_remote_decode=True,  pdq_transfer_id, pdq_gen, pdq_attempt
P's answer and
D's request:   do_remote_prefill=True, pdq_transfer_id, pdq_gen, pdq_attempt, pdq_engine_id, pdq_epoch, pdq_host,
               pdq_port, pdq_tp_size, pdq_block_size, pdq_num_tokens, pdq_block_ids (list of int)
Push, P:       do_remote_decode=True,  pdq_push=True, pdq_transfer_id, pdq_gen, pdq_attempt
Push, D:       do_remote_prefill=True, pdq_push=True, the same, and pdq_engine_id, pdq_epoch, pdq_host, pdq_port,
               pdq_tp_size, pdq_block_size of the P that will write
Any of them:   pdq_engine_request_id, under which the plugin reports, since vLLM has an id of its own
Release:       pdq_release=True, pdq_engine_request_id: nobody will read this finished prefill; not a request itself
All values survive JSON. `do_*` are vLLM's own keys, the others are ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pdq.wire.types import KvSource, KvTicket, Pair, pack_ids, unpack_ids

_MAX_PORT: Final = 65535
_MAX_RANKS: Final = 1024
"""A link is opened to each."""


class ParamsError(ValueError):
    """The dict is not one of ours; the text names the key, what it holds and what it should hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullProducer:
    """Compute the prompt and keep its blocks until a reader has them."""

    transfer_id: str
    pair: Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class PullConsumer:
    """The prompt's KV is at P: read it."""

    ticket: KvTicket


@dataclass(frozen=True, slots=True, kw_only=True)
class PushProducer:
    """Compute the prompt, write its KV into the reader's blocks as soon as it says where they are."""

    transfer_id: str
    pair: Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class PushConsumer:
    """`source` will write the prompt's KV into this request's blocks."""

    transfer_id: str
    pair: Pair
    source: KvSource


KvParams = PullProducer | PullConsumer | PushProducer | PushConsumer


def parse(params: Mapping[str, object] | None) -> KvParams | None:
    """None: the request has nothing to do with KV transfer. Raises ParamsError."""
    if not params:
        return None
    prefill, decode = bool(params.get("do_remote_prefill")), bool(params.get("do_remote_decode"))
    if prefill and decode:
        raise ParamsError("do_remote_prefill and do_remote_decode are both set: give one")
    if decode:
        producer = PushProducer if is_push(params) else PullProducer
        return producer(transfer_id=_text(params, "pdq_transfer_id"), pair=_pair(params))
    if prefill and is_push(params):
        return PushConsumer(
            transfer_id=_text(params, "pdq_transfer_id"), pair=_pair(params), source=_source_from_params(params)
        )
    if prefill:
        return PullConsumer(ticket=ticket_from_params(params))
    return None


def params_of(value: KvParams) -> dict[str, object]:
    """Inverse of `parse`."""
    if isinstance(value, PullConsumer):
        return params_from_ticket(value.ticket)
    is_consumer = isinstance(value, PushConsumer)
    params: dict[str, object] = {
        "do_remote_decode": not is_consumer,
        "do_remote_prefill": is_consumer,
        "pdq_transfer_id": value.transfer_id,
        "pdq_gen": value.pair.gen,
        "pdq_attempt": value.pair.attempt,
    }
    if not isinstance(value, PullProducer):
        params["pdq_push"] = True
    if isinstance(value, PushConsumer):
        source = value.source
        params |= {
            "pdq_engine_id": source.engine_id,
            "pdq_epoch": source.epoch,
            "pdq_host": source.host,
            "pdq_port": source.port,
            "pdq_tp_size": source.tp_size,
            "pdq_block_size": source.block_size,
        }
    return params


def params_from_ticket(ticket: KvTicket) -> dict[str, object]:
    """What P's engine returns and D's engine is given."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "pdq_transfer_id": ticket.transfer_id,
        "pdq_gen": ticket.pair.gen,
        "pdq_attempt": ticket.pair.attempt,
        "pdq_engine_id": ticket.engine_id,
        "pdq_epoch": ticket.epoch,
        "pdq_host": ticket.host,
        "pdq_port": ticket.port,
        "pdq_tp_size": ticket.tp_size,
        "pdq_block_size": ticket.block_size,
        "pdq_num_tokens": ticket.num_tokens,
        "pdq_block_ids": unpack_ids(ticket.block_ids),
    }


def ticket_from_params(params: Mapping[str, object]) -> KvTicket:
    """Raises ParamsError, also when the block list does not cover the tokens."""
    block_ids = params.get("pdq_block_ids")
    if not isinstance(block_ids, list | tuple) or not all(type(i) is int and 0 <= i < 2**32 for i in block_ids):
        raise ParamsError("pdq_block_ids: expected a list of block ids")
    ticket = KvTicket(
        transfer_id=_text(params, "pdq_transfer_id"),
        pair=_pair(params),
        engine_id=_text(params, "pdq_engine_id"),
        epoch=_text(params, "pdq_epoch"),
        host=_text(params, "pdq_host"),
        port=_number(params, "pdq_port", 1, _MAX_PORT),
        tp_size=_number(params, "pdq_tp_size", 1, _MAX_RANKS),
        block_size=_number(params, "pdq_block_size", 1),
        num_tokens=_number(params, "pdq_num_tokens", 1),
        block_ids=pack_ids(block_ids),
    )
    needed = -(-ticket.num_tokens // ticket.block_size)
    if len(block_ids) != needed:
        raise ParamsError(
            f"pdq_block_ids: {len(block_ids)} blocks, but {ticket.num_tokens} tokens"
            f" in blocks of {ticket.block_size} are {needed}"
        )
    return ticket


def with_identity(params: Mapping[str, object], transfer_id: str) -> Mapping[str, object]:
    """For a proxy that knows vLLM's own keys only: a prefill to be read later is named after its request.

    What P answers names the transfer, so that D needs nothing else. In push both sides must be given the same name.
    """
    if not params.get("do_remote_decode") or is_push(params) or "pdq_transfer_id" in params:
        return params
    return {**params, "pdq_transfer_id": transfer_id, "pdq_gen": 1, "pdq_attempt": 1}


def outside_id(params: Mapping[str, object] | None) -> str | None:
    """The engine_request_id of who submitted the request, if it has one."""
    found = (params or {}).get("pdq_engine_request_id")
    return found if isinstance(found, str) and found else None


def is_push(params: Mapping[str, object]) -> bool:
    """P writes, D doesn't read."""
    return bool(params.get("pdq_push"))


def wants_load(params: Mapping[str, object] | None) -> bool:
    """D's: it waits for KV, though the rest of it may be wrong."""
    return bool((params or {}).get("do_remote_prefill"))


def is_release(params: Mapping[str, object] | None) -> bool:
    """Not a request: the prefill of that `outside_id` is to be released."""
    return bool((params or {}).get("pdq_release"))


def _source_from_params(params: Mapping[str, object]) -> KvSource:
    return KvSource(
        engine_id=_text(params, "pdq_engine_id"),
        epoch=_text(params, "pdq_epoch"),
        host=_text(params, "pdq_host"),
        port=_number(params, "pdq_port", 1, _MAX_PORT),
        tp_size=_number(params, "pdq_tp_size", 1, _MAX_RANKS),
        block_size=_number(params, "pdq_block_size", 1),
    )


def _pair(params: Mapping[str, object]) -> Pair:
    return Pair(gen=_number(params, "pdq_gen", 0), attempt=_number(params, "pdq_attempt", 0))


def _text(params: Mapping[str, object], key: str) -> str:
    value = params.get(key)
    if not isinstance(value, str) or not value:
        raise ParamsError(f"{key}: expected a text, got {value!r}")
    return value


def _number(params: Mapping[str, object], key: str, least: int, most: int | None = None) -> int:
    value = params.get(key)
    if type(value) is not int or value < least or (most is not None and value > most):
        to = "on" if most is None else f"to {most}"
        raise ParamsError(f"{key}: expected a number from {least} {to}, got {value!r}")
    return value
