"""Default fields of a tar source, guessed from the extensions of its first samples: from names only, never contents."""

from __future__ import annotations

from collections.abc import Sequence

from lfdata.errors import OptionError
from shard_builder.sources.base import FieldSpec

LOSSY = ("jpg", "jpeg", "webp", "avif")
LOSSLESS = ("png", "gif", "bmp", "tif", "tiff")
IMAGES = LOSSY + LOSSLESS
AUDIO = ("wav", "flac", "ogg", "opus", "mp3")
TEXTS = ("txt", "text", "caption")
OPAQUE = {
    "npy": "an array; to store numbers declare it, for example '{name}:array={extension},dtype=float32,ndim=1'",
    "npz": "an archive of arrays",
    "pth": "a pickle, which is never opened",
    "pt": "a pickle, which is never opened",
    "pyd": "a pickle, which is never opened",
    "pickle": "a pickle, which is never opened",
    "pkl": "a pickle, which is never opened",
}
"""Extensions that are kept as bytes with a note, and what they are."""


def guess_fields(samples: Sequence[Sequence[str]], *, gunzip: bool = False) -> list[FieldSpec]:
    """Fields for samples with these extensions.

    Pictures of different formats that never meet in one sample become one field ``image``; likewise recordings (``audio``).
    ``txt`` is ``text``, ``json`` is ``json``, ``cls`` is a scalar int64; everything else is kept as ``bytes`` under the
    extension's name, dots written as underscores. ``x.gz`` counts as ``x`` where ``gunzip`` decompresses it.

    A picture in a lossless format that stands beside another picture, or has a dotted extension (``seg.png``), may be a mask
    or a depth map: it is stored without loss.

    Args:
        samples: the extensions of each sample, in lower case.

    Raises:
        OptionError: no samples, or two extensions that would make fields of one name.
    """
    seen = sorted({extension for sample in samples for extension in sample})
    if not seen:
        raise OptionError("there is no sample to guess the fields from; declare them, for example --field image:image=jpg")
    fields: list[FieldSpec] = []
    grouped: set[str] = set()
    for kind, family in (("image", IMAGES), ("audio", AUDIO)):
        plain = sorted(set(seen) & set(family), key=family.index)
        if plain and all(len(set(sample) & set(plain)) <= 1 for sample in samples):
            fields.append(FieldSpec(kind, kind, ";".join(plain)))
            grouped.update(plain)
    fields += [_single(extension, gunzip) for extension in seen if extension not in grouped]
    return _unique(fields)


def guess_notes(fields: Sequence[FieldSpec]) -> list[str]:
    """What a person should know about guessed fields."""
    notes = []
    for spec in fields:
        what = OPAQUE.get(spec.column.rpartition(".")[2]) if spec.kind == "bytes" else None
        if what is not None:
            notes.append(f"members .{spec.column} are kept as bytes: {what.format(name=spec.name, extension=spec.column)}")
    return notes


def _single(extension: str, gunzip: bool) -> FieldSpec:
    plain = extension.removesuffix(".gz") if gunzip else extension
    last = plain.rpartition(".")[2]
    name = plain.replace(".", "_")
    if last in LOSSLESS:
        return FieldSpec(
            name, "image", extension, options={"codec": "keep"} if last == "png" else {"codec": "png", "bits16": "keep"}
        )
    if last in LOSSY:
        return FieldSpec(name, "image", extension)
    if last in AUDIO:
        return FieldSpec(name, "audio", extension)
    if last in TEXTS:
        return FieldSpec("text" if plain == "txt" else name, "text", extension)
    if last == "json":
        return FieldSpec(name, "json", extension)
    if last == "cls":
        return FieldSpec(name, "scalar", extension, options={"dtype": "int64"})
    # Names that begin with two underscores are reserved.
    return FieldSpec(name.lstrip("_") or "member", "bytes", extension)


def _unique(fields: list[FieldSpec]) -> list[FieldSpec]:
    names: dict[str, str] = {}
    for spec in fields:
        other = names.setdefault(spec.name, spec.column)
        if other != spec.column:
            raise OptionError(
                f"members ending in .{other} and .{spec.column} would both make a field {spec.name!r}; "
                "declare the fields with --field"
            )
    return fields
