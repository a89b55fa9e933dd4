"""Reports as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from tqdm import tqdm

from shard_builder.examine.text import number_text, shorten, size_text, visible

Echo = Callable[[str], None]
Progress = Callable[[int, int], None]
"""Called with (tasks done, tasks in all)."""
_COLUMNS = ("min", "p1", "p5", "p50", "p95", "p99", "max", "mean")
_SHOWN_VALUES = 12
_SHOWN_EXAMPLES = 10
_SHOWN_SHARDS = 20


@contextmanager
def progress_bar(what: str) -> Iterator[Progress]:
    """A bar on standard error, if that is a terminal."""
    with tqdm(desc=what, unit=" tasks", disable=None, leave=False) as bar:

        def step(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield step


def print_stats(result: dict[str, Any], echo: Echo) -> None:
    """The result of ``stats``."""
    echo(f"{visible(result['path'])}: {result['rows']:,} samples in {result['shards']:,} shards")
    for name, field in result["fields"].items():
        echo(f"\n{visible(name)} ({field['kind']}): {field['present']:,} present, {field['absent']:,} absent")
        _print_columns(field["columns"], echo)
        for role, counts in field.get("counts", {}).items():
            echo(f"  {role}: {_counts(counts)}")
        texts = (result["content"] or {}).get("texts", {}).get(name)
        if texts:
            echo(f"  text: {_counts(texts)}")
    if result["content"] is not None:
        _print_content(result["content"], echo)
    for error in result["errors"]:
        echo(f"error: {visible(error)}")


def _print_columns(columns: dict[str, Any], echo: Echo) -> None:
    shown = {name: summary for name, summary in columns.items() if summary["count"]}
    if shown:
        echo("  " + " " * 12 + "".join(f"{title:>14}" for title in _COLUMNS))
    for name, summary in shown.items():
        echo(f"  {name:<12}" + "".join(f"{number_text(summary[title]):>14}" for title in _COLUMNS))
    for name, summary in columns.items():
        if summary.get("nonfinite"):
            echo(f"  {name}: {summary['nonfinite']:,} values are NaN or infinite")


def _counts(counts: dict[str, Any]) -> str:
    top = ", ".join(f"{shorten(visible(str(value)), 40)} x {number:,}" for value, number in counts["top"][:_SHOWN_VALUES])
    rest = counts["distinct"] if isinstance(counts["distinct"], str) else max(0, counts["distinct"] - _SHOWN_VALUES)
    if isinstance(rest, str):
        return f"{rest} different values"
    return top + (f", and {rest:,} more values" if rest else "")


def _print_content(content: dict[str, Any], echo: Echo) -> None:
    echo(f"\nlooked at {content['samples']:,} samples, {content['values']:,} values")
    for found in content["findings"]:
        echo(f"{found['check']}: {found['count']:,} in field {visible(found['field'])!r}")
        for example in found["examples"][:_SHOWN_EXAMPLES]:
            echo(f"  {_place(example)}: {visible(example['detail'])}")
        _more(found["count"], len(found["examples"]), echo)
    for found in content["duplicates"]:
        echo(
            f"duplicates: {found['groups']:,} groups, {found['redundant']:,} values too many, field {visible(found['field'])!r}"
        )
        for group in found["examples"][:_SHOWN_EXAMPLES]:
            echo(
                f"  {group['count']:,} equal: "
                + "; ".join(_place(sample) for sample in group["samples"][:4])
                + ("; ..." if group["count"] > 4 else "")
            )
        _more(found["groups"], len(found["examples"]), echo)
    if not content["findings"] and not content["duplicates"]:
        echo("nothing black, white, silent, empty or duplicate")


def _more(count: int, listed: int, echo: Echo) -> None:
    shown = min(listed, _SHOWN_EXAMPLES)
    if count > shown:
        echo(f"  ... {count - shown:,} more" + (" (--json lists more)" if listed > shown else ""))


def _place(sample: dict[str, Any]) -> str:
    return f"index {sample['index']} ({visible(sample['file'])} row {sample['row']}, key {sample['key']!r})"


def print_set(result: dict[str, Any], echo: Echo) -> None:
    """A data set, by ``inspect``."""
    sizes, shards = result["bytes"], result["shards"]
    version = ".".join(map(str, result["version"]))
    echo(f"{visible(result['path'])}: lfdata {version}, {result['rows']:,} samples in {len(shards):,} shards")
    each = "" if result["bytes_a_sample"] is None else f", {size_text(result['bytes_a_sample'])} a sample"
    echo(f"size: {size_text(sizes['manifest_says'])} ({sizes['manifest_says']:,} bytes){each}")
    if sizes["on_disk"] != sizes["manifest_says"]:
        echo(f"  ON DISK: {sizes['on_disk']:,} bytes: files are missing or of another size; `shard-builder verify` says which")
    index = result["index"]
    detail = f": {visible(index['reason'])}" if index["reason"] else f": {size_text(sizes['index'] or 0)}"
    echo(f"index.lfi: {index['state']}{detail}")
    echo("fields:")
    for field in result["fields"]:
        echo(f"  {visible(field['name'])} ({field['kind']}) {visible(_compact(field['params']))}")
        statistics = result["statistics"].get(field["name"])
        for name, value in statistics.items() if isinstance(statistics, dict) else ():
            echo(f"    {visible(name)}: {_statistic(value)}")
    echo("provenance:")
    for name, value in result["provenance"].items():
        echo(f"  {visible(name)}: {visible(value if isinstance(value, str) else _compact(value))}")
    echo("shards:")
    for shard in shards[:_SHOWN_SHARDS]:
        lost = f"  MISSING: {', '.join(map(visible, shard['missing']))}" if shard["missing"] else ""
        sides = "".join(f" + {visible(side['file'])} ({', '.join(map(visible, side['fields']))})" for side in shard["sidecars"])
        place = f"samples {shard['first']:,} to {shard['stop'] - 1:,}" if shard["rows"] else "no samples"
        echo(f"  {visible(shard['file'])}: {place}, {size_text(shard['bytes'])}{sides}{lost}")
    if len(shards) > _SHOWN_SHARDS:
        echo(f"  ... {len(shards) - _SHOWN_SHARDS:,} more (--json lists all)")


def print_file(result: dict[str, Any], echo: Echo) -> None:
    """One file, by ``inspect``."""
    header = result["header"]
    version = ".".join(map(str, header["version"]))
    echo(f"{visible(result['path'])}: {result['type']}, lfdata {version}, {header['rows']:,} rows, {header['bytes']:,} bytes")
    part = "" if result["type"] != "sidecar" else f", part {header['part_id']}"
    features = f"{header['required_features']:#x} required, {header['optional_features']:#x} optional"
    echo(f"shard id {header['shard_id']}{part}, features {features}")
    echo(f"{'section':<8} {'offset':>14} {'bytes':>14} {'count':>12}  {'element':<8} field, role")
    for section in result["sections"]:
        name = (
            "" if section["field"] is None else visible(section["field"]) + (f", {section['role']}" if section["role"] else "")
        )
        if section["type"] == "GRUP":
            name = f"rows {section['first']} to {section['first'] + section['count'] - 1}"
        numbers = f"{section['offset']:>14} {section['bytes']:>14} {section['count']:>12}"
        echo(f"{visible(section['type']):<8} {numbers}  {section['element']:<8} {name}".rstrip())
    for field, size in result["dictionaries"].items():
        echo(f"dictionary of {visible(field)}: {size:,} bytes")
    echo(f"META: {visible(_compact(result['meta']))}")


def _compact(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _statistic(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{visible(name)} {number_text(number)}" for name, number in value.items())
    return number_text(value)
