"""The error of the command line; it has a module of its own because the command can be run as a module too."""


class CommandError(Exception):
    """A command line that cannot be carried out. The message says what to change."""
