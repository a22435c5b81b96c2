"""Errors that speak to the user: the command line prints them without a traceback."""


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
