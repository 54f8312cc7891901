"""`python -m laconic` and `torchrun -m laconic` are the command `laconic`."""

import sys

from laconic.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
