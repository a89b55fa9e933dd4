"""Keys as names of tar members: every key comes back, and every name is one that a WebDataset reader takes for that key."""

from __future__ import annotations

import tarfile

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shard_builder.sources.grouping import Splitter
from shard_builder.sources.tarstream import _why_skipped
from shard_builder.tarkeys import escape_key, unescape_key

PIECES = st.sampled_from(
    [b".", b"..", b"/", b"%", b"_", b"__", b"a", b"B", b"\0", b"\n", b"\xff", "\u00e9".encode(), b"%41", b"jpg"]
)
KEYS = st.one_of(st.binary(max_size=40), st.lists(PIECES, max_size=12).map(b"".join))


@given(KEYS)
@example(b"")
@example(b"%")
def test_every_key_comes_back_and_its_name_is_split_where_it_should_be(key: bytes) -> None:
    name = escape_key(key)
    assert unescape_key(name) == key
    name.decode("utf-8")
    assert _why_skipped(tarfile.TarInfo(name.decode() + ".jpg"), name + b".jpg") == ""
    assert Splitter("first", ()).split(name + b".seg.png") == (name, "seg.png")


@given(st.from_regex(rb"[A-Za-z0-9_\-]{1,9}(/[A-Za-z0-9\-]{1,9}){0,3}", fullmatch=True))
def test_ordinary_keys_stay_as_they_are(key: bytes) -> None:
    if not key.startswith(b"__"):
        assert escape_key(key) == key


@given(KEYS, KEYS)
def test_two_keys_never_share_a_name(one: bytes, other: bytes) -> None:
    assert (escape_key(one) == escape_key(other)) == (one == other)


@pytest.mark.parametrize("name", [b"%4", b"a%zz", b"%%41", b"100%", b"%4a"])
def test_what_is_never_written_is_refused(name: bytes) -> None:
    with pytest.raises(ValueError, match="percent"):
        unescape_key(name)
