"""``python -m lfdata doctor``: what it finds, what it says about what is missing, and its exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lfdata import __version__, doctor
from lfdata.__main__ import main
from lfdata.codecs import pixels
from lfdata.format import gather

REPOSITORY = Path(__file__).resolve().parent.parent
READER, PIXELS = "lfdata.format._native", "lfdata.codecs._pixels"


class FakePixels(ModuleType):
    """A native module that reports and does nothing else."""

    @staticmethod
    def report() -> dict[str, str]:
        return {"libjpeg": "2.1.5", "libwebp": "1.3.2", "simd": "avx2"}


@pytest.fixture
def all_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both native modules, whatever is built here."""
    monkeypatch.setattr(gather, "native", ModuleType(READER))
    monkeypatch.setattr(pixels, "native_module", FakePixels(PIXELS))


def run(*arguments: str, before: str = "pass") -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own, after the statements ``before``."""
    code = f"import sys; {before}; from lfdata.__main__ import main; sys.exit(main({list(arguments)!r}))"
    return subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False
    )


def test_all_active(all_there: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert __version__ in text and "NOT ACTIVE" not in text and "to do" not in text
    assert text.endswith("all is active\n") and "simd avx2" in text


def test_json(all_there: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["native"][PIXELS] == {"active": True, "libjpeg": "2.1.5", "libwebp": "1.3.2", "simd": "avx2"}
    assert found["native"][READER]["active"] and found["advice"] == []
    assert found["pil"]["distribution"] in ("pillow", "pillow-simd", "unknown")
    assert 1 <= found["cores"]["usable"] <= found["cores"]["all"]
    assert found["packages"]["numpy"]


@pytest.mark.parametrize(("name", "needs"), [(READER, "python3-dev"), (PIXELS, "libjpeg-dev")])
def test_a_missing_module(
    all_there: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, needs: str
) -> None:
    monkeypatch.setattr(*{READER: (gather, "native"), PIXELS: (pixels, "native_module")}[name], None)

    def absent(wanted: str) -> Any:
        if wanted == name:
            raise ModuleNotFoundError(f"No module named {wanted!r}")
        return sys.modules[wanted]

    monkeypatch.setattr(doctor.importlib, "import_module", absent)
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert f"{name:<24} NOT ACTIVE" in text and "it was not built" in text and "slower" in text
    assert needs in text and "pip install" in text and text.endswith("not all is active\n")


def test_a_module_that_cannot_be_loaded(all_there: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pixels, "native_module", None)

    def broken(wanted: str) -> Any:
        if wanted == PIXELS:
            raise ImportError("libjpeg.so.62: cannot open shared object file")
        return sys.modules[wanted]

    monkeypatch.setattr(doctor.importlib, "import_module", broken)
    found = doctor.examine()
    assert not doctor.healthy(found)
    assert "cannot be loaded: libjpeg.so.62" in found["native"][PIXELS]["why"]


def test_known_holes_are_shown(all_there: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lfdata.codecs.pil_versions.check_codec_versions", lambda: ["error: a hole"])
    found = doctor.examine()
    assert "error: a hole" in doctor.render(found) and doctor.healthy(found)


def test_without_pil() -> None:
    done = run("doctor", "--json", before="sys.modules['PIL'] = None")
    assert (done.returncode, done.stderr) == (1, "")
    found = json.loads(done.stdout)
    assert found["pil"] is None
    assert any("pillow" in line for line in found["advice"])
    assert "NOT FOUND" in run("doctor", before="sys.modules['PIL'] = None").stdout


def test_as_a_program() -> None:
    here = doctor.healthy(doctor.examine())
    done = subprocess.run(
        [sys.executable, "-m", "lfdata", "doctor"], cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == (0 if here else 1) and not done.stderr and READER in done.stdout
    assert run().returncode == 2 and run("surgeon").returncode == 2


def test_it_imports_neither_torch_nor_click() -> None:
    code = "import sys; from lfdata.doctor import examine; examine(); print(sorted({'torch', 'click'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
