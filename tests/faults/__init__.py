"""Fault tests: workers, clients and messages are stopped, killed and lost at named points; a ledger judges.

How one is written (`stage.py` shows it): a deployment without workers is shared by the tests (`conftest.py`); each test
starts its own workers, told at which points to stop (`points.py`), asks through its ledger, and does what the fault is.
After the test `invariants.py` looks for what must not be left. Nothing of this is in the product: `worker_process.py`
and `engine_process.py` are the roles' own mains with wrapped ports (`ports.py`).

A fault has its number in the name of its file, `test_fNN_...py`, unless its test was there before and lives elsewhere.
Every fault has a line here, and `test_fault_list.py` checks that what it names exists:

F1   test_f01_prefill_killed.py
F2   test_f02_prefill_stopped.py
     pipeline/test_stopped_processes.py::test_a_decode_worker_that_hangs_and_wakes_up_breaks_no_stream
F3   test_f03_all_prefill_killed.py
F4   pipeline/test_worker_deaths.py::test_a_worker_that_is_told_to_stop_finishes_what_it_has
F5   test_f05_decode_killed.py
     pipeline/test_worker_deaths.py::test_the_kv_for_a_decode_worker_that_died_before_it_read_is_freed_at_once
F6   test_f06_same_address.py
F7   test_f07_f10_prefill_workers.py
     pipeline/test_scaling.py::test_cycles_of_more_and_fewer_workers_lose_no_request_and_leave_nothing_behind
F8   test_f08_stuck_or_slow.py
     pipeline/test_stopped_processes.py::test_a_prefill_engine_that_hangs_loses_its_jobs_to_another_worker
     pipeline/test_stopped_processes.py::test_workers_whose_engines_hang_for_good_are_started_again_and_their_requests_end_well
F9   test_f09_poison.py
F10  test_f07_f10_prefill_workers.py
F11  test_f11_f33_early_ends.py
F12  test_f12_gateway_killed.py
     pipeline/test_gateway_death.py::test_a_killed_gateway_leaves_no_work_behind
F13  test_f13_f14_f40_clients.py
F14  test_f13_f14_f40_clients.py
F24  test_f24_prefill_cut_off_from_redis.py
F25  test_f25_gateway_cut_off_from_redis.py
F26  test_f26_f27_f29_links.py
F27  test_f26_f27_f29_links.py
F28  test_f28_f29_kv_transfers.py
     test_abort_and_reuse.py
F29  test_f26_f27_f29_links.py
     test_f28_f29_kv_transfers.py
     wire/test_half_open.py
F30  test_f30_delivered_twice.py
F30b broker/test_queue_contract.py::test_a_zombie_can_do_nothing_after_its_lease_was_reaped
     broker/test_queue_contract.py::test_a_zombie_of_the_same_worker_is_fenced_by_its_attempt
     broker/test_queue_leave.py::test_an_owner_that_holds_a_job_keeps_its_name_and_its_job
     broker/test_redis_queue.py::test_names_of_idle_consumers_are_dropped_but_never_with_pending_jobs
F31  test_f01_prefill_killed.py
F32  test_f32_f34_by_hand.py
F33  test_f11_f33_early_ends.py
     test_f33_f42_no_room.py
F34  test_f32_f34_by_hand.py
F35  test_f35_ids_again.py
F40  test_f13_f14_f40_clients.py
F41  pipeline/test_queue_for_people.py::test_a_waiting_request_can_be_read_and_is_taken_by_a_worker_that_comes_later
F42  test_f33_f42_no_room.py
     pipeline/test_modes.py::test_pools_of_a_few_prompts_park_and_wait_but_never_lock_up
"""
