"""docs/codecs.md names every option of every kind."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lfdata.codecs.base import KINDS
from lfdata.codecs.registry import make_encoder
from lfdata.errors import OptionError

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "codecs.md").read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_every_option_is_documented(kind: str) -> None:
    with pytest.raises(OptionError) as caught:
        make_encoder(kind, {"no_such_option": "1"})
    options = set(re.findall(r"(\w+)=", str(caught.value)))
    assert options
    assert {name for name in options if not re.search(rf"`{name}[`=]", TEXT)} == set()
