"""Hosts of which a place says only how many there are: what they are called, and how many ranks each has."""

from samestep.errors import UserError


def unnamed(nodes: int, this: int | None, own: str) -> list[str]:
    """This machine's own name, and for each other host its number in brackets, which nobody takes for a name."""
    return [own if index == this else f"(host {index})" for index in range(nodes)]


def shares(world_size: int, local_size: int, nodes: int, this: int) -> list[int]:
    """Ranks of each host: this one's are known, and the others share the rest as evenly as they can."""
    others, rest = nodes - 1, world_size - local_size
    if rest < others or (rest and not others):
        raise UserError(
            f"there are {world_size} ranks on {nodes} hosts, and {local_size} of them on this one; they don't fit, "
            "so the launcher has not set all of these variables"
        )
    each = [rest // others + (index < rest % others) for index in range(others)] if others else []
    return [*each[:this], local_size, *each[this:]]
