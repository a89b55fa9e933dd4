"""Windows, gain, tokens, functions of the user's; specs there and back; lists in a wrong order."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from lfdata import transforms as T
from lfdata.errors import OptionError, SampleError


def uniform(n: int) -> Any:
    return lambda name, count: np.random.default_rng(sum(name.encode())).random((n, count))


def unused(name: str, count: int) -> NDArray[np.float64]:
    raise AssertionError("nothing is drawn")


def test_audio_windows() -> None:
    lengths = np.array([0, 1, 9, 10, 11, 500])
    starts, counts = T.AudioWindow(10).window(lengths, unused)
    assert starts.tolist() == [0] * 6 and counts.tolist() == [0, 1, 9, 10, 10, 10] and starts.dtype == counts.dtype == np.int64
    n = 20_000
    starts, counts = T.AudioWindow(10, random=True).window(np.full(n, 14), uniform(n))
    assert (counts == 10).all() and np.bincount(starts).min() > n / 5 * 0.9 and starts.max() == 4
    starts, counts = T.AudioWindow(10, random=True).window(lengths, uniform(6), 3)
    assert (starts[:4] == 0).all() and (starts + counts <= lengths).all()
    assert T.declared([T.AudioWindow(10), T.Gain()], "audio", T.Declared((None, 2), "int16")) == T.Declared((10, 2), "int16")


def test_gain_rounds_and_saturates() -> None:
    samples = np.array([[-32768, 32767], [100, -101], [0, 3], [20000, -20000]], np.int16)
    louder = samples.copy()
    T.Gain(20, 20).apply(louder, np.zeros(1))
    assert louder.tolist() == [[-32768, 32767], [1000, -1010], [0, 30], [32767, -32768]]
    same = samples.copy()
    T.Gain(0, 0).apply(same, np.array([0.7]))
    assert (same == samples).all()
    rng = np.random.default_rng(0)
    long = rng.integers(-32768, 32768, (200_000, 2)).astype(np.int16)
    for u in rng.random(3):
        found = long.copy()
        T.Gain(-6, 6).apply(found, np.array([u]))
        exact = long * 10.0 ** ((-6 + 12 * u) / 20)
        assert np.abs(found - np.clip(exact, -32768, 32767)).max() <= 0.5 + 1e-9
    empty = np.empty((0, 2), np.int16)
    T.Gain().apply(empty, np.zeros(1))
    with pytest.raises(ValueError, match="int16"):
        T.Gain().apply(np.zeros(3, np.float32), np.zeros(1))


def test_tokens() -> None:
    lengths = [0, 3, 5, 9]
    for truncate, wanted in (("tail", [0, 0, 0, 0]), ("head", [0, 0, 0, 4])):
        starts, counts = T.Tokens(5, truncate=truncate).place(lengths, unused)
        assert starts.tolist() == wanted and counts.tolist() == [0, 3, 5, 5]
    n = 10_000
    starts, counts = T.Tokens(5, truncate="random").place(np.full(n, 9), uniform(n))
    assert np.bincount(starts).min() > n / 5 * 0.9 and starts.max() == 4 and (counts == 5).all()
    assert T.declared([T.Tokens(5, pad=65535)], "tokens", T.Declared((None,), "uint16")) == T.Declared((5,), "uint16")
    with pytest.raises(OptionError, match="pad is 65536; the field's uint16 holds 0 to 65535"):
        T.declared([T.Tokens(5, pad=65536)], "tokens", T.Declared((None,), "uint16"))


class Holder:
    @staticmethod
    def half(value: Any) -> Any:
        return value / 2

    def method(self, value: Any) -> Any:
        return value


@pytest.fixture
def functions(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module that can be imported."""
    (tmp_path / "functions_of_a_user.py").write_text(
        "import numpy as np\n"
        "def total(value): return np.asarray(value).sum(axis=0, dtype=np.float32)\n"
        "def noise(value, rng): return rng.random(4, dtype=np.float32)\n"
        "def broken(value): raise RuntimeError('no')\n"
        "class Inner:\n"
        "    @staticmethod\n"
        "    def half(value): return value / 2\n"
        "hidden = lambda value: value\n"
        "number = 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import functions_of_a_user  # type: ignore[import-not-found]

    return functions_of_a_user


def test_functions_by_name(functions: Any) -> None:
    op = T.Map(functions.total, (3,), np.float32)
    assert op == T.Map("functions_of_a_user:total", [3], "float32") and op.function == "functions_of_a_user:total"
    assert op.resolve() is functions.total
    assert op.apply(np.ones((4, 3)), np.empty(0)).tolist() == [4, 4, 4]
    assert T.Map(functions.Inner.half, (), "float64").function == "functions_of_a_user:Inner.half"
    assert T.declared([T.CenterCrop(2), op], "image", T.Declared((None, None, 3), "uint8")) == T.Declared((3,), "float32")
    noise = T.Map(functions.noise, 4, "float32", random=True)
    first, second = (noise.apply(0, np.array([0.25, u])) for u in (0.5, 0.5000001))
    assert (first == noise.apply(0, np.array([0.25, 0.5]))).all() and (first != second).any() and noise.draws == 2
    with pytest.raises(SampleError, match=r"declared is float32 of shape \(2,\) \[user-result\]"):
        T.Map(functions.total, 2, "float32").apply(np.ones((4, 3)), np.empty(0))
    with pytest.raises(SampleError, match=r"functions_of_a_user:broken raised RuntimeError: no \[user\]"):
        T.Map(functions.broken, 2, "float32").apply(0, np.empty(0))


def test_functions_that_no_other_process_could_import(functions: Any) -> None:
    def inner(value: Any) -> Any:
        return value

    for function, message in (
        (lambda value: value, "has no name that another process could import; define it with def at the top of a module"),
        (inner, "has no name that another process could import"),
        (functions.hidden, "has no name that another process could import"),
        (functools.partial(functions.total), 'it must be a function of a module, or "module:name"'),
        (Holder().method, "importing"),
        (functions, "it must be a function of a module"),
        ("total", 'it must be "module:name"'),
        ("a b:c", 'it must be "module:name"'),
    ):
        with pytest.raises(OptionError) as caught:
            T.Map(function, (), "float32")
        assert message in str(caught.value)
    for reference, message in (
        ("no_such_module_at_all:f", "cannot be imported"),
        ("functions_of_a_user:absent", "cannot be imported"),
        ("functions_of_a_user:number", "is not a function"),
    ):
        op = T.Map(reference, (), "float32")
        with pytest.raises(OptionError, match=message):
            op.resolve()
    for options in ({"shape": (None,), "dtype": "float32"}, {"shape": (3,), "dtype": "object"}, {"shape": (3,), "dtype": "no"}):
        with pytest.raises(OptionError, match="Map: (shape|dtype) is"):
            T.Map("functions_of_a_user:total", **options)


def test_a_function_of_the_script_is_refused_and_torch_is_not_imported() -> None:
    code = (
        "import sys\nfrom lfdata import transforms as T\ndef f(value): return value\n"
        "try: T.Map(f, (), 'float32')\nexcept ValueError as e: print(e)\nprint('torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert out.splitlines() == [
        "Map: f is defined in the script itself, which another process cannot import; move it into a module",
        "False",
    ]


EVERY: list[T.Transform] = [
    T.Resize(256),
    T.Resize((3, 4)),
    T.CenterCrop(224),
    T.Crop(1, 2, 3, 4),
    T.RandomCrop((np.int64(5), 6)),
    T.RandomResizedCrop(224, ratio=(0.1, 1 / 3)),
    T.RandomHorizontalFlip(0.3),
    T.ColorJitter(0.4, (0.1, 0.9), hue=np.float32(0.25)),
    T.RandAugment(3, 5),
    T.RandomGrayscale(),
    T.Map("module.of.theirs:Class.function", (2, 3), np.int16, random=True),
    T.MixUp(0.2, field="photo", labels=["label", "boxes"]),
    T.CutMix(),
    T.Mosaic(0.5),
    T.AudioWindow(16000, random=True),
    T.Gain(-3, 3),
    T.Tokens(128, 1, "left", "random"),
]


def test_specs_there_and_back() -> None:
    spec = T.to_spec(EVERY)
    assert {type(op).__name__ for op in EVERY} == {item["transform"] for item in spec}
    assert T.from_spec(json.loads(json.dumps(spec))) == EVERY
    assert T.to_spec(T.from_spec(spec)) == spec and T.to_spec([]) == [] and T.from_spec(()) == []
    assert spec[0] == {"transform": "Resize", "size": 256, "mode": "shorter"}
    assert T.to_spec([T.CenterCrop(7)]) == T.to_spec([T.CenterCrop((7, 7))])
    assert len({hash(op) for op in EVERY}) == len(EVERY)
    for op in EVERY:
        with pytest.raises(AttributeError):
            op.field_of_its_own = 3  # type: ignore[attr-defined]
        with pytest.raises(AttributeError):
            setattr(op, msgspec.structs.fields(op)[0].name, 3)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ([{"transform": "Resize", "size": 3, "wide": 1}], "unknown field `wide` - at `$[0]`"),
        ([{"transform": "Sharpen"}], "Invalid value 'Sharpen' - at `$[0].transform`"),
        ([{"size": 3}], "missing required field `transform`"),
        ([{"transform": "Resize"}], "missing required field `size`"),
        ([{"transform": "Resize", "size": "3"}], "Expected `int | array`, got `str` - at `$[0].size`"),
        ([{"transform": "CenterCrop", "size": 3}, {"transform": "RandomHorizontalFlip", "p": 3}], "p is 3.0; it must be"),
        ([{"transform": "Map", "function": 3, "shape": [], "dtype": "int8"}], "Map: function is 3"),
        ({}, "Expected `array`"),
        (None, "Expected `array`"),
    ],
)
def test_specs_that_make_no_sense(spec: Any, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        T.from_spec(spec)
    assert message in str(caught.value)


def test_lists_that_make_no_sense(functions: Any) -> None:
    image = T.Declared((None, None, 3), "uint8")
    with pytest.raises(OptionError, match="CenterCrop \\(number 1\\) comes too late: first geometry"):
        T.declared([T.ColorJitter(), T.CenterCrop(3)], "image", image)
    with pytest.raises(OptionError, match="Gain \\(number 0\\) is for fields of kind audio, not image"):
        T.declared([T.Gain()], "image", image)
    with pytest.raises(OptionError, match="Tokens takes a row of integers"):
        T.declared([T.Tokens(3)], "tokens", T.Declared((None, 2), "int32"))
    with pytest.raises(OptionError, match="AudioWindow takes int16 frames"):
        T.declared([T.AudioWindow(3)], "audio", T.Declared((None, 2), "float32"))
    with pytest.raises(OptionError, match="is not a transform of lfdata.transforms; Map takes functions"):
        T.to_spec([functions.total])
    for make, message in (
        (lambda: T.AudioWindow(0), "AudioWindow: frames is 0"),
        (lambda: T.AudioWindow(3, random=1), "AudioWindow: random is 1; it must be True or False"),
        (lambda: T.Gain(3, -3), "Gain: low_db is 3.0; it must be at most high_db, which is -3.0"),
        (lambda: T.Tokens(5, side="middle"), "Tokens: side is 'middle'; it must be 'right' or 'left'"),
        (lambda: T.Tokens(5, truncate="both"), "Tokens: truncate is 'both'; it must be 'tail' or 'head' or 'random'"),
        (lambda: T.Tokens(0), "Tokens: length is 0"),
    ):
        with pytest.raises(OptionError) as caught:
            make()
        assert message in str(caught.value)
