"""Which interpreter runs a subject: its own environment where one was made, else this one."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

HOME = Path(os.environ.get("LFBENCH_HOME", "bench-data")).resolve()
"""Where environments, fetched data and prepared formats are kept: `bench-data` in the current directory unless LFBENCH_HOME says otherwise."""

# What to install beside the packages of this environment, by subject: the versions that the committed records were made with.
_TURBO = ("simplejpeg==1.9.0", "opencv-python-headless==5.0.0.93")
PACKAGES: dict[str, tuple[str, ...]] = {
    "torch_pillow": ("pillow==13.0.0",),
    "torch_simplejpeg": _TURBO,
    "lfdata_reader": _TURBO,
    "webdataset_": ("webdataset==1.0.2", *_TURBO),
    "streaming_": ("mosaicml-streaming==0.13.0", *_TURBO),
    "litdata_": ("litdata==0.2.76", *_TURBO),
    "spdl_": ("spdl==0.8.0", *_TURBO),
    "dali_cpu": ("nvidia-dali-cuda120==2.4.0",),
    "dali_gpu": ("nvidia-dali-cuda120==2.4.0",),
    "grain_": ("grain==0.2.18", "array_record==0.8.6", *_TURBO),
    "ffcv_": ("ffcv==1.0.2",),
    # For `lfbench windows`. The last that Python 3.11 has.
    "lerobot_": ("lerobot==0.4.4",),
}

# What shares nothing with this environment: it requires an older torch, and its torchvision.
ALONE = ("lerobot_",)
# Subjects that are about plain pillow.
OWN_PILLOW = ("torch_pillow",)

# Subjects that run in another one's environment.
SAME = {"ffcv_raw": "ffcv_", "grain_defaults": "grain_", "spdl_simplejpeg": "spdl_"}

# Some peers require torchvision for classes that no subject uses, and its published builds do not import beside every torch. Where this
# environment has none, the subjects' environments get these files: enough to import, and for pip not to fetch it and another torch.
TORCHVISION = {
    "torchvision-0.20.dist-info/METADATA": "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.20\n",
    "torchvision/__init__.py": "",
    "torchvision/datasets.py": "class VisionDataset: ...\n",
    "torchvision/transforms/__init__.py": "",
    "torchvision/transforms/functional.py": "to_tensor = None\n",
}


def environment(subject: str) -> Path:
    """Directory of a subject's own environment."""
    return HOME / "envs" / SAME.get(subject, subject)


def interpreter(subject: str) -> str:
    """The Python that runs a subject."""
    own = environment(subject) / "bin" / "python"
    return str(own) if own.exists() else sys.executable


def make(subject: str) -> None:
    """Make a subject's environment: its packages first, then (but for :data:`ALONE`) whatever this environment has, torch among it.

    Raises:
        subprocess.CalledProcessError: pip or venv failed; what they said is on stderr.
    """
    place = environment(subject)
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    if subject not in ALONE:
        _share(place)
    pip = [str(place / "bin" / "python"), "-m", "pip"]
    subprocess.run([*pip, "install", "--quiet", *PACKAGES[subject]], check=True)
    if has_simd() and subject not in (*OWN_PILLOW, *ALONE):
        # Some ask for plain pillow by name. All are to have the same PIL, that of this environment.
        subprocess.run([*pip, "uninstall", "--quiet", "--yes", "pillow"], check=True)


def _share(place: Path) -> None:
    """Let an environment see this one's packages, after its own, so that those win."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = place / "lib" / version / "site-packages"
    (packages / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for name, text in TORCHVISION.items() if importlib.util.find_spec("torchvision") is None else ():
        (packages / name).parent.mkdir(parents=True, exist_ok=True)
        (packages / name).write_text(text)


def has_simd() -> bool:
    """Whether this environment's PIL is pillow-simd."""
    try:
        importlib.metadata.version("pillow-simd")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
