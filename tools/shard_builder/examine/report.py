"""Reports as text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shard_builder.examine.text import number_text, shorten, visible

Echo = Callable[[str], None]
_COLUMNS = ("min", "p1", "p5", "p50", "p95", "p99", "max", "mean")
_SHOWN_VALUES = 12
_SHOWN_EXAMPLES = 10


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
        echo(f"duplicates: {found['groups']:,} groups, {found['redundant']:,} values too many, field {visible(found['field'])!r}")
        for group in found["examples"][:_SHOWN_EXAMPLES]:
            echo(f"  {group['count']:,} equal: " + "; ".join(_place(sample) for sample in group["samples"][:4]) + ("; ..." if group["count"] > 4 else ""))
        _more(found["groups"], len(found["examples"]), echo)
    if not content["findings"] and not content["duplicates"]:
        echo("nothing black, white, silent, empty or duplicate")


def _more(count: int, listed: int, echo: Echo) -> None:
    shown = min(listed, _SHOWN_EXAMPLES)
    if count > shown:
        echo(f"  ... {count - shown:,} more" + (" (--json lists more)" if listed > shown else ""))


def _place(sample: dict[str, Any]) -> str:
    return f"index {sample['index']} ({visible(sample['file'])} row {sample['row']}, key {sample['key']!r})"
