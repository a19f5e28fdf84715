"""The same stand-in as the prefill worker's."""

import runpy

runpy.run_path("prefill_worker/__main__.py", run_name="__main__", init_globals={"ROLE": "decode_worker"})
