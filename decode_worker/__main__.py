"""`python -m decode_worker`."""

import sys

from decode_worker.main import main

if __name__ == "__main__":
    sys.exit(main())
