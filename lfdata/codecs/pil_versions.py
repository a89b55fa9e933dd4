"""Which PIL is there, with which libraries, and whether one of them is known to be dangerous."""

from __future__ import annotations

import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import PIL
from PIL import features

SAFE_WEBP = (1, 3, 2)
DEBIAN_SAFE_WEBP = "1.2.4-0.2+deb12u1"
_WEBP_ADVICE = "CVE-2023-4863 (heap overflow in lossless WebP)"


def pil_report() -> dict[str, Any]:
    """The PIL distribution and library versions that determine decoded and encoded bytes.

    JSON-able: ``distribution`` (``pillow``, ``pillow-simd`` or ``unknown``), ``pillow`` (version), and one version or ``None``
    each for ``libjpeg_turbo``, ``libjpeg``, ``libwebp``, ``zlib``, ``littlecms2``, ``libtiff``, ``avif``. No paths.
    """
    distribution = "unknown"
    for name in ("pillow-simd", "pillow"):
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        distribution = name
        break
    return {
        "distribution": distribution,
        "pillow": PIL.__version__,
        "libjpeg_turbo": features.version_feature("libjpeg_turbo"),
        "libjpeg": features.version_codec("jpg"),
        "libwebp": features.version_module("webp"),
        "zlib": features.version_feature("zlib_ng") or features.version_codec("zlib"),
        "littlecms2": features.version_module("littlecms2"),
        "libtiff": features.version_codec("libtiff"),
        "avif": _avif_version(),
    }


def _avif_version() -> str | None:
    return features.version_module("avif") if "avif" in features.modules else None


def loaded_libraries(stem: str) -> list[Path]:
    """Paths of the shared objects of this process whose names begin with ``stem``; none where /proc does not say."""
    found: dict[Path, None] = {}
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
    for line in lines:
        path = line[line.find("/") :] if "/" in line else ""
        name = path.rsplit("/", 1)[-1]
        if name.startswith((f"{stem}.", f"{stem}-")):
            found[Path(path)] = None
    return list(found)


def _of_pil(libraries: list[Path]) -> Path | None:
    """The one that PIL uses: its own copy, else the system's. Other packages' wheels bring copies of theirs into the process."""
    own = [path for path in libraries if any(part.lower().startswith("pillow") for part in path.parts)]
    return next(iter(own or [path for path in libraries if not _is_bundled(path)]), None)


def check_codec_versions() -> list[str]:
    """Findings about libraries with known holes, each beginning ``error:`` or ``warning:``; empty when all is well.

    libwebp before 1.3.2 has CVE-2023-4863. A copy that a wheel carries is judged by its version alone (``error``); a
    distribution's copy may have the fix back-ported, which the package's version tells (Debian 12: 1.2.4-0.2+deb12u1).
    """
    version = features.version_module("webp")
    if version is None:
        return ["warning: this PIL was built without WebP, the default codec"]
    if _numbers(version) >= SAFE_WEBP:
        return []
    library = _of_pil(loaded_libraries("libwebp"))
    if library is None or _is_bundled(library):
        return [f"error: the libwebp {version} inside the PIL wheel has {_WEBP_ADVICE}: install a PIL with libwebp >= 1.3.2"]
    package = _dpkg_version(library)
    if package is None:
        return [f"warning: system libwebp {version} is older than 1.3.2; whether {_WEBP_ADVICE} is fixed in it is unverified"]
    if _dpkg_at_least(package, DEBIAN_SAFE_WEBP):
        return []
    return [f"error: system libwebp {package} has {_WEBP_ADVICE}: upgrade it to {DEBIAN_SAFE_WEBP} or later"]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in version.split("."))


def _is_bundled(library: Path) -> bool:
    """Whether the object lies in a Python installation's package directory (auditwheel puts it into ``pillow.libs``)."""
    return any(part in ("site-packages", "dist-packages") or part.endswith(".libs") for part in library.parts)


def _dpkg_version(library: Path) -> str | None:
    """Version of the Debian package that owns ``library``; ``None`` without dpkg or an owner."""
    # /lib is a link to /usr/lib on merged systems, and dpkg knows a file by one of the two names.
    full = {str(library), str(library.resolve())}
    names = full | {name.removeprefix("/usr") for name in full}
    for name in sorted(names):
        owner = _run(["dpkg-query", "-S", name])
        if owner:
            return _run(["dpkg-query", "-W", "-f", "${Version}", owner.split(": ", 1)[0].split(",")[0]])
    return None


def _dpkg_at_least(version: str, floor: str) -> bool:
    return _run(["dpkg", "--compare-versions", version, "ge", floor]) is not None


def _run(command: list[str]) -> str | None:
    tool = shutil.which(command[0])
    if tool is None:
        return None
    try:
        done = subprocess.run([tool, *command[1:]], capture_output=True, timeout=20, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", "replace").strip() if done.returncode == 0 else None
