"""Error file: a rank writes why it ends, in PyTorch's form, for whoever started it."""

import json
import time
from contextlib import suppress
from pathlib import Path


def tell(file: Path, message: str) -> None:
    """Write a failure's message where the elastic agent looks for it."""
    now = time.time()
    extra = {"py_callstack": message, "timestamp": str(int(now)), "time": now}
    new = file.with_name(f"{file.name}.new")  # the agent may look, or end this rank, at any moment
    with suppress(OSError):  # the message stands on standard error as well
        new.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}), encoding="utf-8")
        new.replace(file)
