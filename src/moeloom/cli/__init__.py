"""The command line: ``moeloom train | generate | eval | doctor``."""

from __future__ import annotations

import os
import sys
import traceback

from moeloom.errors import ArgumentError, ArgumentTypeError, DataError, MoeloomError

_USAGE_ERRORS = (ArgumentError, ArgumentTypeError, DataError)


def main() -> None:
    """Run the command line; exit code 0 = done, 1 = failed, 2 = the call or its input is wrong, 130 = interrupted."""
    try:
        from moeloom.cli.app import app
    except ModuleNotFoundError as error:
        sys.exit(f"error: the command line needs '{error.name}': pip install 'moeloom[train]'")
    try:
        app(prog_name="moeloom")
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else 1
    except MoeloomError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2 if isinstance(error, _USAGE_ERRORS) else 1
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # Transfers with a lost peer may still be in flight, and their destructors would wait for it.
        os._exit(code)
    sys.exit(code)
