"""The secret of a job, by which its hosts know their own values in a store that others reach, too.

A launch that starts the hosts itself (ssh, srun, Ray) makes one and sends it with the request, over standard input.
Where each host is started by itself, the user gives the same one to all, as a file or a variable. It is never in a
command line, in a rank's environment or in a message: what leaves `JobSecret` are signatures, and `sent`, which only
the request calls.
"""

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samestep.errors import UserError

OPTION, VARIABLE = "--secret-file", "SAMESTEP_JOB_SECRET"

_KEY_BYTES = 32
_LEAST, _MOST = 16, 4096  # bytes of a secret that a user gives
_MAKE = "head -c 32 /dev/urandom | base64 >"


class JobSecret:
    """A key for signatures."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    @classmethod
    def made(cls) -> "JobSecret":
        """A secret of a new job."""
        return cls(secrets.token_bytes(_KEY_BYTES))

    @classmethod
    def of_request(cls, text: str) -> "JobSecret":
        """The secret that `sent` wrote into a request. Raises ValueError if the text is none."""
        return cls(bytes.fromhex(text))

    def sent(self) -> str:
        """Return the secret as text for the request to a host's agent, which nobody else reads."""
        return self._key.hex()

    def signature(self, *parts: bytes) -> str:
        """Sign several parts; the length of each is signed, too, so that none can be moved into its neighbour."""
        signed = hmac.new(self._key, digestmod=hashlib.sha256)
        for part in parts:
            signed.update(len(part).to_bytes(8, "big") + part)
        return signed.hexdigest()

    def __repr__(self) -> str:
        return "JobSecret(***)"

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a job's secret goes to agents only, and never into a pickle")


def of_user(file: Path | None, variable: str | None) -> JobSecret | None:
    """Return the secret that the user gave, by a file or a variable; None if there is none. Raises UserError."""
    if file is not None and variable is not None:
        raise UserError(f"{OPTION} {file} and {VARIABLE} are both given; use one of them")
    if file is not None:
        return _of_text(_content(file), f"{OPTION} {file}")
    return _of_text(os.fsencode(variable), VARIABLE) if variable is not None else None


def check_not_sent(sources: Mapping[str, str]) -> None:
    """Raise UserError if the secret is among the variables that ranks get, whose sources these are."""
    if VARIABLE in sources:
        raise UserError(
            f"{sources[VARIABLE]} would give {VARIABLE} to every rank, and only agents may have it; leave it out "
            f"there, and use {OPTION} FILE"
        )


def _of_text(text: bytes, source: str) -> JobSecret:
    """Make a key of a user's text; spaces and line ends around it don't count."""
    text = text.strip()
    if not _LEAST <= len(text) <= _MOST:
        raise UserError(
            f"{source} has {len(text)} bytes; a secret has {_LEAST} to {_MOST}, such as those of {_MAKE} FILE"
        )
    return JobSecret(hashlib.sha256(b"samestep job secret " + text).digest())


def _content(file: Path) -> bytes:
    """Read a file that only its owner may read: this user, or root. Raises UserError."""
    try:
        # Not to wait for a writer, where the file is a pipe.
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            _check(file, os.fstat(descriptor))
            return os.read(descriptor, 2 * _MOST)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no name of a file"
        raise UserError(f"{OPTION} {str(file)!r}: {reason}; {_MAKE} FILE makes one, and chmod 600 FILE") from None


def _check(file: Path, status: os.stat_result) -> None:
    """Raise UserError for a file that others may read or change."""
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{OPTION} {file} is no regular file; a file with the secret is wanted")
    if status.st_uid not in (os.geteuid(), 0):
        raise UserError(
            f"{OPTION} {file} belongs to user {status.st_uid}, who can read and change it; use a copy of your own: "
            f"install -m 600 {file} COPY"
        )
    if status.st_mode & 0o077:
        raise UserError(
            f"{OPTION} {file} has the mode {stat.S_IMODE(status.st_mode):04o}, so others than its owner may use it; "
            f"chmod 600 {file}"
        )
