"""Data is never code: no module that could run it is used, and reading a malicious corpus runs nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
PACKAGES = ("lfdata", "lftrain", "tools/shard_builder", "benchmarks")
MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
CALLS = {"eval", "exec", "compile", "__import__"}
# Imports by a name that is not data: the codecs that may be missing, and verbs and sources by a fixed table.
ALLOWED = {("lfdata/codecs/audio.py", "__import__")}


def sources() -> list[Path]:
    """Every module of the packages."""
    return sorted(path for package in PACKAGES for path in (REPO / package).rglob("*.py"))


def findings(path: Path) -> list[str]:
    """What in a module could run data as code."""
    name = path.relative_to(REPO).as_posix()
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found += [f"{name}:{node.lineno} imports {n}" for n in names if n.split(".")[0] in MODULES]
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            keywords = {k.arg: k.value for k in node.keywords}
            if (called in CALLS and (name, called) not in ALLOWED) or called in ("torch.load", "yaml.load"):
                found.append(f"{name}:{node.lineno} calls {called}")
            allow = keywords.get("allow_pickle")
            if called in ("np.load", "numpy.load") and allow is None:
                found.append(f"{name}:{node.lineno} calls {called} without allow_pickle=False")
            if allow is not None and not (isinstance(allow, ast.Constant) and allow.value is False):
                found.append(f"{name}:{node.lineno} allows pickle")
    return found


def test_no_module_of_ours_can_run_data() -> None:
    assert len(sources()) > 50
    assert [line for path in sources() for line in findings(path)] == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from marshal import loads",
        "eval(x)",
        "torch.load(f)",
        "np.load(f, allow_pickle=True)",
        "np.load(f, mmap_mode='r')",
        "__import__(n)",
    ],
)
def test_the_check_finds_what_it_looks_for(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "REPO", tmp_path)
    (tmp_path / "module.py").write_text(text)
    assert findings(tmp_path / "module.py")


AUDIT = r"""
import io, pickle, sys, tarfile
from pathlib import Path
import numpy as np
repo, work, mode = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
sys.path[:0] = [str(repo), str(repo / "tools")]
from lfdata import ShardDataset
from lfdata.codecs.registry import make_encoder
from lfdata.errors import LfdataError
from shard_builder.sources import open_source

class Bomb:
    def __reduce__(self):
        return exec, ("open(%r, 'w').close()" % str(work / "ran"),)

evil = pickle.dumps(Bomb())
array = io.BytesIO(); np.save(array, np.array([Bomb()], object), allow_pickle=True)
payloads = {"pyd": evil, "pickle": evil, "pkl": evil, "npy": array.getvalue(), "pth": evil, "txt": evil, "json": evil}
payloads["py"] = b"import os; os.abort()"
with tarfile.open(work / "evil.tar", "w") as tar:
    for extension, data in payloads.items():
        info = tarfile.TarInfo(f"sample.{extension}"); info.size = len(data); tar.addfile(info, io.BytesIO(data))
odd = sorted((repo.parent / "shared" / "data" / "odd").glob("*")) if (repo.parent / "shared").is_dir() else []
kinds = {"image": {}, "audio": {}, "json": {}, "text": {}, "bytes": {}, "array": {"dtype": "float32", "ndim": "1"}}

def corpus():
    source = open_source(str(work / "evil.tar"))
    for record in source.scan():
        if hasattr(record, "locator"):
            try: values = source.load(record.locator).values
            except LfdataError: values = {}
            blobs.extend(v for v in values.values() if isinstance(v, bytes))
    for data in [*payloads.values(), *(path.read_bytes() for path in odd if path.is_file())]:
        for kind, options in kinds.items():
            try: make_encoder(kind, options).encode(data)
            except LfdataError: pass
    for name in ("mixed", "numeric", "scalars"):
        list(ShardDataset(repo / "tests" / "golden" / "v1.0" / name))
blobs = []
corpus()  # imports what is imported when first needed
BAD = ("pickle.find_class", "exec", "compile", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "code.__new__", "marshal.loads")
seen = []
sys.addaudithook(lambda event, arguments: seen.append((event, str(arguments)[:200])) if event in BAD else None)
if mode == "evil":
    pickle.loads(pickle.dumps(Path("x")))
corpus()
assert not (work / "ran").exists(), "a payload ran"
print(len(seen), seen[:5])
"""


def run_audited(work: Path, mode: str) -> str:
    """Read the corpus under an audit hook in a fresh process; prints how many forbidden events there were."""
    done = subprocess.run(
        [sys.executable, "-c", AUDIT, str(REPO), str(work), mode], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip().splitlines()[-1]


def test_reading_a_malicious_corpus_runs_nothing(tmp_path: Path) -> None:
    assert run_audited(tmp_path, "plain").startswith("0 ")


def test_the_hook_sees_a_pickle(tmp_path: Path) -> None:
    assert not run_audited(tmp_path, "evil").startswith("0 ")
