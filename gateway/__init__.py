"""The gateway: OpenAI HTTP API in front, prefill queue and decode workers behind; decides who may answer a request.

One request, hop by hop:
1. `api.py` reads the body; `parsing.py` (with `openai_schema.py`) checks it, `capabilities.py` asks whether workers can
   do it, `output_format.py` has the format compiled that it wants; nothing is queued before all is checked.
2. `prepare.py` renders and tokenises (`tokenizer.py`, `chat_template.py`) and fits it into the context.
3. `hub.py` opens it: a `session.py` is its arbiter, whose `commands.py` the hub carries out; `queue_side.py` enqueues
   it as gen 1.
4. A decode worker asks Admit; the session says Go or Gone.
5. Deltas come in numbered frames; the session takes over what is new; the bell wakes the answer's writer.
6. `choice.py` makes text of tokens (`detokenise.py`, `stops.py`); `event_stream.py` or `json_answer.py` writes it.
7. The end: Finish or Fail, exactly once. `owner_watch.py` notices dead workers: the session goes on as gen + 1.

Rules of this folder:
- The only place with HTTP, tokenizers and templates. No redis, no zmq, no engine: everything goes through `broker`.
- `session.py`, `stops.py` and `owner_watch.judge` are pure: no clock, no sockets. `hub.py` carries out commands.
- Only `errors.py` maps codes to HTTP. Text of prompts and answers, and token ids, never get into logs.
- Unknown request fields are ignored; known ones that can't be honoured are refused (`openai_schema.REFUSED`).
"""
