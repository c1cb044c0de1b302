"""Limits: the times after which hosts of a job take each other for dead."""

from dataclasses import dataclass

from samestep.errors import UserError

_SIGNS = 4  # of life that must be missing before a host is silent


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Times in seconds."""

    silence: float = 8.0  # of a host, or of the store where hosts meet, until it counts as lost
    beat: float = 0.5  # between two signs of life
    keep_alive: int = 1  # between two of those that PyTorch's rendezvous takes note of; three missing: not there
    first_call: float = 30.0  # that a job which has the fewest hosts it needs waits for more, when it starts
    last_call: float = 2.0  # the same, when it starts anew
    meet: float = 600.0  # that hosts wait until there are enough
    # That a host which is cut off tries to reach the others again; by these limits it ends within 20 s.
    come_back: float = 8.0

    def check(self) -> None:
        """Raise UserError for a limit under which hosts would be lost that are there."""
        least = _SIGNS * self.beat
        if self.silence < least:
            raise UserError(
                f"--silence-limit is {self.silence:g} s, and hosts give a sign of life every {self.beat:g} s; "
                f"{least:g} s or more would do"
            )
