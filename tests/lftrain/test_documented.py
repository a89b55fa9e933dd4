"""The Python of docs/runtime.md runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "runtime.md"


def test_the_code_of_the_page_trains(points: Path, tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {"path": points, "folder": str(tmp_path)}
    exec(compile(block, str(PAGE), "exec"), names)
    assert names["result"].step == 20 and names["result"].finished
