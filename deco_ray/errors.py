"""Errors that speak to the user: the command line prints them without a traceback."""

import pickle
import traceback


class DecoError(Exception):
    """Something the user can act on: the message names the slide, file or key, and what to do."""


class ConfigError(DecoError):
    """A configuration file, key or value is wrong."""


class CohortError(DecoError):
    """A cohort, a split or a feature file cannot be used."""


class ModelError(DecoError):
    """A model cannot be built, loaded or applied."""


class StageError(DecoError):
    """A stage of an experiment failed; the message names the stage, the seed and the cause."""


def portable(error: Exception, slide: str = "") -> bytes:
    """The error as bytes that raise the same type elsewhere, with the slide in its text."""
    if isinstance(error, DecoError):
        if slide not in str(error):  # never so without a slide
            error = type(error)(f"slide {slide}: {error}")
        return pickle.dumps(error.with_traceback(None))
    # a bug, not a matter of the user's: keep where it happened
    place = f"in slide {slide}, " if slide else ""
    error.add_note(f"{place}in a worker:\n{''.join(traceback.format_exception(error))}")
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
        return data
    except Exception:  # an exception that cannot travel
        return pickle.dumps(StageError(f"{place}in a worker: {type(error).__name__}: {error}"))
