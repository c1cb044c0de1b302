"""PyTorch's elastic agent: what it does to its process besides starting ranks."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def silent_agent() -> Iterator[None]:
    """The agent logs each failure at length; the root cause is reported once, by us."""
    # Its modules' loggers have levels of their own.
    names = [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]
    loggers = [
        logging.getLogger(name) for name in (*names, "torch.distributed.elastic", "torch.multiprocessing.spawn")
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
