"""A configuration file as typed options: TOML, or YAML with the extra. Unknown keys are refused, and the nearest one named."""

from __future__ import annotations

import difflib
import math
import re
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from lfdata.errors import MissingExtraError
from lfdata.storage.urls import is_url
from lftrain.errors import ConfigError
from lftrain.options import Config

S = TypeVar("S", bound=msgspec.Struct)
MOST_BYTES = 1 << 20


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a configuration.

    Args:
        path: ``.toml``, or ``.yaml``/``.yml``. Paths in it are relative to its folder.
        overrides: ``"run.steps=10"``: single keys over those of the file; values are TOML, or plain text.

    Raises:
        ConfigError: a file that cannot be read, unknown keys, values of the wrong type or out of range.
        MissingExtraError: YAML without the extra.
    """
    path = Path(path)
    found = _read(path)
    for text in overrides:
        _override(found, text)
    config = convert(found, Config, str(path))
    return _with_folder(config, path.resolve().parent)


def convert(value: Any, kind: type[S], where: str) -> S:
    """A mapping as a structure of options. ``where`` names its origin in errors."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: a table of keys is wanted, not {type(value).__name__}")
    for key, known in _unknown(value, kind, ""):
        near = difflib.get_close_matches(key.rpartition(".")[2], known, 1, 0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
        raise ConfigError(f"{where}: unknown key {key!r}; {hint}")
    try:
        found = msgspec.convert(_worded(value, kind), kind)
    except msgspec.ValidationError as error:
        told = str(error).replace("$.", "")
        if wrong := re.search(r"Invalid enum value '(.*)'", told):
            known = sorted(str(one) for one in _words(kind))
            near = difflib.get_close_matches(wrong[1], known, 1, 0.6)
            told += f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{where}: {told}") from error
    if odd := next(_not_finite(found, ""), None):
        raise ConfigError(f"{where}: {odd} is not a finite number")
    return found


def describe() -> str:
    """All options of a configuration but those of single models, as Markdown."""
    found = []
    for one in msgspec.structs.fields(Config):
        if (inner := _struct(one.type)) is not None:
            found.append(table(f"`[{one.name}]`{'' if one.required else ' (optional)'}", inner))
    return "\n".join(found)


def table(title: str, kind: type[msgspec.Struct]) -> str:
    """The options of one structure, as a section of Markdown."""
    lines = [f"## {title}", "", (kind.__doc__ or "").strip(), ""]
    lines += ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    lines += [_row(option) for option in msgspec.structs.fields(kind)]
    return "\n".join(lines) + "\n"


def description(option: msgspec.structs.FieldInfo) -> str:
    """What is said about one option."""
    for meta in getattr(option.type, "__metadata__", ()):
        if isinstance(meta, msgspec.Meta) and meta.description:
            return meta.description
    return ""


def _row(option: msgspec.structs.FieldInfo) -> str:
    if option.default is not msgspec.NODEFAULT:
        default = "" if option.default is None else f"`{msgspec.json.encode(option.default).decode()}`"
    elif option.default_factory is not msgspec.NODEFAULT:
        default = f"`{msgspec.json.encode(option.default_factory()).decode()}`"
    else:
        default = "required"
    cells = (f"`{option.name}`", _type(option.type), default, description(option))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _type(kind: Any) -> str:
    origin = typing.get_origin(kind)
    if origin is typing.Annotated:
        return _type(typing.get_args(kind)[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type(part) for part in typing.get_args(kind) if part is not type(None))
    if origin is typing.Literal:
        return ", ".join(f"`{part}`" for part in typing.get_args(kind))
    if origin is not None:
        return {dict: "table", list: "list", tuple: "list"}.get(origin, str(origin))
    return {int: "integer", float: "number", str: "text", bool: "`true`, `false`"}.get(
        kind, str(getattr(kind, "__name__", kind))
    )


def _struct(kind: Any) -> type[msgspec.Struct] | None:
    """The structure in a type, through Annotated and "or None"."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind
    for part in typing.get_args(kind):
        if (found := _struct(part)) is not None:
            return found
    return None


def _unknown(value: Mapping[Any, Any], kind: type[msgspec.Struct], prefix: str) -> Iterator[tuple[str, list[str]]]:
    """Keys a structure does not have, with those that it has."""
    options = {option.encode_name: option for option in msgspec.structs.fields(kind)}
    for key, inner in value.items():
        if key not in options:
            yield f"{prefix}{key}", list(options)
        elif isinstance(inner, Mapping) and (below := _struct(options[key].type)) is not None:
            yield from _unknown(inner, below, f"{prefix}{key}.")


def _worded(value: Mapping[Any, Any], kind: type[msgspec.Struct]) -> dict[Any, Any]:
    """With the words "on" and "off", which YAML takes for true and false, where an option has them as values."""
    options = {option.encode_name: option.type for option in msgspec.structs.fields(kind)}
    found = dict(value)
    for key, inner in value.items():
        if isinstance(inner, Mapping) and (below := _struct(options.get(key))) is not None:
            found[key] = _worded(inner, below)
        elif isinstance(inner, bool) and {"on", "off"} <= _choices(options.get(key)):
            found[key] = "on" if inner else "off"
    return found


def _choices(kind: Any) -> set[Any]:
    """The values of a Literal, through Annotated and "or None"."""
    if typing.get_origin(kind) is typing.Literal:
        return set(typing.get_args(kind))
    return set().union(*(_choices(part) for part in typing.get_args(kind) if not isinstance(part, msgspec.Meta)))


def _words(kind: type[msgspec.Struct]) -> set[Any]:
    """All values of options that are a choice of words."""
    found: set[Any] = set()
    for option in msgspec.structs.fields(kind):
        found |= _choices(option.type)
        if (below := _struct(option.type)) is not None:
            found |= _words(below)
    return found


def _not_finite(found: msgspec.Struct, prefix: str) -> Iterator[str]:
    """Options that are inf or nan, which no limit of one side keeps out."""
    for option in msgspec.structs.fields(found):
        value, name = getattr(found, option.name), f"{prefix}{option.encode_name}"
        if isinstance(value, msgspec.Struct):
            yield from _not_finite(value, f"{name}.")
        elif any(
            isinstance(one, float) and not math.isfinite(one) for one in (value if isinstance(value, tuple) else (value,))
        ):
            yield name


def _read(path: Path) -> dict[str, Any]:
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise ConfigError(f"{path}: {size} bytes; a configuration has at most {MOST_BYTES}")
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if path.suffix == ".toml":
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path}: not TOML: {error}") from error
    if path.suffix in (".yaml", ".yml"):
        return _yaml(path, text)
    raise ConfigError(f"{path}: a configuration is a .toml, .yaml or .yml file")


def _yaml(path: Path, text: str) -> dict[str, Any]:
    try:
        import yaml
    except ImportError as error:
        raise MissingExtraError(
            f"{path}: reading YAML needs the extra: pip install 'lfdata[yaml]' (TOML needs nothing)"
        ) from error

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """Numbers as people write them: PyYAML takes 1e-4 for text."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            if twice := next((key for key in keys if keys.count(key) > 1), None):
                raise yaml.YAMLError(f"the key {twice!r} is there twice{node.start_mark}")
            return super().construct_mapping(node, deep)

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789"))
    try:
        reader = Loader(text)
        try:
            found = reader.get_single_data()
        finally:
            reader.dispose()
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path}: not YAML: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: a table of keys is wanted at the top")
    return found


def _override(found: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    names = key.strip().split(".")
    if not equals or not all(names):
        raise ConfigError(f"--set {text}: write it as table.key=value")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    table: Any = found
    for name in names[:-1]:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {text}: {name!r} is not a table")
    table[names[-1]] = parsed


def _from(base: Path, path: str) -> str:
    """A path of data, which may be a URL."""
    return path if is_url(path) else str(base / path)


def _with_folder(config: Config, base: Path) -> Config:
    """Relative paths are meant from the configuration's folder."""
    replace = msgspec.structs.replace
    path = config.data.path
    paths = _from(base, path) if isinstance(path, str) else [_from(base, one) for one in path]
    held = config.held_out and replace(config.held_out, path=_from(base, config.held_out.path))
    return replace(
        config,
        run=replace(config.run, folder=str(base / config.run.folder)),
        data=replace(config.data, path=paths),
        held_out=held,
    )
