"""Here plans are searched for as they are for users."""

import pytest


@pytest.fixture(autouse=True)
def quick_plans():
    """Change nothing."""
