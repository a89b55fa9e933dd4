"""Default fields of a tar source, guessed from the extensions of its first samples. Deterministic: names only, never contents."""

from __future__ import annotations

from collections.abc import Sequence

from lfdata.errors import OptionError
from shard_builder.sources.base import FieldSpec

IMAGES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "avif")
AUDIO = ("wav", "flac", "ogg", "opus", "mp3")
TEXTS = ("txt", "text", "caption")
JSON = ("json",)
CLASSES = ("cls", "cls2", "index", "id")
DECLARED = {
    "npy": "array=npy,dtype=float32,ndim=1",
    "npz": "bytes=npz",
    "pth": "bytes=pth",
    "pyd": "bytes=pyd",
    "pickle": "bytes=pickle",
    "pkl": "bytes=pkl",
}
"""Extensions that mean nothing without a declaration, each with what one could look like."""


def guess_fields(samples: Sequence[Sequence[str]], *, gunzip: bool = False) -> list[FieldSpec]:
    """Fields for samples with these extensions.

    Pictures of different formats that never meet in one sample become one field ``image``; likewise recordings (``audio``). ``txt`` is
    ``text``, ``json`` is ``json``, ``cls`` is a scalar int64; everything else is kept as ``bytes`` under the extension's name, dots
    written as underscores. ``x.gz`` counts as ``x`` where ``gunzip`` decompresses it.

    Args:
        samples: the extensions of each sample, in lower case.

    Raises:
        OptionError: no samples, or an extension (``npy``) that must be declared.
    """
    seen: dict[str, None] = {}
    for sample in samples:
        seen.update(dict.fromkeys(sample))
    if not seen:
        raise OptionError("there is no sample to guess the fields from; declare them, for example --field image:image=jpg")
    fields: list[FieldSpec] = []
    grouped: set[str] = set()
    for kind, family in (("image", IMAGES), ("audio", AUDIO)):
        plain = sorted(set(seen) & set(family), key=family.index)
        if plain and all(len(set(sample) & set(plain)) <= 1 for sample in samples):
            fields.append(FieldSpec(kind, kind, ";".join(plain)))
            grouped.update(plain)
    fields += [_single(extension, gunzip) for extension in sorted(seen) if extension not in grouped]
    return _unique(fields)


def _single(extension: str, gunzip: bool) -> FieldSpec:
    plain = extension.removesuffix(".gz") if gunzip else extension
    last = plain.rpartition(".")[2]
    name = plain.replace(".", "_")
    if last in DECLARED:
        raise OptionError(
            f"members ending in .{extension} must be declared: --field '{name}:{DECLARED[last].replace('=' + last, '=' + extension, 1)}', "
            "and then every other field too"
        )
    if last in IMAGES:
        return FieldSpec(name, "image", extension)
    if last in AUDIO:
        return FieldSpec(name, "audio", extension)
    if last in TEXTS:
        return FieldSpec("text" if plain == "txt" else name, "text", extension)
    if last in JSON:
        return FieldSpec(name, "json", extension)
    if last in CLASSES:
        return FieldSpec(name, "scalar", extension, options={"dtype": "int64"})
    return FieldSpec(name, "bytes", extension)


def _unique(fields: list[FieldSpec]) -> list[FieldSpec]:
    names: dict[str, str] = {}
    for spec in fields:
        other = names.setdefault(spec.name, spec.column)
        if other != spec.column:
            raise OptionError(f"members ending in .{other} and .{spec.column} would both make a field {spec.name!r}; declare the fields with --field")
    return fields
