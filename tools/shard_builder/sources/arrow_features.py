"""Features that Hugging Face writes beside Arrow columns: which fields they make, and names of classes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from lfdata.errors import OptionError, SourceError
from shard_builder.sources.base import FieldSpec

METADATA = b"huggingface"

_SCALARS = {
    **{f"{sign}int{bits}": f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **{name: name for name in ("float16", "float32", "float64", "bool")},
    "half": "float16",
    "float": "float32",
    "double": "float64",
}
_TEXTS = ("string", "large_string", "string_view")
_BYTES = ("binary", "large_binary", "binary_view", "fixed_size_binary")
_AS_TEXT = ("timestamp", "date32", "date64", "date", "time32", "time64", "decimal", "decimal128", "decimal256")
_FILES = ("Video", "Pdf", "Nifti")
_LISTS = ("Sequence", "List", "LargeList")
_MAX_DEPTH = 64


def parse_features(metadata: Mapping[bytes, bytes] | None, where: str) -> dict[str, Any] | None:
    """The features in a schema's metadata, or ``None`` without any. Raises :class:`SourceError` where they cannot be read."""
    text = (metadata or {}).get(METADATA)
    if text is None:
        return None
    try:
        found = msgspec.json.decode(text, type=dict[str, Any])
        features = (found.get("info") or {}).get("features")
    except (msgspec.MsgspecError, AttributeError, ValueError, RecursionError) as error:
        raise SourceError(f"{where}: its Hugging Face metadata is no JSON: {error}") from None
    if features is not None and not isinstance(features, dict):
        raise SourceError(f"{where}: its Hugging Face metadata names no features but {str(features)[:80]!r}")
    return features


def guess(features: Mapping[str, Any], skip: str, where: str) -> list[FieldSpec]:
    """One field a feature, but for the column ``skip`` (the key).

    Raises:
        OptionError: a feature that no kind of field holds by itself, such as a list of pictures.
    """
    pictures = sum(_kind_of(feature) == "Image" for feature in features.values())
    fields = []
    for name, feature in features.items():
        if name == skip:
            continue
        kind, options = _field(name, feature, where)
        if kind == "image" and pictures > 1:
            # Any of them may be a mask or a depth map.
            options = {"codec": "keep"}
        origin = "file" if kind in ("image", "audio") else "inline"
        fields.append(FieldSpec(name.lstrip("_") or "column", kind, name, origin, options))
    if len({spec.name for spec in fields}) != len(fields):
        raise OptionError(f"{where}: two columns would make fields of one name; declare the fields with --field")
    return fields


def _kind_of(feature: Any) -> str:
    return str(feature.get("_type", "")) if isinstance(feature, dict) else ""


def _field(name: str, feature: Any, where: str) -> tuple[str, dict[str, str]]:
    kind = _kind_of(feature)
    if kind == "Image":
        return "image", {}
    if kind == "Audio":
        return "audio", {}
    if kind in _FILES:
        return "bytes", {}
    if kind == "ClassLabel":
        return "scalar", {"dtype": "int64"}
    if kind == "Value":
        return _value(name, str(feature.get("dtype", "")), where)
    if kind.startswith("Array") and kind.endswith("D") and isinstance(feature.get("shape"), list | tuple):
        sizes = "x".join("*" if size is None else str(size) for size in feature["shape"])
        return "array", {"dtype": _SCALARS.get(str(feature.get("dtype")), "float32"), "shape": sizes}
    dtype = _list_of_numbers(feature)
    if dtype is not None:
        return "array", {"dtype": dtype, "ndim": "1"}
    if any(_kind_of(inner) in ("Image", "Audio", *_FILES) for inner in _inside(feature, 0)):
        raise OptionError(
            f"{where}: column {name!r} holds files inside lists or objects, which no kind of field takes by itself; "
            "declare the fields that you need with --field"
        )
    return "json", {}


def _value(name: str, dtype: str, where: str) -> tuple[str, dict[str, str]]:
    base = dtype.partition("[")[0].partition("(")[0]
    if base in _SCALARS:
        return "scalar", {"dtype": _SCALARS[base]}
    if base in _TEXTS or base in _AS_TEXT or base == "null":
        return "text", {}
    if base in _BYTES:
        return "bytes", {}
    if base == "duration":
        return "scalar", {"dtype": "int64"}
    raise OptionError(f"{where}: column {name!r} has values of {dtype!r}; declare the fields with --field")


def _element(feature: Any) -> Any:
    """What a list holds; ``None`` where the feature is no list."""
    if isinstance(feature, list) and len(feature) == 1:
        return feature[0]
    return feature.get("feature") if _kind_of(feature) in _LISTS else None


def _list_of_numbers(feature: Any) -> str | None:
    element = _element(feature)
    if _kind_of(element) == "ClassLabel":
        return "int64"
    if _kind_of(element) != "Value":
        return None
    return _SCALARS.get(str(element.get("dtype")))


def _inside(feature: Any, depth: int) -> Iterator[Any]:
    if depth > _MAX_DEPTH:
        raise OptionError(f"features nested more than {_MAX_DEPTH} deep")
    yield feature
    if isinstance(feature, list):
        for inner in feature:
            yield from _inside(inner, depth + 1)
    elif isinstance(feature, dict):
        for inner in feature.values():
            if isinstance(inner, dict | list):
                yield from _inside(inner, depth + 1)


def class_names(features: Mapping[str, Any]) -> dict[str, list[str]]:
    """Names of classes by column, for columns of labels and of lists of labels."""
    names = {}
    for column, feature in features.items():
        label = feature if _kind_of(feature) == "ClassLabel" else _element(feature)
        if _kind_of(label) == "ClassLabel" and isinstance(label.get("names"), list):
            names[column] = [str(name) for name in label["names"]]
    return names
