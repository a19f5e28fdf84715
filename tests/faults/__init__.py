"""Fault tests: workers, clients and messages are stopped, killed and lost at named points; a ledger judges.

How one is written (`stage.py` shows it): a deployment without workers is shared by the tests (`conftest.py`); each test
starts its own workers, told at which points to stop (`points.py`), asks through its ledger, and does what the fault is.
After the test `invariants.py` looks for what must not be left. Nothing of this is in the product: `worker_process.py`
and `engine_process.py` are the roles' own mains with wrapped ports (`ports.py`).

A fault has its number in the name of its file, `test_fNN_...py`, unless its test was there before and lives elsewhere.
Every fault has a line here, and `test_fault_list.py` checks that what it names exists:

F1   test_f01_prefill_killed.py
"""
