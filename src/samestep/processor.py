"""What the system says of this machine's processor."""

import platform
from pathlib import Path

_INFO = Path("/proc/cpuinfo")  # on Linux: lines such as "model name : AMD EPYC 7763", for each hardware thread


def name() -> str:
    """Return the processor's name; its architecture where the system doesn't name it."""
    named = next((line for line in _lines() if line.startswith("model name")), None)
    if named is not None:
        return named.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def instruction_set() -> str:
    """Return the architecture with the flags of its instruction set, for which code is compiled."""
    lines = _lines()
    if not lines:
        return f"{platform.machine()} {platform.processor()}"
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(("flags", "Features"))}))


def _lines() -> list[str]:
    try:
        return _INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
