"""`python -m megamoe` is the command `megamoe`."""

import sys

from megamoe.cli import main

if __name__ == "__main__":
    sys.exit(main())
