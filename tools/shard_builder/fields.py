"""Field declarations: the ``--field`` grammar and TOML mapping files.

``NAME:KIND=COLUMN[@ORIGIN][,OPTION=VALUE...]``, for example ``image:image=img_path@file,codec=webp,quality=80``,
``caption:text=text`` or ``label:scalar=cls,dtype=int32``. A column, option value or name that holds one of ``: = @ ,`` is
written in double quotes, with ``""`` for a quote.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lfdata.codecs.base import KINDS
from lfdata.errors import OptionError
from shard_builder.sources.base import FieldSpec

ORIGINS = ("inline", "file", "base64")
GRAMMAR = "NAME:KIND=COLUMN[@ORIGIN][,OPTION=VALUE...], for example image:image=img_path@file,codec=webp"
_TOKEN = re.compile(r'"((?:[^"]|"")*)"|([^":=@,]+)|([:=@,])')


def _tokens(text: str) -> list[tuple[str, bool]]:
    """Words and separators; the flag says which are separators."""
    found = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise OptionError(f"--field {text!r}: an unclosed quote at character {at + 1}. Write {GRAMMAR}")
        quoted, plain, separator = match.groups()
        found.append((separator, True) if separator else (quoted.replace('""', '"') if quoted is not None else plain, False))
        at = match.end()
    return found


def parse_field(text: str) -> FieldSpec:
    """One ``--field`` argument. Raises :class:`OptionError` saying what would be right."""
    parts: list[list[str]] = [[]]
    separators: list[str] = []
    wanted = iter(":=")
    expected = next(wanted)
    for token, is_separator in _tokens(text):
        # Before the column only ":" and then "=" separate; after it "@" once, "," between options and "=" inside one.
        if is_separator and (token == expected or (len(separators) >= 2 and token in "@,=")):
            separators.append(token)
            parts.append([])
            expected = next(wanted, "")
        else:
            parts[-1].append(token)
    words = ["".join(part).strip() if index != 2 else "".join(part) for index, part in enumerate(parts)]
    if separators[:2] != [":", "="] or len(words) < 3:
        raise OptionError(f"--field {text!r}: write {GRAMMAR}")
    name, kind, column = words[:3]
    origin = ""
    rest = list(zip(separators[2:], words[3:], strict=True))
    if rest and rest[0][0] == "@":
        origin = rest.pop(0)[1]
    options: dict[str, str] = {}
    option = None
    for separator, word in rest:
        if separator == ",":
            option = word
            if option in options:
                raise OptionError(f"--field {text!r}: option {option!r} is given twice")
            options[option] = ""
        elif separator == "=" and option is not None:
            options[option] = f"{options[option]}={word}" if options[option] else word
        else:
            raise OptionError(f"--field {text!r}: {separator!r} is not expected before {word!r}. Write {GRAMMAR}")
    empty = [key for key, value in options.items() if not value]
    if empty:
        raise OptionError(f"--field {text!r}: option {empty[0]!r} has no value. Write {GRAMMAR}")
    return make_field(name, kind, column, origin, options)


def make_field(name: str, kind: str, column: str, origin: str = "", options: Mapping[str, str] | None = None) -> FieldSpec:
    """A checked declaration; the origin defaults to ``file`` for images and audio, ``inline`` otherwise."""
    if not 1 <= len(name.encode("utf-8", "surrogatepass")) <= 255 or name.startswith("__") or "\0" in name:
        raise OptionError(f"field name {name!r}: 1 to 255 bytes, not beginning with two underscores")
    if kind not in KINDS:
        raise OptionError(f"field {name!r}: unknown kind {kind!r}; valid: {', '.join(KINDS)}")
    if not column:
        raise OptionError(f"field {name!r}: no column; name the column, member extension, or *")
    origin = origin or ("file" if kind in ("image", "audio") else "inline")
    if origin not in ORIGINS:
        raise OptionError(f"field {name!r}: unknown origin {origin!r}; valid: {', '.join(ORIGINS)}")
    return FieldSpec(name, kind, column, origin, dict(options or {}))


def check_unique(fields: Sequence[FieldSpec]) -> None:
    """Refuse an empty declaration, or a name declared twice."""
    if not fields:
        raise OptionError(f"no fields declared; use --field {GRAMMAR}, or --map FILE")
    seen: set[str] = set()
    for spec in fields:
        if spec.name in seen:
            raise OptionError(f"field {spec.name!r} is declared twice")
        seen.add(spec.name)


def load_mapping(path: str | Path) -> list[FieldSpec]:
    """Fields of a TOML file: ``[[fields]]`` tables with name, kind, column, origin and an ``options`` table.

    A tokenizer named by a relative path is looked for beside the file. Raises :class:`OptionError`.
    """
    path = Path(path)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionError(f"{path}: {error}") from error
    except RecursionError:
        raise OptionError(f"{path}: nested too deeply") from None
    tables = data.get("fields")
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise OptionError(f"{path}: write one [[fields]] table a field, with name, kind and column")
    fields = [_from_table(path, table) for table in tables]
    check_unique(fields)
    return fields


def _from_table(path: Path, table: dict[str, Any]) -> FieldSpec:
    unknown = table.keys() - {"name", "kind", "column", "origin", "options"}
    if unknown or not all(isinstance(table.get(key), str) for key in ("name", "kind", "column")):
        rule = "name, kind and column are texts; origin and options are optional"
        raise OptionError(f"{path}: field {table.get('name')!r}: {rule}{_also(unknown)}")
    given, origin = table.get("options", {}), table.get("origin", "")
    if not isinstance(given, dict) or not isinstance(origin, str):
        raise OptionError(f"{path}: field {table['name']!r}: options is a table and origin a text")
    options = {key: _text(value) for key, value in given.items()}
    tokenizer = options.get("tokenizer")
    if tokenizer and not Path(tokenizer).is_absolute() and (path.parent / tokenizer).exists():
        options["tokenizer"] = str(path.parent / tokenizer)
    return make_field(table["name"], table["kind"], table["column"], origin, options)


def _also(unknown: set[str]) -> str:
    return f"; unknown: {', '.join(sorted(unknown))}" if unknown else ""


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
