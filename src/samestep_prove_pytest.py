"""pytest's plugin of the prover, by its entry point: the fixture `assert_same_step`."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

import samestep_prove

if TYPE_CHECKING:
    from samestep.script_proof.compare import Verdict


@pytest.fixture
def assert_same_step(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> "Callable[..., Verdict]":
    """`samestep_prove.assert_same_step` in pytest's root folder, from which scripts are named."""
    monkeypatch.chdir(pytestconfig.rootpath)
    return samestep_prove.assert_same_step
