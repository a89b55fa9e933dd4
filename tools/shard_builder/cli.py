"""The command ``shard-builder``: one verb a file in ``verbs/``."""

from __future__ import annotations

import importlib
import sys

import click

from lfdata.errors import LfdataError, OptionError
from lfdata.storage.urls import is_url, shown

VERBS = (
    "convert",
    "finish",
    "inspect",
    "show",
    "verify",
    "stats",
    "index",
    "repair",
    "export",
    "merge",
    "split",
    "filter",
    "add-field",
    "dedupe",
    "advise",
)
EXIT_FAILURE, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


class _Verbs(click.Group):
    """Imports a verb when it is asked for, so that ``--help`` is quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in VERBS:
            return None
        command = importlib.import_module(f"shard_builder.verbs.{cmd_name.replace('-', '_')}").command
        assert isinstance(command, click.Command)
        return command


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="lfdata")
def cli() -> None:
    """Convert data sets into memory-mapped shards, look at them, and prove them intact."""


def _refuse_urls(arguments: list[str]) -> None:
    """Only ``convert`` takes URLs; a path type would make a missing directory of them."""
    if arguments and arguments[0] != "convert":
        for argument in arguments[1:]:
            if is_url(argument):
                raise OptionError(f"{shown(argument)}: {arguments[0]} takes local data sets; copy this one first")


def main() -> None:
    """Entry point: typed errors become one line on stderr and an exit status."""
    try:
        _refuse_urls(sys.argv[1:])
        status = cli.main(standalone_mode=False)
        sys.exit(status if isinstance(status, int) else 0)
    except click.exceptions.Exit as end:
        sys.exit(end.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        click.echo(
            "interrupted; nothing half-written is visible. The same command goes on with what is done (convert: with --resume)",
            err=True,
        )
        sys.exit(EXIT_INTERRUPTED)
    except OptionError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(EXIT_USAGE)
    except LfdataError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(EXIT_FAILURE)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(EXIT_FAILURE)


if __name__ == "__main__":
    main()
