"""Where the single executable begins: the same command line as `python -m laya`."""

import sys

from laya.cli.main import main

sys.exit(main())
