"""Commands in processes of their own that need not import anything: a fork of this one, which has.

child = forked(["inspect", "demo"], out="out", errors="errors", RANK="1")    # its number
assert ended(child) == 0
"""

import os
import sys
import traceback
import warnings
from pathlib import Path

from probemon.cli import app as command_line


def forked(
    line: list[object], *, out: Path | str, errors: Path | str, cwd: Path | str = ".", **environment: str
) -> int:
    """Begin a command of probemon, which writes into two files, or a terminal."""
    child = os.fork()
    if child:
        return child
    status = 9
    try:
        for path, number in ((out, 1), (errors, 2)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        os.chdir(cwd)
        os.environ.update(environment)
        warnings.resetwarnings()  # those of the tests are errors
        sys.argv = ["probemon", *map(str, line)]
        command_line.main()
    except SystemExit as exit_:
        status = int(exit_.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def ended(child: int) -> int:
    """Wait for it; its status, below 0 where a signal ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
