"""How the command-line tools of this package end, and what they may write."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path


def can_write(path: Path) -> bool:
    """Whether a file can be written there: asked before the work, not when it could be lost."""
    if path.exists():
        return not path.is_dir() and os.access(path, os.W_OK)
    return path.parent.is_dir() and os.access(path.parent, os.W_OK)


def run(main: Callable[[], None]) -> None:
    """Runs the `main` of a tool and exits with its status.

    Where nobody reads on (`| head`) it ends without a word, with the status that a shell gives to
    programs that SIGPIPE has ended.
    """
    status = None
    try:
        try:
            main()
        except SystemExit as end:  # argparse's, behind a page of help, or the tool's own
            status = end.code
        sys.stdout.flush()
    except KeyboardInterrupt:
        status = "interrupted"
    except BrokenPipeError:
        # Python flushes once more when it ends, which would be told as an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 128 + signal.SIGPIPE
    sys.exit(status)
