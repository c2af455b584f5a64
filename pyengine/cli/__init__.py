"""The command line: one file a command; each parses, calls and prints."""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
from collections.abc import Sequence

import typer

from pyengine import __version__
from pyengine.cli.audit import audit
from pyengine.cli.bench import bench
from pyengine.cli.chat import chat
from pyengine.cli.doctor import doctor
from pyengine.cli.generate import generate
from pyengine.cli.info import info
from pyengine.cli.parity import parity
from pyengine.cli.pull import pull
from pyengine.cli.quantize import quantize
from pyengine.errors import EngineError

app = typer.Typer(
    name="pyengine",
    help="Run language models with kernels of our own: no vendor BLAS, no framework.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

for command in (generate, chat, info, pull, quantize, parity, bench, audit, doctor):
    app.command(command.__name__)(command)

# Commands whose exit code 1 is a verdict: there a misused option is 2, as "could not look".
_VERDICTS = ("audit", "parity")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"pyengine {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Print the version."
    ),
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits.

    0: done. 1: an error, said in one line on standard error (or a command's own verdict).
    2: audit and parity could not look. 130: interrupted.
    """
    logging.basicConfig(format="pyengine: %(message)s", level=logging.WARNING, stream=sys.stderr)
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    verdict = words[0] in _VERDICTS
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # of a terminal that lacks a character
    try:
        code = typer.main.get_command(app).main(words, "pyengine", standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
    except EngineError as error:
        print(f"pyengine: error: {error}", file=sys.stderr)
        code = 2 if verdict else 1
    except (KeyboardInterrupt, typer.Abort):
        code = 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader went away: leave quietly, and keep the interpreter from flushing into nothing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except OSError as error:
        print(f"pyengine: error: cannot write: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except Exception as error:
        if not hasattr(error, "show"):  # anything but a misused option or the help page
            raise
        error.show()
        code = 2 if verdict else min(getattr(error, "exit_code", 1), 1)
    if code == 128 + signal.SIGINT:
        print("pyengine: interrupted", file=sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)
