"""`python -m gateway`."""

import sys

from gateway.main import main

if __name__ == "__main__":
    sys.exit(main())
