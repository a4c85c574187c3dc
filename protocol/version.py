"""The version of this package, as pyproject.toml has it."""

from importlib.metadata import version

VERSION = version("routed-experts-server")
