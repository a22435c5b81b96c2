"""`deco-ray <command>`: one table of commands, each imported only when it is asked for."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from deco_ray import __version__
from deco_ray.artefacts import UNWRITABLE
from deco_ray.errors import DecoError
from deco_ray.results.redact import redact

Command = Callable[[list[str]], int | None]
TRACEBACK = "DECO_RAY_TRACEBACK"  # environment variable: show where an error came from

# name -> (module, function, help), in the order a newcomer meets them
COMMANDS = {
    "doctor": ("deco_ray.doctor", "main", "what is installed, what the machine offers, what is wrong"),
    "demo": (
        "deco_ray.experiments.demo_command",
        "demo",
        "the whole method on a small synthetic cohort, with a report",
    ),
    "synth": ("deco_ray.cohort.synth_command", "main", "make a synthetic cohort with the paper's class counts"),
    "ingest": ("deco_ray.cohort.ingest_command", "main", "turn CLAM, TRIDENT, STAMP or .npy features into a cohort"),
    "split": ("deco_ray.cohort.split_command", "main", "divide a cohort into training, validation and test slides"),
    "run": ("deco_ray.experiments.pipeline_command", "main", "anchors, judge, contributions, final model, all seeds"),
    "sweep": ("deco_ray.experiments.sweep_command", "main", "try settings of one configuration side by side"),
    "compare": ("deco_ray.experiments.compare_command", "main", "DeCo and other methods on one split"),
    "reproduce": ("deco_ray.experiments.reproduce_command", "main", "the paper's tables and figures"),
    "predict": ("deco_ray.results.predict_command", "main", "grade slides with a trained model"),
    "explain": ("deco_ray.results.explain_command", "main", "heatmaps of what a prediction rests on"),
    "ui": ("deco_ray.results.ui", "main", "browse the tracked runs (MLflow)"),
}

RESUMED = {"demo", "ingest", "run", "sweep", "compare", "reproduce"}  # begun again, they go on where they were


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["--traceback"]:
        os.environ[TRACEBACK] = "1"
        arguments.pop(0)
    name = arguments.pop(0) if arguments else None
    if name in ("-h", "--help", "help"):
        return guarded(lambda _: print(usage()), [])
    if name in ("-V", "--version"):
        print(f"deco-ray {__version__}")
        return 0
    if name not in COMMANDS:
        print(usage() if name is None else unknown(name), file=sys.stderr)
        return 2
    module, function, _ = COMMANDS[name]

    def command(rest: list[str]) -> int | None:
        return getattr(importlib.import_module(module), function)(rest)

    return guarded(command, arguments, name in RESUMED)


def run_job(command: Command) -> None:
    """End this process with the command's exit code: what the scripts in jobs/ call."""
    resumed = command.__module__ in {COMMANDS[name][0] for name in RESUMED}
    sys.exit(guarded(command, sys.argv[1:], resumed))


def program(name: str) -> str:
    """What its usage calls a command: its script in jobs/ where that was started, else `deco-ray <name>`."""
    script = "full_pipeline.py" if name == "run" else f"{name}.py"
    return script if Path(sys.argv[0]).name == script else f"deco-ray {name}"


def guarded(command: Command, arguments: list[str], resumed: bool = False) -> int:
    """Run a command; an error the user can act on becomes one message, an interrupt becomes 130."""
    warnings.formatwarning = _one_line
    try:
        code = command(arguments) or 0
        sys.stdout.flush()  # a reader that has gone is noticed here rather than by the interpreter at its end
        return code
    except DecoError as error:
        if os.environ.get(TRACEBACK):
            traceback.print_exc()
        # Ray wraps what a worker raised and adds the worker's traceback to the text; the cause is clean
        cause = getattr(error, "cause", None)
        print(redact(f"error: {cause if isinstance(cause, DecoError) else error}"), file=sys.stderr)
        return 1
    except BrokenPipeError:
        # the reader (head, less) has gone; point stdout elsewhere or Python complains again while closing it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        where = f" to {error.filename}" if error.filename else ""
        print(f"error: cannot write{where}: {error.strerror}; make room there or choose another place", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted" + ("; the same command goes on from here" if resumed else ""), file=sys.stderr)
        return 130


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, _, text) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: deco-ray [--traceback] <command> [options]",
            "",
            "DeCo-MIL for long-tailed whole-slide images, on Ray.",
            "",
            *lines,
            "",
            "`deco-ray <command> --help` tells the options of one command. New here? Try `deco-ray doctor`,",
            "then `deco-ray demo`. --traceback (or DECO_RAY_TRACEBACK=1) shows where an error came from.",
        ]
    )


def unknown(name: str) -> str:
    near = difflib.get_close_matches(name, COMMANDS, 1)
    hint = f"; did you mean `deco-ray {near[0]}`?" if near else ""
    return f"deco-ray has no command {name!r}{hint}\nCommands: {', '.join(COMMANDS)}; `deco-ray --help` explains them"


def _one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Our own warnings speak to the user, who needs no source line; others keep their origin."""
    return (
        f"warning: {message}\n" if category is UserWarning else f"{filename}:{lineno}: {category.__name__}: {message}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
