"""The command ``lfbench``: measures the package on this machine and writes JSON records."""

from __future__ import annotations

import importlib

import click

WORKLOADS = ("convert", "read", "open", "sizes", "layout")


class _Workloads(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(WORKLOADS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in WORKLOADS:
            return None
        command = importlib.import_module(f"benchmarks.commands.{cmd_name}_").command
        assert isinstance(command, click.Command)
        return command


@click.group(cls=_Workloads, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="lfdata")
def main() -> None:
    """Measure lfdata against bare loops over the same work. Repeats are interleaved; every repeat is in the record."""


if __name__ == "__main__":
    main()
