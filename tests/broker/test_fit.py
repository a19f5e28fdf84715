"""A worker that nobody could exchange KV with refuses to serve, and says what differs."""

from __future__ import annotations

import pytest

from broker.base import Registry, WorkerRecord
from broker.errors import DoesNotFit
from broker.fit import can_exchange, misfit
from broker.membership import Membership, RegistryView
from broker.redis_registry import RedisRegistry
from broker.registry_settings import RegistrySettings
from tests.broker.stores import LIMIT_S, MODEL, RedisStore, Store, eventually

FLOAT32 = "block_size=16 dtype=float32 mode=pull"
BFLOAT16 = "block_size=16 dtype=bfloat16 mode=pull"


def worker(worker_id: str, role: str, fingerprint: str = FLOAT32, state: str = "ready") -> WorkerRecord:
    return WorkerRecord(
        worker_id=worker_id,
        role=role,
        state=state,
        endpoint="tcp://127.0.0.1:1",
        model="m",
        fingerprint=fingerprint,
    )


def membership(registry: Registry, record: WorkerRecord, *, mode: str = "pull") -> Membership:
    return Membership(
        registry,
        RegistryView(),
        heartbeat_s=0.05,
        config={"mode": mode},
        record=lambda: record,
        on_drain=lambda: None,
    )


def test_a_worker_that_differs_from_the_other_side_is_told_both_values_and_who_is_there() -> None:
    problem = misfit(worker("d1", "decode"), [worker("p1", "prefill", BFLOAT16), worker("p2", "prefill", BFLOAT16)])

    assert problem == (
        "this decode worker fits no prefill worker of 'm', so no KV could be exchanged;"
        " p1, p2: dtype: float32 here, bfloat16 there."
        " Start it with the same model, engine and KV settings, or under another --served-model-name"
    )


@pytest.mark.parametrize(
    ("others", "is_fitting"),
    [
        pytest.param([], True, id="first of all"),
        pytest.param([worker("d0", "decode", BFLOAT16)], True, id="itself"),
        pytest.param([worker("g1", "gateway", "")], True, id="a gateway judges nobody"),
        pytest.param([worker("p1", "prefill", BFLOAT16), worker("p2", "prefill")], True, id="mixed: one fits"),
        pytest.param([worker("p1", "prefill"), worker("d1", "decode", BFLOAT16)], True, id="other side before own"),
        pytest.param([worker("p1", "prefill", BFLOAT16), worker("d1", "decode")], False, id="own does not help"),
        pytest.param([worker("d1", "decode", BFLOAT16)], False, id="own role where the other is missing"),
        pytest.param([worker("p1", "prefill", BFLOAT16, "starting")], False, id="both start at once"),
        pytest.param([worker("d1", "decode"), worker("p1", "prefill", BFLOAT16, "starting")], True, id="ready first"),
        pytest.param([worker("p1", "prefill", BFLOAT16, "draining")], True, id="on its way out"),
    ],
)
def test_ready_workers_of_the_other_role_judge_then_those_of_the_own_then_starting_ones(
    others: list[WorkerRecord], is_fitting: bool
) -> None:
    assert (misfit(worker("d0", "decode"), others) is None) is is_fitting


@pytest.mark.parametrize(
    ("prefill", "decode", "problem"),
    [
        ("tp=2 kv_heads=8", "tp=2 kv_heads=8", ""),
        ("tp=4 kv_heads=8", "tp=2 kv_heads=8", ""),
        ("tp=8 kv_heads=2", "tp=4 kv_heads=2", ""),
        ("tp=4", "tp=1", ""),
        ("tp=2", "", ""),
        ("tp=2 kv_heads=8", "tp=4 kv_heads=8", "prefill has TP 2, decode TP 4"),
        ("tp=6 kv_heads=12", "tp=4 kv_heads=12", "prefill has TP 6, decode TP 4"),
        ("tp=4 kv_heads=6", "tp=2 kv_heads=6", "6 KV heads neither divide prefill's 4 ranks"),
        ("tp=4 kv_heads=8", "tp=2 kv_heads=4", "kv_heads: 4 here, 8 there"),
        ("tp=2 dtype=a", "tp=4 dtype=b", "dtype: b here, a there; prefill has TP 2, decode TP 4"),
    ],
)
def test_sizes_of_both_sides_may_differ_if_they_go_together(prefill: str, decode: str, problem: str) -> None:
    found = misfit(worker("d1", "decode", decode), [worker("p1", "prefill", prefill)])

    assert can_exchange(prefill, decode) is (found is None) is (problem == "")
    assert problem in (found or "")


def test_workers_of_one_role_may_have_several_sizes() -> None:
    assert misfit(worker("d1", "decode", "tp=4 kv_heads=8"), [worker("d2", "decode", "tp=1 kv_heads=8")]) is None


async def test_a_worker_that_does_not_fit_leaves_nothing_in_the_registry(store: Store) -> None:
    await membership(store.registry, worker("p1", "prefill")).join()

    with pytest.raises(DoesNotFit, match="dtype: bfloat16 here, float32 there"):
        await membership(store.registry, worker("d1", "decode", BFLOAT16)).join(patience_s=0)

    assert [record.worker_id for record in await store.registry.workers()] == ["p1"]


async def test_a_worker_that_fits_is_ready_after_it_joined(store: Store) -> None:
    for record in (worker("p1", "prefill"), worker("d1", "decode")):
        await membership(store.registry, record).join()

    assert {(record.worker_id, record.state) for record in await store.registry.workers()} == {
        ("p1", "ready"),
        ("d1", "ready"),
    }


async def test_all_processes_of_a_model_run_in_the_mode_of_the_first(store: Store) -> None:
    await membership(store.registry, worker("g1", "gateway", "")).join()

    with pytest.raises(DoesNotFit, match=r"mode is push here, but pull in every running process.* --mode pull"):
        await membership(store.registry, worker("p1", "prefill"), mode="push").join(patience_s=0)

    assert await store.registry.agree({"mode": "pull"}) == {"mode": "pull"}
    assert [record.worker_id for record in await store.registry.workers()] == ["g1"]


async def test_a_worker_waits_for_dead_ones_of_another_kind_and_mode_to_be_forgotten(redis_store: RedisStore) -> None:
    registry = RedisRegistry(redis_store.calls, MODEL, RegistrySettings(registry_ttl_s=0.3))
    await membership(registry, worker("p1", "prefill", BFLOAT16), mode="push").join()  # beats once, as if killed then

    newcomer = membership(registry, worker("d1", "decode"), mode="pull")
    await newcomer.join(patience_s=LIMIT_S)

    async def only_the_newcomer_is_left() -> bool:
        await newcomer.beat()  # its own record doesn't live longer
        return [record.worker_id for record in await registry.workers()] == ["d1"]

    await eventually(only_the_newcomer_is_left)
    assert await registry.agree({"mode": "pull"}) == {"mode": "pull"}
