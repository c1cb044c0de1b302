"""What agents believe of a store: JSON of a known form, signed by a host of the job.

PyTorch's store has no password. Whoever reaches its port lists the keys, reads and writes. So agents read and write
values by this module alone:

- A value is `<signature> <JSON>`. The signature is HMAC-SHA256 with the job's secret (`job_secret`) over the scope,
  the key and the JSON, so that a value counts under its own key only. A job without a secret writes "unsigned".
- The scope is chosen for each store by the process that serves it. For the store where hosts meet it is the first
  value there; a round's is in the announcement of its store. So no value of another job or round counts.
- A value is parsed only if its signature is right, and counts only in the form that its reader expects (a dataclass,
  str, ...). Any other raises ForeignValueError, or is left out with one line where the job goes on without it.

An old value that is put back under its own key in the same store has a right signature. Where that matters, values
have numbers that only grow: `Meeting.version` and `HostStatus.count`.
"""

import hmac
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from annotated_types import Ge, Le
from pydantic import StringConstraints, TypeAdapter, ValidationError

from samestep.errors import HostLostError
from samestep.launch.job_secret import JobSecret
from samestep.launch.logs import say

if TYPE_CHECKING:
    from torch.distributed import Store

_UNSIGNED = "unsigned"
_LARGEST = 16 << 20  # bytes of a value
_LONGEST = 1 << 16  # characters of a reason that a value carries
_SIGNATURE = 64  # characters

_IDENTITY = "samestep/identity"

Form = TypeVar("Form")

# Forms of parts of values.
Name = Annotated[str, StringConstraints(max_length=4096, pattern=r"^[^\x00]*$")]  # of a host, folder or address
Port = Annotated[int, Ge(1), Le(65535)]
Number = Annotated[int, Ge(0), Le(1 << 40)]
Moment = Annotated[float, Ge(0), Le(1e11)]  # seconds since 1970


class ForeignValueError(HostLostError):
    """A value in a store that none of the job's hosts wrote."""

    def __init__(self, key: str, where: str, reason: str) -> None:
        super().__init__(
            f'a value of key "{key}" in the job\'s store at {where} was not written by a host of this job: {reason}; '
            "let only the job's hosts reach that port"
        )
        self.key = key


class SignedStore:
    """Reads and writes signed values in a store. To wait for a key takes as long as the store's own time limit."""

    def __init__(self, store: "Store", secret: JobSecret | None, *, scope: str, where: str) -> None:
        """`where`: the store's address, for messages."""
        self.raw = store
        self.scope = scope
        self._secret = secret
        self._where = where
        self._told: set[str] = set()  # keys whose foreign values were reported

    def write(self, key: str, value: Any) -> None:
        self.raw.set(key, self.sealed(key, value))

    def wait(self, key: str, form: type[Form]) -> Form:
        """Read a value, once it is there. Raises ForeignValueError."""
        return self.opened(key, self.raw.get(key), form)

    def wait_all(self, keys: Sequence[str], form: type[Form]) -> list[Form]:
        """Read several values, once all are there. Raises ForeignValueError."""
        return [
            self.opened(key, value, form) for key, value in zip(keys, self.raw.multi_get(list(keys)), strict=True)
        ]

    def read(self, key: str, form: type[Form]) -> Form | None:
        """Read a value; None if there is none. Raises ForeignValueError."""
        return self.wait(key, form) if self.raw.check([key]) else None

    def read_own(self, key: str, form: type[Form]) -> Form | None:
        """Read a value; one that no host of the job wrote counts as none, and is reported once."""
        try:
            return self.read(key, form)
        except ForeignValueError as error:
            self.leave_out(error)
            return None

    def read_all_own(self, keys: Sequence[str], form: type[Form]) -> list[Form | None]:
        """The same of several keys, with one request where all have a value."""
        if not self.raw.check(list(keys)):
            return [self.read_own(key, form) for key in keys]
        forms: list[Form | None] = []
        for key, stored in zip(keys, self.raw.multi_get(list(keys)), strict=True):
            try:
                forms.append(self.opened(key, stored, form))
            except ForeignValueError as error:
                self.leave_out(error)
                forms.append(None)
        return forms

    def claim(self, key: str, value: Form, form: type[Form]) -> Form:
        """Write a value if there is none, and return the one that is there now. Raises ForeignValueError."""
        return self.opened(key, self.raw.compare_set(key, "", self.sealed(key, value)), form)

    def leave_out(self, error: ForeignValueError) -> None:
        """Report, once for each key, that a value does not count."""
        if error.key not in self._told:
            self._told.add(error.key)
            say(f"{error}; it is left out")

    def sealed(self, key: str, value: Any) -> str:
        """Return a value as it is stored."""
        # Text that UTF-8 doesn't have, such as of a file's name, gets question marks: no reader would parse it.
        text = json.dumps(value, default=_as_mapping, ensure_ascii=False).encode(errors="replace")
        return f"{self._signature(key, text)} {text.decode()}"

    def opened(self, key: str, stored: bytes, form: type[Form]) -> Form:
        """Check and parse a stored value. Raises ForeignValueError."""
        signature, _, text = stored[: _SIGNATURE + 1].partition(b" ")
        text = stored[len(signature) + 1 :]
        if len(stored) > _LARGEST:
            raise ForeignValueError(key, self._where, f"it has {len(stored):,} bytes")
        if not hmac.compare_digest(signature, self._signature(key, text).encode()):
            raise ForeignValueError(key, self._where, self._why_not(signature))
        try:
            return _reader(form).validate_json(text, strict=True)
        except ValidationError as error:
            detail = error.errors(include_input=False, include_context=False, include_url=False)[0]
            raise ForeignValueError(key, self._where, f"its form is another one ({detail['msg']})") from None

    def foreign(self, key: str, reason: str) -> ForeignValueError:
        """Return the error for a value whose content shows that it doesn't count."""
        return ForeignValueError(key, self._where, reason)

    def _signature(self, key: str, text: bytes) -> str:
        if self._secret is None:
            return _UNSIGNED
        return self._secret.signature(self.scope.encode(), key.encode(), text)

    def _why_not(self, signature: bytes) -> str:
        """Explain a signature that is not the right one."""
        if signature == _UNSIGNED.encode():
            return "it is not signed, and this host has a secret"
        if self._secret is not None:
            return "it is not signed with the secret of this host"
        signed = len(signature) == _SIGNATURE and not signature.strip(b"0123456789abcdef")
        return "it is signed with a secret, and this host has none" if signed else "it has none of the forms used"


def open_to_hosts(store: "Store", secret: JobSecret | None) -> None:
    """Choose the scope of a store that is served here and where hosts meet, which they wait for."""
    SignedStore(store, secret, scope="", where="").write(_IDENTITY, uuid.uuid4().hex)


def where_hosts_meet(store: "Store", secret: JobSecret | None, where: str) -> SignedStore:
    """Return the store where a job's hosts meet. Raises ForeignValueError, and what stores raise."""
    identity = SignedStore(store, secret, scope="", where=where).wait(_IDENTITY, str)
    return SignedStore(store, secret, scope=identity, where=where)


def shortened(reason: str) -> str:
    """Cut a reason that a value carries, such as a traceback, whose end matters."""
    return reason[-_LONGEST:]


@cache
def _reader(form: Any) -> TypeAdapter[Any]:
    return TypeAdapter(form)


def _as_mapping(value: Any) -> Mapping[str, Any]:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} is no part of a value in a store")
