"""The command line: all commands, and how they end.

    probemon watch demo --prompt "Tell me about whales."
    probemon analyze demo demo mails.jsonl --out scores/
    probemon inspect demo

Bad input: one line on standard error, exit status 2.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Annotated

import typer

from probemon import __version__
from probemon.cli import signals
from probemon.cli.registry import registered
from probemon.cli.shell_words import in_shell, meant
from probemon.cli.terminal import border, say
from probemon.errors import ConfigError, ProbemonError
from probemon.util.cache_folders import check_import_folders
from probemon.util.harmless_text import is_unicode

# Faults of the machine, not of a command.
_OF_THE_MACHINE = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE)

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in registered():
    loaded = command.load()
    if isinstance(loaded, typer.Typer):
        app.add_typer(loaded, name=command.name)
    else:
        app.command(command.name, short_help=command.summary)(loaded)


def _say_version(wanted: bool) -> None:
    if wanted:
        say(f"probemon {__version__}")
        raise typer.Exit


@app.callback()
def callback(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Watch a language model from the inside: concept probes, in a hierarchy, at every token."""
    _check_current_folder()


def main() -> None:
    """Run the command line, make its output harmless, and exit."""
    try:
        signals.install()
        _open_closed_streams()
        with border():
            code = _run()
            try:
                sys.stdout.flush()
            except OSError as error:  # a closed pipe (`| head`): no traceback
                code = code or _unwritten(error)
    except KeyboardInterrupt:
        code = 130
    finally:
        signals.settle()
        try:
            sys.stdout.flush()
        except OSError:  # the interpreter would complain at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(signals.received() or code)


def _run() -> int:
    """Run the command; return its exit status, 2 for expected errors."""
    try:
        _check_arguments()
        code = app(prog_name="probemon", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except ProbemonError as error:
        say(f"probemon: {in_shell(' '.join(str(error).split()))}", error=True)
        return 2
    except BrokenPipeError as error:
        return _unwritten(error)
    except KeyboardInterrupt:
        return 130
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # typer's help into a closed pipe
            return _unwritten(ended.__context__)
        raise
    except Exception as error:
        if _follows_interrupt(error):
            return 130
        if isinstance(error, OSError) and (missing := _missing_folder()):
            say(f"probemon: {missing}", error=True)
            return 2
        if lack := _machine_lacks(error):
            say(f"probemon: {lack}", error=True)
            return 2
        if not hasattr(error, "format_message"):  # not typer's: a defect
            if not signals.received():  # else the signal caused it
                traceback.print_exc()
            return 1
        context = getattr(error, "ctx", None)
        if type(error).__name__ == "NoArgsIsHelpError":
            say(*error.format_message().split("\n"))
            return 0
        path, message = context.command_path if context else "probemon", " ".join(error.format_message().split())
        suggestion = meant(message, path)
        end = f"{message.rstrip('.')}: {suggestion}" if suggestion else f"{message} (see {path} --help)"
        say(f"probemon: {end}", error=True)
        return 2


def _check_arguments() -> None:
    for argument in sys.argv[1:]:
        if not is_unicode(argument):
            try:
                data = os.fsencode(argument)
            except UnicodeEncodeError:
                data = argument.encode("utf-8", "backslashreplace")
            shown = data.decode("utf-8", "backslashreplace")
            raise ConfigError(f"the argument '{shown:.200}' is not UTF-8: write it in UTF-8, or rename its file")


def _check_current_folder() -> None:
    """Raise `ConfigError` if the current folder is gone: importing torch would kill the process."""
    try:
        os.getcwd()
    except OSError as error:
        raise ConfigError(
            f"the current folder does not exist any more ({error.strerror}): change to one that does (cd)"
        ) from error


def _missing_folder() -> str:
    """Describe a missing folder that torch's import needs."""
    try:
        check_import_folders()
    except ConfigError as error:
        return str(error)
    return ""


def _open_closed_streams() -> None:
    """Replace closed standard streams (`probemon ... >&-`) by the null device."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (open until the end)


def _unwritten(error: OSError) -> int:
    """Return the exit status if standard output cannot be written."""
    if isinstance(error, BrokenPipeError):
        return 141
    say(f"probemon: {_machine_lacks(error)}", error=True)
    return 2


def _machine_lacks(error: Exception) -> str:
    """Describe what the machine or a path lacks."""
    for cause in _causes(error):
        if _is_out_of_memory(cause):
            return (
                "memory ran out: give smaller batches or texts, a smaller --dtype or pack, or raise the limit (ulimit"
                " -v)"
            )
        if isinstance(cause, OSError) and cause.filename:
            return f"{cause.filename!s:.200} cannot be used: {cause.strerror}"
        if isinstance(cause, OSError) and cause.errno in _OF_THE_MACHINE:
            return f"a file cannot be read or written: {cause.strerror}"
    return ""


def _is_out_of_memory(error: BaseException) -> bool:
    """As in `probemon.adapters.bem.memory`, without torch."""
    return (
        isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or (
            isinstance(error, RuntimeError)
            and ("can't allocate memory" in str(error) or type(error).__name__ == "OutOfMemoryError")
        )
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen = set[int]()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or error.__context__


def _follows_interrupt(error: BaseException) -> bool:
    """True if Ctrl-C caused an error, perhaps within an import."""
    return any(isinstance(cause, KeyboardInterrupt) for cause in _causes(error))


if __name__ == "__main__":
    main()
