"""The command ``lfbench``: measures the package and its peers on this machine and writes JSON records."""

from __future__ import annotations

import importlib
from typing import Any

import click

from benchmarks.record import RecordError
from lfdata.errors import LfdataError

COMMANDS = (
    "run",
    "compare",
    "report",
    "plot",
    "data",
    "environment",
    "convert",
    "sources",
    "read",
    "open",
    "sizes",
    "layout",
    "windows",
    "remote",
    "feedback",
    "forecast",
)


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"benchmarks.commands.{cmd_name}_").command
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (RecordError, LfdataError) as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="lfdata")
def main() -> None:
    """Measure lfdata beside its peers (run) and against bare loops (the rest). Repeats are interleaved; all are in the record."""


if __name__ == "__main__":
    main()
