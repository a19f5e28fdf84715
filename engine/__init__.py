"""Engines: token ids in, token ids out. `base.py` is the port that workers see.

Folder rules
- May import connector, pdq.wire and pdq.runtime; never broker, a role, HTTP or a tokenizer.
- torch and transformers are imported lazily, in the engine process only.
- `embedded/` is our own engine (its `__init__` tells its rules), `models/` finds and converts its models.
"""
