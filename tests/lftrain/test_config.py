"""Configurations: what is read, what is refused and in which words, and the page that documents them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from lftrain import config as configuration
from lftrain.errors import ConfigError
from lftrain.models import lm, reference, vla
from lftrain.options import Config

ROOT = Path(__file__).resolve().parent.parent.parent
GOOD = """
[run]
folder = "out"
steps = 10
[data]
path = "shards"
batch_size = 8
[model]
kind = "lm"
"""


def written(tmp_path: Path, text: str, name: str = "config.toml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    found = configuration.load(written(tmp_path, GOOD + '[held_out]\npath = "others"\n'))
    assert found.run.folder == str(tmp_path / "out")
    assert found.data.path == str(tmp_path / "shards")
    assert found.held_out is not None and found.held_out.path == str(tmp_path / "others")


def test_yaml_says_the_same_as_toml(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    text = "run: {folder: out, steps: 10}\ndata: {path: shards, batch_size: 8}\nmodel: {kind: lm}\noptimizer: {lr: 1e-4}\n"
    found = configuration.load(written(tmp_path, text, "config.yaml"))
    toml = written(tmp_path, GOOD + "[optimizer]\nlr = 1e-4\n")
    assert found == configuration.load(toml)


def test_on_and_off_are_words_in_yaml_too(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    text = "run: {folder: out, steps: 10}\ndata: {path: shards, batch_size: 8}\nmodel: {kind: lm}\n"
    found = configuration.load(written(tmp_path, text + "metrics: {live: on}\ncompile: {blocks: on}\n", "config.yaml"))
    assert found.metrics.live == "on" and found.compile.blocks is True
    assert configuration.load(written(tmp_path, text + "metrics: {live: off}\n", "config.yaml")).metrics.live == "off"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GOOD + "[precision]\nmode = 'bf61'\n", "did you mean 'bf16'?"),
        (GOOD + "[optimiser]\nlr = 1\n", "unknown key 'optimiser'; did you mean 'optimizer'"),
        (GOOD.replace("steps", "stepz"), "unknown key 'run.stepz'; did you mean 'steps'"),
        (GOOD + "[precision]\nmoed = 'bf16'\n", "unknown key 'precision.moed'; did you mean 'mode'"),
        (GOOD + "[precision]\nqqqq = 1\n", "unknown key 'precision.qqqq'; there are mode, weights, frozen"),
        (GOOD.replace("steps = 10", "steps = 0"), "run.steps"),
        (GOOD.replace("steps = 10", "steps = '10'"), "run.steps"),
        (GOOD + "[precision]\nmode = 'fp8'\n", "precision.mode"),
        (GOOD + "[precision]\nclip = -1.0\n", "precision.clip"),
        (GOOD.replace("batch_size = 8", ""), "batch_size"),
        (GOOD + "run = = 3", "not TOML"),
        ("run = 3", "`run`"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match="config.toml") as caught:
        configuration.load(written(tmp_path, text))
    assert said in str(caught.value)


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [", "run: 1\nrun: 2\n", "run: !!python/object/apply:os.getcwd []\n"])
def test_yaml_that_is_none_or_would_run_code_is_refused(tmp_path: Path, text: str) -> None:
    pytest.importorskip("yaml")
    with pytest.raises(ConfigError):
        configuration.load(written(tmp_path, text, "config.yml"))


def test_other_files_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", written(tmp_path, "{}", "config.json"), tmp_path):
        with pytest.raises(ConfigError, match=path.name):
            configuration.load(path)


def test_single_values_over_those_of_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD)
    found = configuration.load(path, ["run.steps=5", "precision.mode=bf16", "model.options.vocab=9"])
    assert (found.run.steps, found.precision.mode, found.model.options) == (5, "bf16", {"vocab": 9})
    for wrong in ("run.steps", "=3", "run..steps=3", "run.steps.more=3"):
        with pytest.raises(ConfigError):
            configuration.load(path, [wrong])
    with pytest.raises(ConfigError, match="did you mean 'steps'"):
        configuration.load(path, ["run.step=5"])


def test_every_option_is_documented() -> None:
    kinds = [Config, lm.Options, vla.Options]
    seen = 0
    while kinds:
        for option in msgspec.structs.fields(kinds.pop()):
            assert configuration.description(option), option.name
            seen += 1
            if (below := configuration._struct(option.type)) is not None:
                kinds.append(below)
    assert seen > 90


def test_the_page_of_options_is_what_the_command_prints() -> None:
    assert (ROOT / "docs" / "config.md").read_text() == reference(), "write it anew: lftrain options > docs/config.md"


def test_the_example_is_a_good_configuration() -> None:
    found = configuration.load(ROOT / "examples" / "reach" / "train.toml")
    assert found.model.kind == "vla"


def test_urls_of_data_are_no_paths(tmp_path: Path) -> None:
    text = GOOD.replace('path = "shards"', 'path = ["s3://bucket/set", "https://host:1/x", "data/a:b"]')
    found = configuration.load(written(tmp_path, text + '[held_out]\npath = "gs://bucket/set"\n'))
    assert found.data.path == ["s3://bucket/set", "https://host:1/x", str(tmp_path / "data/a:b")]
    assert found.held_out is not None and found.held_out.path == "gs://bucket/set"
