"""A host with accelerators, where there is none."""

import pytest
import torch

from samestep import environment


def accelerators(monkeypatch: pytest.MonkeyPatch, otherwise: int) -> None:
    """As many as the variable of visible devices names; `otherwise` without it."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))

    def there() -> int:
        named = environment.visible_devices()
        return otherwise if named is None else len(named.devices)

    monkeypatch.setattr(torch.accelerator, "device_count", there)
