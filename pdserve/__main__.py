"""`python -m pdserve`."""

import sys

from pdserve.cli import main

if __name__ == "__main__":
    sys.exit(main())
