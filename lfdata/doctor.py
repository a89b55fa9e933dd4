"""What this installation can do natively, with which libraries, and what to install for the rest."""

from __future__ import annotations

import importlib
import os
import platform
import sys
from importlib import metadata
from typing import Any

from lfdata.format import gather

__all__ = ["examine", "healthy", "render"]

_READER, _PIXELS = "lfdata.format._native", "lfdata.codecs._pixels"
_PACKAGES = (
    "numpy",
    "msgspec",
    "xxhash",
    "zstandard",
    "torch",
    "soundfile",
    "soxr",
    "tokenizers",
    "tiktoken",
    "fsspec",
    "s3fs",
    "gcsfs",
)
_DEBIAN = {
    _READER: "gcc libc6-dev python3-dev",
    _PIXELS: "gcc libc6-dev python3-dev libjpeg-dev libwebp-dev",
}
_USE = {
    _READER: "batches are read row by row in Python: the same bytes, slower",
    _PIXELS: "pictures are decoded whole and resized by PIL: the same pictures, slower",
}
_REBUILD = "make install, or: python -m pip install --no-deps --force-reinstall --editable ."
_PIL = "one of the two: python -m pip install pillow, or (x86, resizes faster) python -m pip install pillow-simd; never both"


def examine() -> dict[str, Any]:
    """Everything that is printed, JSON-able.

    ``native``: for each native module whether it is ``active``, what it reports of itself, or ``why`` it is not. ``pil``: what
    :func:`lfdata.codecs.pil_versions.pil_report` says, ``None`` without PIL. ``findings``: libraries with known holes. ``advice``: what
    to do about what is missing.
    """
    found: dict[str, Any] = {
        "lfdata": sys.modules["lfdata"].__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": {"usable": len(os.sched_getaffinity(0)), "all": os.cpu_count()},
        "packages": {name: _version(name) for name in _PACKAGES},
        "native": {_READER: _reader(), _PIXELS: _pixels()},
        **_pil(),
    }
    found["advice"] = _advice(found)
    return found


def healthy(found: dict[str, Any]) -> bool:
    """Whether both native modules are active and there is a PIL."""
    return found["pil"] is not None and all(module["active"] for module in found["native"].values())


def render(found: dict[str, Any]) -> str:
    """The report as text for people."""
    cores = found["cores"]
    lines = [
        f"lfdata {found['lfdata']}, Python {found['python']}, {found['machine']}",
        f"cores      {cores['usable']} usable of {cores['all']}",
        "",
        "native modules",
    ]
    for name, module in found["native"].items():
        details = ", ".join(f"{key} {value}" for key, value in module.items() if key not in ("active", "why"))
        state = ("active" if module["active"] else "NOT ACTIVE") + (f" ({details})" if details else "")
        lines.append(f"  {name:<24} {state}")
        if not module["active"]:
            lines += [f"    why: {module['why']}", f"    so:  {_USE[name]}"]
    lines += ["", "PIL"]
    if found["pil"] is None:
        lines.append("  NOT FOUND: pictures can be neither converted nor decoded")
    else:
        pil = found["pil"]
        libraries = ", ".join(f"{key} {value}" for key, value in pil.items() if key not in ("distribution", "pillow") and value)
        lines += [f"  {pil['distribution']} {pil['pillow']}", f"  {libraries}"]
    lines += [f"  {finding}" for finding in found["findings"]]
    lines += ["", "packages", "  " + ", ".join(f"{name} {version or 'absent'}" for name, version in found["packages"].items())]
    if found["advice"]:
        lines += ["", "to do", *(f"  {line}" for line in found["advice"])]
    lines += ["", "all is active" if healthy(found) else "not all is active"]
    return "\n".join(lines) + "\n"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _why(name: str) -> str:
    """Why a native module cannot be imported: it was not built, or what it is linked with is not there."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        return "it was not built"
    except ImportError as error:
        return f"it was built, but cannot be loaded: {error}"
    return "it can be imported, but was not when the package was"


def _reader() -> dict[str, Any]:
    if gather.native is None:
        return {"active": False, "why": _why(_READER)}
    return {"active": True, "threads": gather.default_threads()}


def _pixels() -> dict[str, Any]:
    try:
        pixels = importlib.import_module("lfdata.codecs.pixels")
    except ImportError as error:
        return {"active": False, "why": f"lfdata.codecs.pixels cannot be imported: {error}"}
    report = dict(pixels.native_report())
    if not report.pop("native"):
        return {"active": False, "why": _why(_PIXELS)}
    return {"active": True, **report}


def _pil() -> dict[str, Any]:
    try:
        versions = importlib.import_module("lfdata.codecs.pil_versions")
    except ImportError:
        return {"pil": None, "findings": []}
    return {"pil": versions.pil_report(), "findings": versions.check_codec_versions()}


def _advice(found: dict[str, Any]) -> list[str]:
    lines = []
    if found["pil"] is None:
        lines.append(f"PIL: {_PIL}")
    missing = [name for name, module in found["native"].items() if not module["active"]]
    if missing:
        packages = sorted({package for name in missing for package in _DEBIAN[name].split()})
        lines += [
            f"what {' and '.join(missing)} need: apt-get install {' '.join(packages)}",
            f"then build again, in the checkout: {_REBUILD}",
        ]
    return lines
