"""On which addresses the processes of a job listen."""

import psutil

LOOPBACKS = ("127.", "::1", "::ffff:127.")


def listening(process: psutil.Process) -> list[tuple[str, str]]:
    """The address of each socket that listens in a process and its descendants, with who holds it."""
    found = []
    for each in [process, *process.children(recursive=True)]:
        try:
            sockets = each.net_connections(kind="inet")
            name = f"{each.pid} {' '.join(each.cmdline())[-60:]}"
        except psutil.NoSuchProcess:
            continue
        found += [(each.laddr.ip, name) for each in sockets if each.status == psutil.CONN_LISTEN]
    return found


def elsewhere(sockets: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Of listening sockets those that other hosts reach."""
    return [each for each in sockets if not each[0].startswith(LOOPBACKS)]
