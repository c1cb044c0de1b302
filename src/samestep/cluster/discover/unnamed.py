"""Names for hosts of which a place says only how many there are."""


def unnamed(nodes: int, this: int | None, own: str) -> list[str]:
    """This machine's own name, and for each other host its number in brackets, which nobody takes for a name."""
    return [own if index == this else f"(host {index})" for index in range(nodes)]
