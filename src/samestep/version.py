"""The version of what is installed, which stands in pyproject.toml alone."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("samestep")
except PackageNotFoundError:  # the prover alone
    VERSION = version("samestep-prove")
