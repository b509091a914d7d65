"""`python -m laya`."""

import sys

from laya.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
