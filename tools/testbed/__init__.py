"""Testbed: several hosts on one machine, with names, addresses, SSH, a cable to pull and a power switch.

    with Testbed(2) as bed:
        host_a, host_b = bed.hosts
        host_a.run(["ssh", "host-b", "hostname"])

Root and Linux are needed; `why_not()` says what is missing. Nothing has a name outside a testbed, so any number of
them run beside each other, and all is gone when its process is, even if that was killed.
"""

from testbed.bed import Testbed
from testbed.cable import Cable
from testbed.host import FailedError, Host, Running
from testbed.possible import why_not

__all__ = ["Cable", "FailedError", "Host", "Running", "Testbed", "why_not"]
