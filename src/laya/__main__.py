"""`python -m laya`."""

import sys

if __name__ == "__main__":
    if sys.argv[1:2] == ["--leash"]:  # an executable without a Python beside it runs the leash of its commands itself
        from laya.net.leash import main as leash

        sys.exit(leash(sys.argv[2:]))
    if hasattr(sys, "_MEIPASS"):
        from laya.cli.onefile import settle

        settle()
    from laya.cli.main import main

    sys.exit(main())
