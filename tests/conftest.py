"""What all tests share: helper modules beside the tests, and the folder of shared data."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
SHARED = TESTS.parent.parent / "shared"

# Under the importlib mode a test's own folder is not importable. At the end of the path, so that a helper hides nothing.
sys.path.extend(str(folder) for folder in sorted(TESTS.iterdir()) if folder.is_dir() and not folder.name.startswith((".", "_")))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder ``shared/data`` beside the repository (odd files, scripts); tests are skipped where it is missing."""
    data = SHARED / "data"
    if not data.is_dir():
        pytest.skip("the shared data folder is not beside the repository")
    return data
