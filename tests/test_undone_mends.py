"""A test fails where any one of the mends for accelerators is undone: most are seen on the pretended accelerator."""

from pathlib import Path

import pytest
from undone_mends import MENDS, PACKAGE, Mend, problem, unmended

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("mend", MENDS, ids=lambda mend: mend.what)
def test_each_mend_is_there(mend: Mend) -> None:
    assert (PACKAGE / mend.file).read_text(encoding="utf-8").count(mend.now) == 1


@pytest.mark.slow
@pytest.mark.parametrize("mend", MENDS, ids=lambda mend: mend.what)
def test_every_mend_that_is_undone_is_seen(mend: Mend, tmp_path: Path) -> None:
    found = problem(mend.tried_by, unmended(mend, tmp_path), seconds=280)
    assert found is not None
    assert mend.seen in found


@pytest.mark.slow
def test_nothing_is_wrong_where_none_is_undone() -> None:
    """Under the layouts of the mends that no other test takes."""
    for layout in ("fsdp2 offload=parameters", "fsdp2 cp2 offload=parameters"):
        assert problem(("language", layout), PACKAGE.parent, seconds=280) is None
