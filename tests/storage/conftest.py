"""Data sets behind servers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import batchkit
import pytest
from serverkit import BUCKET, CREDENTIALS, HOST, Proxy, WebServer, gcs_server, s3_server, upload

from lfdata import Cache

COUNT = 60


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of data sets: ``kinds`` with all kinds of fields, ``pictures`` of some hundred KB."""
    folder = tmp_path_factory.mktemp("served")
    batchkit.write_all_kinds(folder / "kinds")
    batchkit.write_pictures(folder / "pictures", COUNT, size=360)
    return folder


@pytest.fixture
def web(root: Path) -> Iterator[Proxy]:
    """They, on a web server behind a proxy."""
    server = WebServer(root)
    proxy = Proxy(server.port)
    yield proxy
    proxy.close()
    server.close()


@pytest.fixture(scope="session")
def s3_port(root: Path) -> Iterator[int]:
    """They, in an S3 server."""
    pytest.importorskip("moto")
    with s3_server() as port:
        for name in ("kinds", "pictures"):
            upload(port, root / name, name)
        yield port


@pytest.fixture
def s3(s3_port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """The same behind a proxy, and an environment that leads there."""
    proxy = Proxy(s3_port)
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{HOST}:{proxy.port}")
    yield proxy
    proxy.close()


@pytest.fixture(scope="session")
def gcs_port(root: Path) -> Iterator[int]:
    """They, in an emulator of Google Cloud Storage."""
    for module in ("gcsfs", "gcp_storage_emulator"):
        pytest.importorskip(module, reason=f"{module} is not installed: extras gcs and dev")
    from gcsfs.core import GCSFileSystem

    with gcs_server() as port:
        system = GCSFileSystem(endpoint_url=f"http://{HOST}:{port}", token="anon", skip_instance_cache=True)
        for name in ("kinds", "pictures"):
            for path in sorted((root / name).iterdir()):
                system.pipe_file(f"{BUCKET}/{name}/{path.name}", path.read_bytes())
        yield port


@pytest.fixture
def gcs(gcs_port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """The same behind a proxy, and an environment that leads there."""
    proxy = Proxy(gcs_port)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://{HOST}:{proxy.port}")
    monkeypatch.setattr("fsspec.config.conf", {"gs": {"token": "anon"}})
    yield proxy
    proxy.close()


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    """An empty cache of small blocks, which is soon tired of waiting."""
    return Cache(
        str(tmp_path / "cache"), max_bytes=16 << 20, block_bytes=1 << 16, request_bytes=1 << 18, deadline=20.0, timeout=1.0
    )
