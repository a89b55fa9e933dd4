"""Run under strace by ``test_trace``: a conversion with real workers through the logging layer, whose log it leaves as JSON lines."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from crashkit import LoggingFiles
from faultkit import SMALL, with_options

from shard_builder.convert import convert
from shard_builder.fields import parse_field
from shard_builder.sources import open_source

FIELDS = ("blob:bytes=file@file", "ids:tokens=ids,vocab=1000", "about:json=about")


def main(source: str, target: str, log: str, *modes: str) -> None:
    """One conversion, or what ``modes`` say (``overwrite``), logged. ``bypass`` writes one file behind the layer's back."""
    files = LoggingFiles(Path(target).parent)
    options = with_options(
        SMALL, segment_rows=20, shard_bytes=9_000, workers=2, on_error="quarantine", overwrite="overwrite" in modes
    )
    convert(open_source(source, fields=[parse_field(text) for text in FIELDS]), target, options, files=files)
    if "bypass" in modes:
        Path(target, "run.log.jsonl").write_bytes(b"")
    names = ((op.kind, op.path, op.target) for op in files.log)
    Path(log).write_text("".join(json.dumps(name) + "\n" for name in names))


if __name__ == "__main__":
    main(*sys.argv[1:])
