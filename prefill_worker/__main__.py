"""`python -m prefill_worker`."""

import sys

from prefill_worker.main import main

if __name__ == "__main__":
    sys.exit(main())
