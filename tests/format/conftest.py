"""Makes the helper modules of this folder importable under every pytest import mode, and names the marker of long tests."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker where no other configuration does."""
    config.addinivalue_line("markers", "slow: long fault and property runs, left to make test-all")
