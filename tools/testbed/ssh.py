"""SSH in a testbed: a server on each host, and root's key known on all of them, as on a cluster that is set up.

The clients' settings lie where OpenSSH looks for them on each host, so plain `ssh host-b` works there.
"""

import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from testbed.host import Host
from testbed.possible import program

CLIENT_SETTINGS = "/etc/ssh/ssh_config.d"


class Ssh:
    """Keys and settings, which all hosts of a testbed share."""

    def __init__(self, folder: Path, addresses: Mapping[str, str]) -> None:
        folder.mkdir()
        self._folder = folder
        for key in ("user_key", "host_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
        (folder / "authorized_keys").write_bytes((folder / "user_key.pub").read_bytes())
        names = ",".join(name for host in addresses.items() for name in host)
        (folder / "known_hosts").write_text(f"{names} {(folder / 'host_key.pub').read_text()}")
        self.client_settings = folder / "client"
        self.client_settings.mkdir()
        (self.client_settings / "testbed.conf").write_text(
            f"Host {names.replace(',', ' ')}\n  User root\n  IdentityFile {folder}/user_key\n  IdentitiesOnly yes\n"
            f"  GlobalKnownHostsFile {folder}/known_hosts\n  UserKnownHostsFile /dev/null\n"
            "  StrictHostKeyChecking yes\n"
        )
        (folder / "server.conf").write_text(
            f"Port 22\nHostKey {folder}/host_key\nAuthorizedKeysFile {folder}/authorized_keys\nPidFile none\n"
            "PasswordAuthentication no\nPermitRootLogin prohibit-password\nStrictModes no\nUsePAM no\n"
            "AcceptEnv LANG LC_*\nMaxStartups 100\nMaxSessions 100\nLogLevel INFO\n"
        )

    def serve(self, host: Host) -> None:
        """Start the server on a host, and wait until it listens."""
        log = self._folder / f"{host.name}.log"
        log.write_text("")
        server = program("sshd")
        assert server is not None
        host.run([server, "-f", str(self._folder / "server.conf"), "-E", str(log)], timeout=10)
        until = time.monotonic() + 10
        while "Server listening" not in log.read_text():
            if time.monotonic() > until:
                raise RuntimeError(f"sshd of {host.name} does not listen: {log.read_text()}")
            time.sleep(0.01)
