"""The layouts of a number of devices that are looked at, simple ones first."""

from collections.abc import Iterator

_DATA = ("dp{}", "zero1x{}", "zero2x{}", "fsdp{}")
_OTHERS = ("tp{}", "tp{} sequence=split", "pp{}", "cp{}", "cp{} attention=ring")
_PAIRS = (
    "dp{0} tp{1}", "zero1x{0} tp{1}", "fsdp{0} tp{1}", "fsdp{0} tp{1} sequence=split", "pp{0} dp{1}",
    "pp{0} zero1x{1}", "dp{0} fsdp{1}", "pp{0} tp{1}", "fsdp{0} cp{1}", "dp{0} cp{1}",
)  # fmt: skip
_TRIPLES = ("pp{0} dp{1} tp{2}", "pp{0} zero1x{1} tp{2}", "dp{0} fsdp{1} tp{2}")
_LARGEST_TENSOR, _LARGEST_PIPELINE = 8, 16


def layouts_of(devices: int) -> Iterator[str]:
    """Layouts over so many devices: along one axis, along two, along three."""
    if devices == 1:
        yield "single"
        return
    for form in (*_DATA, *_OTHERS):
        if _sensible(text := form.format(devices)):
            yield text
    pairs = [(a, devices // a) for a in range(2, devices) if devices % a == 0]
    for form in _PAIRS:
        yield from filter(_sensible, (form.format(*pair) for pair in pairs))
    triples = [(a, b // c, c) for a, b in pairs for c in range(2, b) if b % c == 0]
    for form in _TRIPLES:
        yield from filter(_sensible, (form.format(*triple) for triple in triples))


def _sensible(text: str) -> bool:
    """Whether slices and stages are no more than models are cut into."""
    for part in text.split():
        if part.startswith("tp") and int(part[2:]) > _LARGEST_TENSOR:
            return False
        if part.startswith("pp") and int(part[2:]) > _LARGEST_PIPELINE:
            return False
    return True
