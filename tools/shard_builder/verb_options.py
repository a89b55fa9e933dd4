"""What the verbs that make something share on the command line."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import click

from lfdata.format.durable import Files, OutputFile, temporary_name
from shard_builder.operations.build import BuildOptions, Built
from shard_builder.operations.selecting import ShardSizes
from shard_builder.options import parse_size
from shard_builder.signals import interruptible

F = TypeVar("F", bound=Callable[..., Any])


def building(function: F) -> F:
    """Add the options to a click command."""
    options = (
        click.option("--shard-size", default="1G", show_default=True, help="Size at which a new shard begins."),
        click.option("--group-size", default="8M", show_default=True, help="Payload bytes of a row group of a new shard."),
        click.option("--copy", is_flag=True, help="Copy whole shards and compare their digests, rather than link them."),
        click.option("--workers", type=click.IntRange(0), default=0, help="Processes; 0: the cores available."),
        click.option("--allow-empty", is_flag=True, help="Accept a result without samples."),
    )
    for option in reversed(options):
        function = option(function)
    return function


def build_options(given: dict[str, Any]) -> BuildOptions:
    """What was given. SIGTERM is an interruption from here on."""
    interruptible()
    sizes = ShardSizes(shard_bytes=parse_size(given["shard_size"]), group_bytes=parse_size(given["group_size"]))
    return BuildOptions(sizes, given["copy"], given["workers"], given["allow_empty"])


def say(made: Built) -> None:
    """One line about a result."""
    click.echo(
        f"{made.path}: {made.rows:,} samples in {made.shards} shards ({made.whole} taken over whole), {made.bytes / 1e6:,.1f} MB"
    )


@contextlib.contextmanager
def written(path: Path) -> Iterator[OutputFile]:
    """A file that appears under its name when it is complete, and not at all if that fails."""
    files = Files()
    temporary = path.with_name(temporary_name(path.name))
    files.unlink(temporary)
    output = files.create(temporary)
    try:
        yield output
        files.commit(output, path)
    except BaseException:
        files.discard(output)
        raise
