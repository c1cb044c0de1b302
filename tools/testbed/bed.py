"""Testbed: makes hosts, joins them by bridges and cables, and takes all of it away again."""

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from testbed.cable import Cable, Joint
from testbed.host import Host
from testbed.network import FIRST, NETWORK, Switch
from testbed.possible import why_not
from testbed.ssh import CLIENT_SETTINGS, Ssh

_LETTERS = "abcdefgh"


class Testbed:
    """Hosts that see each other and nothing else: host-a, host-b, ... or by the names that are given.

    All files but a few are the machine's own. `binds` are files and folders to be seen at other places on every host.
    With `own_name_on_loopback` each one's name leads itself to 127.0.1.1, as Debian's installer has it.
    With several racks the hosts are dealt out in blocks, each with a bridge of its own; `cable` then says what lies
    between the first rack and each other one, by default a cable without delay.
    """

    __test__ = False  # no test, for pytest

    def __init__(
        self,
        hosts: int | Sequence[str] = 2,
        *,
        racks: int = 1,
        cable: Cable | None = None,
        ssh: bool = True,
        binds: Mapping[Path, str] | None = None,
        own_name_on_loopback: bool = False,
    ) -> None:
        reason = why_not(ssh=ssh)
        if reason is not None:
            raise RuntimeError(reason)
        count = hosts if isinstance(hosts, int) else len(hosts)
        if not 1 <= racks <= count <= len(_LETTERS):
            raise ValueError(f"{count} hosts in {racks} racks; 1 to {len(_LETTERS)} hosts, a rack for each at most")
        names = [f"host-{letter}" for letter in _LETTERS[:count]] if isinstance(hosts, int) else hosts
        self.addresses = {name: f"{NETWORK}.{FIRST + number}" for number, name in enumerate(names)}
        self._racks, self._cable, self._with_ssh, self.binds = racks, cable, ssh, binds or {}
        self._own_name_on_loopback = own_name_on_loopback
        self.hosts: list[Host] = []
        self._switches: list[Switch] = []
        self._joints: list[Joint] = []
        self._ssh: Ssh | None = None

    def __getitem__(self, name: str) -> Host:
        return next(host for host in self.hosts if host.name == name)

    def __enter__(self) -> Self:
        self.folder = Path(tempfile.mkdtemp(prefix="testbed-"))
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _make(self) -> None:
        self.folder.chmod(0o755)  # daemons that aren't root's look into it
        binds = dict(self.binds)
        if self._with_ssh:
            self._ssh = Ssh(self.folder / "ssh", self.addresses)
            binds[self._ssh.client_settings] = CLIENT_SETTINGS
        for number in range(self._racks):
            self._switches.append(Switch())
            if number:
                self._join(self._switches[0], self._switches[number], f"rack-{number}")
        a_rack = -(-len(self.addresses) // self._racks)
        for number, (name, address) in enumerate(self.addresses.items()):
            host = Host(
                name,
                address,
                self._switches[number // a_rack],
                folder=self.folder / name,
                binds={**binds, self._names_for(name): "/etc/hosts"},
                booted=self._start_services,
            )
            self.hosts.append(host)
            host.boot()

    def _names_for(self, host: str) -> Path:
        """A file with the addresses of all hosts, as one of them knows them."""
        known = {"localhost": "127.0.0.1", **self.addresses}
        if self._own_name_on_loopback:
            known[host] = "127.0.1.1"
        file = self.folder / f"hosts-of-{host}"
        file.write_text("".join(f"{address} {name}\n" for name, address in known.items()))
        return file

    def _join(self, one: Switch, other: Switch, port: str) -> None:
        if self._cable is None:
            one.connect_switch(other, port)
        else:
            self._joints.append(Joint(one, other, port, self._cable))

    def _start_services(self, host: Host) -> None:
        if self._ssh is not None:
            self._ssh.serve(host)

    def limit(self, rate: str | None) -> None:
        """Let every host's cable carry no more than `rate`, such as "100mbit"; None: as fast as it can."""
        for host in self.hosts:
            host.limit(rate)

    def close(self) -> None:
        """End every process on the hosts, and the hosts; a second call does nothing."""
        for host in self.hosts:
            host.crash()
        for thing in (*self._joints, *self._switches):
            thing.close()
        self._joints, self._switches = [], []
        shutil.rmtree(self.folder, ignore_errors=True)
