"""Who did not come: the rank for which all others wait, found from what the ranks have entered."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from samestep.supervision.beat import Progress
from samestep.supervision.counts import Counts, members

# The innermost Python call of a rank that waits for others is in one of these.
_WAITING = ("torch/distributed/", "torch/autograd/", "torch/nn/parallel/")


def stopped(pid: int) -> bool:
    """Whether a process was stopped by SIGSTOP or a debugger; False where the system does not tell."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] in ("T", "t")


def behind(entered: Mapping[int, Counts]) -> list[int]:
    """Ranks that have not entered a collective in which others are, and that wait in none themselves."""
    late: set[int] = set()
    waiting: set[int] = set()
    for key in {key for mine in entered.values() for key in mine}:
        counts = {rank: entered[rank].get(key, 0) for rank in members(key) if rank in entered}
        if len(set(counts.values())) > 1:
            late |= {rank for rank, count in counts.items() if count < max(counts.values())}
            waiting |= {rank for rank, count in counts.items() if count > min(counts.values())}
    return sorted(late - waiting or late)


def earliest(ranks: Sequence[Progress]) -> list[int]:
    """Ranks that are in an earlier step than others; none where all are in the same one."""
    steps = [each.step for each in ranks]
    return [each.rank for each in ranks if each.step == min(steps) < max(steps)]


def not_waiting(stacks: Mapping[int, str]) -> list[int]:
    """Ranks whose innermost call is not one that waits for others; without a stack nothing is known of a rank."""
    found = []
    for rank, stack in stacks.items():
        calls = [line for line in stack.splitlines() if line.strip().startswith("File ")]
        if calls and not any(part in calls[0] for part in _WAITING):
            found.append(rank)
    return found
