"""The command line: ``moeloom train | generate | eval | doctor``."""

from __future__ import annotations

import os
import sys

from moeloom.errors import ArgumentError, ArgumentTypeError, DataError, MoeloomError

_USAGE_ERRORS = (ArgumentError, ArgumentTypeError, DataError)


def main() -> None:
    """Run the command line; exit code 0 = done, 1 = failed, 2 = the call or its input is wrong, 130 = interrupted."""
    try:
        from moeloom.cli.app import app
    except ModuleNotFoundError as error:
        sys.exit(f"error: the command line needs '{error.name}': pip install 'moeloom[train]'")
    code = 0
    try:
        code = app(standalone_mode=False, prog_name="moeloom") or 0
    except Exception as error:
        code = _explain(error)
    except KeyboardInterrupt:
        print("interrupted before training began; nothing to save", file=sys.stderr)
        code = 130
    sys.stdout.flush()
    sys.stderr.flush()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # Transfers with a lost peer may still be in flight, and their destructors would wait for it.
        os._exit(code)
    sys.exit(code)


def _explain(error: Exception) -> int:
    """Print an error in one paragraph and return the exit code; unknown errors keep their traceback."""
    import click

    if isinstance(error, click.exceptions.Abort):
        print("interrupted", file=sys.stderr)
        return 130
    if isinstance(error, click.ClickException):
        error.show()
        return error.exit_code
    if not isinstance(error, MoeloomError):
        import traceback

        traceback.print_exception(error)
        return 1
    print(f"error: {error}", file=sys.stderr)
    return 2 if isinstance(error, _USAGE_ERRORS) else 1
