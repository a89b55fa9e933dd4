"""Reading below a root: nothing outside, nothing but regular files, nothing that hangs."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from lfdata.errors import SampleError
from shard_builder.sources import files
from shard_builder.sources.files import read_file, show, size_inside


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "a.bin").write_bytes(b"inside")
    (tmp_path / "secret").write_bytes(b"outside")
    (tmp_path / "rootx").mkdir()
    (tmp_path / "rootx" / "b").write_bytes(b"a neighbour whose name begins alike")
    return folder


def code_of(root: Path, path: str) -> str:
    with pytest.raises(SampleError) as caught:
        read_file(root, path)
    with pytest.raises(SampleError) as again:
        size_inside(root, path)
    assert again.value.code == caught.value.code
    return caught.value.code


def test_a_file_below_the_root_is_read_whole(root: Path) -> None:
    assert read_file(root, "sub/a.bin") == b"inside"
    assert size_inside(root, "./sub//a.bin") == 6
    (root / "empty").touch()
    assert read_file(root, "empty") == b""


@pytest.mark.parametrize("path", ["../secret", "sub/../../secret", "/etc/passwd", "", "a\0b", "..", "sub/.."])
def test_paths_that_leave_the_root_are_refused_before_anything_is_touched(root: Path, path: str) -> None:
    assert code_of(root, path) == "outside-root"


def test_links_are_followed_inside_the_root_only(root: Path, tmp_path: Path) -> None:
    (root / "in").symlink_to("sub/a.bin")
    (root / "in-absolute").symlink_to(root / "sub" / "a.bin")
    (root / "out").symlink_to("../secret")
    (root / "out-absolute").symlink_to(tmp_path / "secret")
    (root / "neighbour").symlink_to("../rootx/b")
    (root / "dir").symlink_to("..")
    (root / "chain").symlink_to("out")
    assert read_file(root, "in") == read_file(root, "in-absolute") == b"inside"
    for path in ("out", "out-absolute", "neighbour", "dir/secret", "chain"):
        assert code_of(root, path) == "outside-root"


def test_loops_missing_files_and_files_as_directories_are_named(root: Path) -> None:
    (root / "loop").symlink_to("loop")
    (root / "a").symlink_to("b")
    (root / "b").symlink_to("a")
    (root / "dangling").symlink_to("nothing")
    assert code_of(root, "loop") == code_of(root, "a") == "unreadable"
    assert code_of(root, "none") == code_of(root, "dangling") == code_of(root, "sub/a.bin/x") == "missing-file"
    assert code_of(root, "x" * 300) == "unreadable"


def test_fifos_sockets_devices_and_directories_are_refused_and_never_hang(root: Path) -> None:
    os.mkfifo(root / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(root)  # a socket's path is short
        try:
            server.bind("socket")
        finally:
            os.chdir(here)
        (root / "null").symlink_to("/dev/null")
        assert code_of(root, "fifo") == code_of(root, "socket") == code_of(root, "sub") == "not-a-file"
        assert code_of(root, "null") == "outside-root"


def test_an_lfs_pointer_is_named_with_the_cure(root: Path, shared_data: Path) -> None:
    (pointer,) = (shared_data / "odd").glob("lfs_pointer__*")
    (root / "video.mp4").write_bytes(pointer.read_bytes())
    with pytest.raises(SampleError, match="git lfs pull") as caught:
        read_file(root, "video.mp4")
    assert (caught.value.code, caught.value.path) == ("lfs-pointer", "video.mp4")
    (root / "long").write_bytes(pointer.read_bytes() + bytes(1024))
    assert len(read_file(root, "long")) > 1024


def test_the_size_limit_is_checked_before_reading(root: Path) -> None:
    with open(root / "huge", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(SampleError) as caught:
        read_file(root, "huge")
    assert caught.value.code == "too-large"
    assert read_file(root, "sub/a.bin", 6) == b"inside"
    with pytest.raises(SampleError):
        read_file(root, "sub/a.bin", 5)


@pytest.mark.parametrize("change", [b"inside and more", b"in"])
def test_a_file_that_changes_while_it_is_read_is_an_error(root: Path, monkeypatch: pytest.MonkeyPatch, change: bytes) -> None:
    path, real = root / "sub" / "a.bin", os.fstat

    def fstat(descriptor: int) -> os.stat_result:
        found = real(descriptor)
        path.write_bytes(change)
        return found

    monkeypatch.setattr(files.os, "fstat", fstat)
    with pytest.raises(SampleError) as caught:
        read_file(root, "sub/a.bin")
    assert caught.value.code == "changed"


def test_a_directory_swapped_for_a_link_after_the_check_does_not_lead_outside(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, outside = os.open, root.parent / "rootx"
    (outside / "a.bin").write_bytes(b"outside")

    def swapped(path: object, flags: int, *rest: object, **more: object) -> int:
        monkeypatch.setattr(files.os, "open", real)
        (root / "sub").rename(root / "sub-before")
        (root / "sub").symlink_to(outside)
        return real(path, flags, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(files.os, "open", swapped)
    with pytest.raises(SampleError) as caught:
        read_file(root, "sub/a.bin")
    assert caught.value.code == "outside-root"


def test_names_that_are_not_utf8_are_read_and_their_errors_can_be_encoded(root: Path) -> None:
    name = os.fsdecode(b"\xff\xfe.bin")
    with pytest.raises(SampleError) as caught:
        read_file(root, name)
    assert caught.value.path == show(name) == "\\xff\\xfe.bin"
    str(caught.value).encode()
    (root / name).write_bytes(b"x")
    assert read_file(root, name) == b"x"


def test_a_root_that_is_itself_a_link_holds_the_files_of_its_target(root: Path) -> None:
    (root.parent / "alias").symlink_to("root")
    (root / "in").symlink_to("sub/a.bin")
    assert read_file(root.parent / "alias", "sub/a.bin") == read_file(root.parent / "alias", "in") == b"inside"
    assert code_of(root.parent / "alias", "../secret") == "outside-root"
