"""`shard-builder convert` from and to URLs gives what it gives from and to local places."""

from __future__ import annotations

import hashlib
import io
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from urllib.parse import unquote

import pytest
from batchkit import pixels
from click.testing import CliRunner, Result
from PIL import Image
from serverkit import BUCKET, HOST, Asked, Fault, Proxy, WebServer, client

import lfdata
from lfdata.errors import LfdataError
from lfdata.format.meta import INDEX, MANIFEST
from shard_builder.verbs.convert import command

pytestmark = pytest.mark.service


def convert(*arguments: str | Path) -> Result:
    """The command, in this process."""
    return CliRunner().invoke(command, [*map(str, arguments), "--workers", "1"])


def done(*arguments: str | Path) -> Result:
    result = convert(*arguments)
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of pictures by class, a table with files beside it, and two tars."""
    top = tmp_path_factory.mktemp("sources")
    rows = []
    for number in range(12):
        data = io.BytesIO()
        Image.fromarray(pixels(number, 40, 50)).save(data, "JPEG")
        path = top / "pictures" / f"class{number % 2}" / f"{number:02d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.getvalue())
        rows.append(f'{{"key": "k{number}", "file": "class{number % 2}/{number:02d}.jpg", "n": {number}}}\n')
    (top / "table.jsonl").write_text("".join(rows))
    (top / "tars").mkdir()
    for half in range(2):
        with tarfile.open(top / "tars" / f"{half:03d}.tar", "w") as tar:
            for path in sorted((top / "pictures").rglob("*.jpg"))[half::2]:
                member = tarfile.TarInfo(path.name)
                member.size = path.stat().st_size
                tar.addfile(member, io.BytesIO(path.read_bytes()))
    return top


@pytest.fixture
def bucket(sources: Path, s3: Proxy, s3_port: int) -> str:
    """They, in S3."""
    import boto3

    store = client(s3_port, boto3)
    for path in sorted(sources.rglob("*")):
        if path.is_file():
            store.put_object(Bucket=BUCKET, Key=f"sources/{path.relative_to(sources)}", Body=path.read_bytes())
    for found in store.list_objects_v2(Bucket=BUCKET, Prefix="out/").get("Contents", []):
        store.delete_object(Bucket=BUCKET, Key=found["Key"])
    return f"s3://{BUCKET}/sources"


FIELDS = ["--field", "image:image=file@file", "--field", "n:scalar=n,dtype=int32"]


def digests(place: str | Path, **options: str) -> list[str]:
    """Of the files of a data set."""
    if isinstance(place, Path):
        names = [INDEX, MANIFEST, *sorted(path.name for path in place.glob("*.lfd"))]
        return [hashlib.sha256((place / name).read_bytes()).hexdigest() for name in names]
    store = lfdata.open(place, **options).store
    assert store is not None
    names = [INDEX, MANIFEST, *sorted(shard.file for shard in lfdata.open(place, **options).manifest.shards)]
    return [hashlib.sha256(store.read_all(name, 1 << 30)).hexdigest() for name in names]


def test_every_kind_of_source_by_url_gives_the_bytes_of_the_local_one(sources: Path, bucket: str, tmp_path: Path) -> None:
    cases: list[tuple[str, list[str], list[str]]] = [
        ("pictures", [], []),
        ("table.jsonl", [*FIELDS, "-s", f"root={sources}/pictures"], [*FIELDS, "-s", f"root={bucket}/pictures"]),
        ("tars/{000..001}.tar", [], []),
        ("tars", [], []),
    ]
    for number, (name, local, remote) in enumerate(cases):
        done(sources / name, tmp_path / f"local{number}", *local)
        done(f"{bucket}/{name}", tmp_path / f"remote{number}", *remote, "--work", tmp_path / "work")
        assert digests(tmp_path / f"remote{number}") == digests(tmp_path / f"local{number}"), name
        assert not (tmp_path / "work").exists()


def test_a_target_by_url_holds_the_bytes_of_the_local_one(sources: Path, bucket: str, tmp_path: Path) -> None:
    done(sources / "pictures", tmp_path / "local")
    target = f"s3://{BUCKET}/out/set"
    result = done(f"{bucket}/pictures", target, "--work", tmp_path / "work")
    assert "complete" in result.output and not (tmp_path / "work").exists()
    assert digests(target, cache=str(tmp_path / "cache")) == digests(tmp_path / "local")
    assert "use --overwrite" in str(convert(sources / "pictures", target, "--work", tmp_path / "work").exception)
    done(sources / "pictures", target, "--work", tmp_path / "work", "--overwrite", "--field", "image:image=image,codec=webp")
    assert lfdata.open(target, cache=tmp_path / "cache").manifest.fields[0].params["codec"] == "webp"


def test_an_upload_that_fails_shows_nothing_and_goes_on(
    sources: Path, bucket: str, s3: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest comes last; a second try sends only what is missing."""
    target, work = f"s3://{BUCKET}/out/again", tmp_path / "work"

    def refuse(asked: Asked) -> Fault | None:
        return Fault(status=403) if asked.method == "PUT" and INDEX in asked.path else None

    s3.rule = refuse
    failed = convert(sources / "pictures", target, "--work", work)
    assert isinstance(failed.exception, LfdataError) and "transfer failed" in str(failed.exception)
    with pytest.raises(LfdataError, match="no manifest"):
        lfdata.open(target, cache=tmp_path / "cache")
    s3.rule = lambda _asked: None
    s3.log.clear()
    done(sources / "pictures", target, "--work", work, "--resume")
    assert not [asked for asked in s3.log if asked.method == "PUT" and ".lfd" in asked.path]
    assert len(lfdata.open(target, cache=tmp_path / "cache")) == 12


def test_copies_that_were_cut_go_on_and_are_right(sources: Path, bucket: str, s3: Proxy, tmp_path: Path) -> None:
    s3.rule = lambda asked: (
        Fault(cut=100) if asked.method == "GET" and asked.path.endswith(".tar") and asked.number < 3 else None
    )
    done(sources / "tars", tmp_path / "local")
    done(f"{bucket}/tars", tmp_path / "remote", "--work", tmp_path / "work")
    assert digests(tmp_path / "remote") == digests(tmp_path / "local")


def test_places_that_cannot_be_used_are_named(bucket: str, web: Proxy, tmp_path: Path) -> None:
    for source, target, words in (
        (f"{bucket}/nothing", tmp_path / "a", "no such object"),
        (f"{web.url}/nothing.jsonl", tmp_path / "a", "no such object"),
        (f"{bucket}/pictures", f"{web.url}/set", "web server"),
        ("s3://user:hunter2@bucket/set", tmp_path / "a", "credentials"),
    ):
        result = convert(source, target, "--work", tmp_path / "work")
        assert isinstance(result.exception, LfdataError) and words in str(result.exception), (source, result.exception)
        assert "hunter2" not in str(result.exception)


def test_a_target_that_cannot_be_is_refused_before_any_work(
    sources: Path, bucket: str, s3: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shard_builder.verbs.convert._run", lambda *_: pytest.fail("it was converted"))
    missing = convert(sources / "pictures", "s3://no-such-bucket/set", "--work", tmp_path / "work")
    assert "there is no s3://no-such-bucket: make the bucket first" in str(missing.exception)
    s3.rule = lambda asked: Fault(status=403) if asked.method == "POST" else None
    refused = convert(sources / "pictures", f"s3://{BUCKET}/out/closed", "--work", tmp_path / "work")
    assert "nothing may be written there: permission denied" in str(refused.exception)
    s3.rule = lambda _asked: None
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    for more in ([], ["--resume"]):
        none = convert(sources / "pictures", f"s3://{BUCKET}/out/open", "--work", tmp_path / "work", *more)
        assert "no credentials in the environment" in str(none.exception)


def test_looking_at_a_target_leaves_nothing_there(bucket: str, s3_port: int) -> None:
    import boto3

    from shard_builder.upload import Upload

    Upload(f"s3://{BUCKET}/out/looked").check(resume=False, overwrite=False)
    store = client(s3_port, boto3)
    assert not store.list_objects_v2(Bucket=BUCKET, Prefix="out/looked").get("Contents")
    assert not store.list_multipart_uploads(Bucket=BUCKET).get("Uploads")
    Upload("memory://looked/set").check(resume=False, overwrite=False)
    assert not Upload("memory://looked/set")._system.find("/looked")


def test_what_is_converted_and_not_sent_is_gone_on_with_by_resume_as_its_messages_say(
    sources: Path, bucket: str, s3: Proxy, tmp_path: Path
) -> None:
    target, work = f"s3://{BUCKET}/out/unsent", tmp_path / "work"
    s3.rule = lambda asked: Fault(status=403) if asked.method == "PUT" and INDEX in asked.path else None
    failed = convert(sources / "pictures", target, "--work", work)
    assert "the same command with --resume sends what is missing" in str(failed.exception)
    s3.rule = lambda _asked: None
    again = convert(sources / "pictures", target, "--work", work)
    assert "is converted and not all sent; --resume sends what is missing" in str(again.exception)
    done(sources / "pictures", target, "--work", work, "--resume")


def test_a_whole_bucket_is_a_source_and_a_target(sources: Path, bucket: str, s3_port: int, tmp_path: Path) -> None:
    import boto3

    store = client(s3_port, boto3)
    for name in ("whole", "empty"):
        store.create_bucket(Bucket=name)
    for path in sorted((sources / "pictures").rglob("*.jpg")):
        store.put_object(Bucket="whole", Key=str(path.relative_to(sources / "pictures")), Body=path.read_bytes())
    done(sources / "pictures", tmp_path / "local")
    for number, url in enumerate(("s3://whole/", "s3://whole")):
        done(url, tmp_path / f"remote{number}", "--work", tmp_path / "work")
        assert digests(tmp_path / f"remote{number}") == digests(tmp_path / "local")
    done(sources / "pictures", "s3://empty/", "--work", tmp_path / "work")
    assert digests("s3://empty/", cache=str(tmp_path / "cache")) == digests(tmp_path / "local")
    for url in ("s3://no-such-bucket/", "s3://no-such-bucket"):
        assert "no-such-bucket" in str(convert(url, tmp_path / "none", "--work", tmp_path / "work").exception)


def test_a_signed_url_is_a_source_and_its_signature_stays_out_of_everything(
    sources: Path, bucket: str, s3: Proxy, s3_port: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import boto3

    caplog.set_level("DEBUG", logger="lfdata")
    signer = client(s3_port, boto3)
    keys = [f"sources/tars/{half:03d}.tar" for half in range(2)]
    signed = [signer.generate_presigned_url("get_object", Params={"Bucket": BUCKET, "Key": key}) for key in keys]
    secrets = [url.partition("?")[2].rpartition("Signature=")[2].partition("&")[0] for url in signed]
    assert all(len(secret) > 20 for secret in secrets)
    work, out = tmp_path / "work", tmp_path / "signed"
    done(sources / "tars", tmp_path / "local")
    result = done("::".join(signed), out, "--work", work)
    assert digests(out) == digests(tmp_path / "local")
    failed = [
        convert(signed[0].replace("000.tar", "nothing.tar"), tmp_path / "none", "--work", work),
        convert(signed[0], tmp_path / "none", "--kind", "coco", "--work", work),
        convert(sources / "tars", signed[0], "--work", work),
    ]
    with pytest.raises(LfdataError, match="of one object") as refused:
        lfdata.open(signed[0], cache=tmp_path / "cache")
    told = result.output + caplog.text + str(refused.value) + "".join(each.output + repr(each.exception) for each in failed)
    kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    for secret in secrets:
        assert secret not in told and secret.encode() not in kept and unquote(secret).encode() not in kept


def test_google_cloud_storage_is_a_source_and_a_target(sources: Path, gcs: Proxy, gcs_port: int, tmp_path: Path) -> None:
    from gcsfs.core import GCSFileSystem

    system = GCSFileSystem(endpoint_url=f"http://{HOST}:{gcs_port}", token="anon", skip_instance_cache=True)
    for path in sorted((sources / "pictures").rglob("*.jpg")):
        system.pipe_file(f"{BUCKET}/pictures-in/{path.relative_to(sources / 'pictures')}", path.read_bytes())
    done(sources / "pictures", tmp_path / "local")
    target = f"gs://{BUCKET}/out/set"
    done(f"gs://{BUCKET}/pictures-in", target, "--work", tmp_path / "work")
    assert digests(target, cache=str(tmp_path / "cache")) == digests(tmp_path / "local")
    assert "use --overwrite" in str(convert(sources / "pictures", target, "--work", tmp_path / "work").exception)
    missing = convert(sources / "pictures", "gs://no-such-bucket/set", "--work", tmp_path / "work")
    assert "there is no gs://no-such-bucket: make the bucket first" in str(missing.exception)


def test_the_commands_with_urls_in_the_documentation_run(
    sources: Path, s3: Proxy, s3_port: int, web: Proxy, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import boto3

    store = client(s3_port, boto3)
    store.create_bucket(Bucket="bucket")
    for path in sorted((sources / "pictures").rglob("*.jpg")):
        store.put_object(Bucket="bucket", Key=f"photos/{path.relative_to(sources / 'pictures')}", Body=path.read_bytes())
    (root / "train.tar").write_bytes((sources / "tars" / "000.tar").read_bytes())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LFDATA_CACHE", str(tmp_path / "cache"))
    text = (Path(__file__).resolve().parents[2] / "docs" / "sources.md").read_text(encoding="utf-8")
    commands = [line for line in text.splitlines() if line.startswith("shard-builder convert") and "://" in line]
    assert len(commands) >= 3
    for number, line in enumerate(commands):
        _, _, source, _, *rest = shlex.split(line)
        done(source.replace("https://host", web.url), tmp_path / f"out{number}", *rest)
        assert len(lfdata.open(tmp_path / f"out{number}")) > 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_copy_from_a_server_that_keeps_failing(sources: Path, tmp_path: Path, number: int) -> None:
    server = WebServer(sources)
    proxy = Proxy(server.port)

    def cut(asked: Asked) -> Fault | None:
        # So that the length is known, and no range ever comes whole.
        return None if asked.last - asked.first < 4096 else Fault(cut=0)

    proxy.rule = cut
    field = ["--field", "n:scalar=n,dtype=int32"]
    line = [sys.executable, "-c", "from shard_builder.cli import main; main()", "convert", f"{proxy.url}/tars/000.tar"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen(
        [*line, str(tmp_path / "t"), "--work", str(tmp_path / "w"), *field],
        env=environment,
        stderr=subprocess.PIPE,
        preexec_fn=_heard,
    )
    deadline = time.monotonic() + 60
    while len(proxy.log) < 4 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert process.poll() is None and len(proxy.log) >= 4
    process.send_signal(number)
    # Far below the two minutes for which a failing server is tried again.
    _, errors = process.communicate(timeout=40)
    assert process.returncode not in (0, -signal.SIGKILL) and b"Traceback" not in errors
    assert not (tmp_path / "t" / MANIFEST).exists()
    proxy.close()
    server.close()


def _heard() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
