import pytest

from remat.stores import disk


@pytest.fixture(autouse=True)
def in_the_background(request, monkeypatch) -> None:
    """Have small checkpoints of tests dealt with as large ones are; not with the mark `at_once`."""
    if "at_once" not in request.keywords:
        monkeypatch.setattr(disk, "_SMALL", -1)
