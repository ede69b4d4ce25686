"""The `spformat` command: verbs, and the one place where errors become exit codes."""

from __future__ import annotations

import errno
import gc
import json
import os
import signal
import sys
import threading
from contextlib import suppress
from importlib import metadata
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from . import backends, bench, convert, diff, env, explain, formats, inspect, merge, plan, recommend, tune, validate
from .hints import again, hint, instead, takes_misfit, was_given
from .limits import bounded
from .output import notes, open_streams, set_quiet, verdict, warnings
from .refusals import reason, remedies

if TYPE_CHECKING:
    from spformat.errors import SpformatError

app = typer.Typer(
    name="spformat",
    help="Pruned weights and sparse matrices in the format a GPU runs fastest: look, convert, check, multiply.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with: spformat inspect CHECKPOINT",
)


def _version(show: bool) -> None:
    if show:
        try:
            version = metadata.version("spformat")
        except metadata.PackageNotFoundError:  # a checkout that is not installed
            from spformat import __version__ as version
        typer.echo(f"spformat {version}")
        raise typer.Exit


@app.callback()
def _main(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass


for verb in (inspect, recommend, plan, convert, merge, validate, diff, explain, bench, tune, formats, backends, env):
    name = verb.__name__.rpartition(".")[2]
    opens_files = name not in ("formats", "backends", "env")
    run = bounded(verb.run) if opens_files else verb.run
    app.command(name, epilog=verb.EPILOG, no_args_is_help=opens_files)(run)


_SIGNALS = {"SIGTERM": 143, "SIGHUP": 129}
"""The signals that end a command like an error, and their exit codes. Python turns SIGINT into an error by itself."""
_VERBS_THAT_WRITE = frozenset({"convert", "merge", "tune", "bench"})
"""Commands that may have something to put in order after Ctrl-C."""
_OF_WRITES = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF, errno.EAGAIN}
"""What the system answers to a write into stdout that it refuses."""
_PATIENCE = 1.0
"""Seconds after Ctrl-C within which the other commands end."""


def main() -> None:
    """Entry point: typed errors end with their exit code and no traceback (SPFORMAT_DEBUG=1 shows it)."""
    gc.set_threshold(100_000, 50, 100)  # a command is short: garbage collection would only cost time
    closed = sys.stdout is None
    open_streams()
    set_quiet(False)
    if closed:  # no answer could be printed, so nothing is started
        sys.exit(_of_stdout("it is closed, so nothing was started; > /dev/null drops the output"))
    ends: list[int] = []

    def end(number: int, frame: Any) -> None:
        ends.append(_SIGNALS[signal.Signals(number).name])
        sys.exit(ends[0])

    for name in _SIGNALS:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), end)
    interrupted, ended = threading.Event(), threading.Event()

    def interrupt(number: int, frame: Any) -> None:
        if not interrupted.is_set() and _VERBS_THAT_WRITE.isdisjoint(sys.argv):
            threading.Thread(target=_leave_unless, args=(ended,), daemon=True).start()
        interrupted.set()
        signal.default_int_handler(number, frame)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where Ctrl-C is ignored, as with nohup
        signal.signal(signal.SIGINT, interrupt)
    try:
        _log(os.environ.get("SPFORMAT_LOGLEVEL", ""))
        if "--json" in sys.argv:  # then the error about a misspelt command is printed as JSON, too
            sys.exit(app(standalone_mode=False))
        app()
    except SystemExit as e:
        if e.code in (130, *_SIGNALS.values()):
            _leave(int(e.code))
        # Typer, and Rich below its help, answer a reader that went away (`| head`) with exit 1; it is no error.
        gone = e.code == 1 and isinstance(e.__context__, BrokenPipeError)
        raise SystemExit(verdict() if gone else e.code) from None
    except KeyboardInterrupt:
        _leave(130)
    except BrokenPipeError:
        # The reader went away (`| head`): nothing to say, and nothing to flush to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(verdict())
    except Exception as e:
        if interrupted.is_set() or ends:  # an import that a signal cuts off may end with any error
            _leave(130 if interrupted.is_set() else ends[0])
        if os.environ.get("SPFORMAT_DEBUG"):
            raise
        sys.exit(_code_of(e))
    finally:
        ended.set()


def _leave_unless(ended: threading.Event) -> None:
    """End after Ctrl-C even if the main thread does not: it may compile for seconds, or wait for a thread that does."""
    if ended.wait(_PATIENCE):
        return
    if sys.stderr.isatty():
        os.write(sys.stderr.fileno(), b"\x1b[?25h\n")  # the cursor, which a progress bar hides
    os._exit(130)


def _leave(code: int) -> NoReturn:
    """End after a signal, without waiting for a server that sends nothing to a download."""
    # Nothing is imported here: the signal may have cut off an import of the same module.
    transfers = sys.modules.get("spformat.checkpoint.transfers")
    begins = getattr(transfers, "THREADS", None)
    if begins and any(thread.name.startswith(begins) for thread in threading.enumerate()):
        with suppress(OSError):
            sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _log(level: str) -> None:
    if not level:
        return
    import logging

    from spformat.errors import UsageError

    levels = logging.getLevelNamesMapping()
    if level.upper() not in levels:
        raise UsageError(f"SPFORMAT_LOGLEVEL: expected one of {', '.join(levels)}, got {level!r:.40}")
    logging.basicConfig(level=level.upper(), format="%(name)s: %(message)s")


def _code_of(e: Exception) -> int:
    from spformat.arrays.library import device_error
    from spformat.errors import DeviceFault, InputError, InternalError, SpformatError, UsageError, WriteError

    as_json = "--json" in sys.argv
    e = device_error(e) or e
    if isinstance(e, DeviceFault):
        report(e, as_json)
        sys.stderr.flush()
        os._exit(e.exit_code)  # no more CUDA calls: destructors would make some
    if isinstance(e, SpformatError):
        return report(e, as_json)
    if isinstance(e, typer.BadParameter.__base__ or ()):  # what Typer says of a command line
        return report(UsageError(e.format_message()), as_json)  # type: ignore[attr-defined]
    if isinstance(e, MemoryError):
        sys.stderr.write("error: out of memory; nothing was published\n")
        return 71
    if isinstance(e, OSError) and e.filename is None:  # not of a file: those are typed, or have its name
        if e.errno == errno.ENOENT:
            return report(InputError("the current folder was removed: change into another one"), as_json)
        if e.errno in _OF_WRITES:
            return _of_stdout(f"cannot write: {e.strerror}; files that were written before are complete")
        return report(WriteError(f"cannot write: {e.strerror or e}"), as_json)
    message = f"unexpected {type(e).__name__}: {e}; this is a bug in spformat, please report it"
    return report(InternalError(message), as_json)


def _of_stdout(what: str) -> int:
    """Print that standard output cannot be written, and return the exit code."""
    from spformat.errors import WriteError

    return report(WriteError(f"standard output: {what}"), "--json" in sys.argv)


def _folder_of_link(error: SpformatError) -> str:
    """The folder that a refused symlink leads into, of a Hugging Face cache the folder of the model; "" without one."""
    path = str(error.fields.get("path", ""))
    if "--follow-symlinks" not in error.message or not os.path.islink(path):
        return ""
    folder = os.path.dirname(os.path.realpath(path))
    return os.path.dirname(folder) if os.path.basename(folder) == "blobs" else folder


def _report_misfit(error: SpformatError) -> None:
    """Print the error about a tensor that its target cannot hold, with a command that works."""
    text = str(error)
    warnings().print(f"error: {reason([text])}", soft_wrap=True, style="red")
    remedy, others = remedies([text]).removeprefix(". "), ""
    if "--nonfinite keep" in text:  # a refusal to prune
        hint(again("--nonfinite", "keep"))
    elif error.fields.keys() & {"rows", "beyond_budget"}:  # a matrix beyond the budget, which --misfit would read
        others = "--exclude leaves this tensor as it is; --misfit needs a --max-memory that holds it"
    elif takes_misfit():
        # Most often an embedding does not fit, so pruning comes last.
        hint(again("--misfit", "keep"))
        others = (
            "leaves such tensors as they are; --misfit FORMAT gives them that one; --exclude and --rule choose by name"
        )
    elif was_given("--to"):
        hint(instead("--to", "auto"))
        others = "the smallest format that holds the matrix"
        remedy += ", which takes checkpoints" if remedy.endswith("--prune magnitude") else ""
    for line in (f"({others})" if others else "", remedy):
        if line:
            notes().print(f"      {line}", style="dim", soft_wrap=True)


def report(error: SpformatError, as_json: bool) -> int:
    """Print one typed error, and return its exit code."""
    if as_json:
        sys.stderr.write(json.dumps(error.to_json()) + "\n")
        return error.exit_code
    text = str(error)
    if error.exit_code == 3 and not was_given("--misfit"):
        _report_misfit(error)
    else:
        warnings().print(f"error: {text}", soft_wrap=True, style="red")
    folder = _folder_of_link(error)
    if folder:
        hint(again("--follow-symlinks", folder))
    if error.exit_code == 70 and not os.environ.get("SPFORMAT_DEBUG"):
        notes().print("set SPFORMAT_DEBUG=1 for the traceback", style="dim")
    return error.exit_code


if __name__ == "__main__":
    main()
