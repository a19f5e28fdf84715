"""Chaos: a whole deployment under load, in which processes die, hang, come and go, and Redis stumbles and forgets.

    make chaos SECONDS=300 SEED=1 MODE=push          (python -m tests.chaos --seconds 300 --seed 1 --mode push)

`plan.py`      when what is struck, and what each client asks: pure functions of the seed, so a run can be repeated
`strikes.py`   carries the plan out; notes which requests the victim had at that moment
`clients.py`   ask one request after the other at two gateways; a ledger line each
`recovery.py`  how long the requests of a struck worker stood still (pure)
`traces.py`    what must be the same before and after: keys, consumers, file descriptors, connections
`verdict.py`   the invariants I1 to I6 over the ledger and over what is left when all is quiet
`run.py`       all of it, and the files in the run's folder; `report.py` prints

What can't be repeated: which request a worker happens to hold when it is struck. That depends on the machine.
"""
