"""``lftrain doctor``: what this machine has for training, what is missing, and what to type."""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lfdata import doctor as data_doctor

# What a loader's slots and torch's own shared memory need at least, and how much a process must be allowed to lock for pinned memory.
SHM_BYTES = 1 << 30
SECONDS = 20
_EXTRAS = {"yaml": "yaml", "safetensors": "safetensors", "tensorboard": "tensorboardX"}


def examine() -> dict[str, Any]:
    """Everything that is printed, JSON-able. ``advice``: lines of what is missing and what to type."""
    found: dict[str, Any] = {
        "machine": _machine(),
        "torch": _torch(),
        "gpus": _gpus(),
        "links": _links(),
        "memory": _memory(),
        "extras": {extra: importlib.util.find_spec(module) is not None for extra, module in _EXTRAS.items()},
        "data": data_doctor.examine(),
    }
    found["advice"] = _advice(found)
    return found


def render(found: dict[str, Any]) -> str:
    """The report as text for people."""
    machine, memory, data = found["machine"], found["memory"], found["data"]
    lines = [
        f"machine    {machine['cpu']}, {machine['cores']} usable cores of {machine['all_cores']}, {machine['numa']} NUMA nodes, "
        f"{_size(memory['ram'])} of memory",
        f"torch      {', '.join(f'{name} {value}' for name, value in found['torch'].items() if value)}",
        f"memory     /dev/shm {_size(memory['shm_free'])} free of {_size(memory['shm'])}; locked (pinned) {_limit(memory['memlock'])}; "
        f"open files {memory['files']}",
        f"extras     {', '.join(f'{name} {_yes(there)}' for name, there in found['extras'].items())}",
    ]
    lines += [f"gpu {number}      {_gpu_line(gpu)}" for number, gpu in enumerate(found["gpus"])] or [
        "gpu        none that torch can use"
    ]
    if found["links"]:
        lines += ["links", *(f"  {line}" for line in found["links"].splitlines())]
    pil = data["pil"]
    lines.append(f"pictures   {pil['distribution'] + ' ' + pil['pillow'] if pil else 'no PIL'}")
    for name, module in data["native"].items():
        lines.append(f"           {name}: {'active' if module['active'] else 'NOT ACTIVE: ' + str(module['why'])}")
    lines += ["", *(["to do", *(f"  {line}" for line in found["advice"])] if found["advice"] else ["nothing is missing"])]
    return "\n".join(lines) + "\n"


def _machine() -> dict[str, Any]:
    nodes = list(Path("/sys/devices/system/node").glob("node[0-9]*"))
    names = [line.partition(":")[2].strip() for line in _text("/proc/cpuinfo").splitlines() if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "all_cores": os.cpu_count(),
        "numa": max(1, len(nodes)),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def _torch() -> dict[str, Any]:
    there = torch.cuda.is_available()
    nccl = torch.cuda.nccl.version() if there and dist.is_nccl_available() else None
    return {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if there else None,
        "nccl": ".".join(map(str, nccl)) if isinstance(nccl, tuple) else nccl,
        "gloo": "yes" if dist.is_available() and dist.is_gloo_available() else None,
        "compiler": shutil.which("g++") or shutil.which("c++"),
    }


def _gpus() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    found = []
    for number in range(torch.cuda.device_count()):
        one = torch.cuda.get_device_properties(number)
        capability = f"{one.major}.{one.minor}"
        found.append({"name": one.name, "bytes": one.total_memory, "capability": capability, "bf16": one.major >= 8})
    drivers = _command("nvidia-smi", "--query-gpu=driver_version,persistence_mode", "--format=csv,noheader").splitlines()
    for gpu, line in zip(found, drivers, strict=False):
        gpu["driver"], _, gpu["persistence"] = (part.strip() for part in line.partition(","))
    return found


def _links() -> str:
    """How GPUs are connected, as the driver says; nothing for one."""
    return _command("nvidia-smi", "topo", "-m") if torch.cuda.is_available() and torch.cuda.device_count() > 1 else ""


def _memory() -> dict[str, Any]:
    ram = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    shm = os.statvfs("/dev/shm") if Path("/dev/shm").is_dir() else None
    return {
        "ram": ram,
        "shm": shm.f_blocks * shm.f_frsize if shm else 0,
        "shm_free": shm.f_bavail * shm.f_frsize if shm else 0,
        "memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    }


def _advice(found: dict[str, Any]) -> list[str]:
    lines = list(found["data"]["advice"])
    memory, torch_, gpus = found["memory"], found["torch"], found["gpus"]
    device_nodes = list(Path("/dev").glob("nvidia[0-9]*"))
    if device_nodes and not gpus:
        why = (
            "this torch is built without CUDA"
            if not torch_["cuda"]
            else "the driver is too old for it, or not loaded: nvidia-smi"
        )
        lines.append(
            f"there is a GPU, but torch cannot use it: {why}. See pytorch.org/get-started for the build that fits the driver"
        )
    if memory["shm"] < SHM_BYTES:
        lines.append(
            f"/dev/shm has {_size(memory['shm'])}: mount -o remount,size=8G /dev/shm, or in a container: docker run --shm-size=8g"
        )
    if gpus and memory["memlock"] not in (resource.RLIM_INFINITY, -1) and memory["memlock"] < SHM_BYTES:
        lines.append(
            f"only {_size(memory['memlock'])} may be pinned: ulimit -l unlimited, or in a container: --ulimit memlock=-1"
        )
    if len(gpus) > 1 and not torch_["nccl"]:
        lines.append("several GPUs and no NCCL in this torch: ranks would have to use gloo; install a CUDA build of torch")
    if any(gpu.get("persistence") == "Disabled" for gpu in gpus):
        lines.append("the driver unloads when idle, which makes starts slow: nvidia-smi -pm 1 (as root)")
    if not torch_["compiler"] and not gpus:
        lines.append("torch.compile on a CPU needs a C++ compiler: apt-get install g++")
    missing = [extra for extra, there in found["extras"].items() if not there]
    if missing:
        lines.append(f"not installed, and only needed if asked for: pip install 'lfdata[{','.join(missing)}]'")
    return lines


def _gpu_line(gpu: dict[str, Any]) -> str:
    parts = [gpu["name"], _size(gpu["bytes"]), f"capability {gpu['capability']}", f"bf16 {_yes(gpu['bf16'])}"]
    return ", ".join([*parts, *([f"driver {gpu['driver']}"] if "driver" in gpu else [])])


def _command(*words: str) -> str:
    """What a command prints; nothing if it is not there or fails."""
    if shutil.which(words[0]) is None:
        return ""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _text(path: str) -> str:
    try:
        return Path(path).read_text("utf-8", "replace")
    except OSError:
        return ""


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB"


def _limit(count: int) -> str:
    return "without limit" if count in (resource.RLIM_INFINITY, -1) else _size(count)


def _yes(there: bool) -> str:
    return "yes" if there else "no"
