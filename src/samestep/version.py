"""The version of the installed package, which stands in pyproject.toml alone."""

from importlib.metadata import version

VERSION = version("samestep")
