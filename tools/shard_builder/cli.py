"""The command ``shard-builder``: one verb a file in ``verbs/``."""

from __future__ import annotations

import importlib
import sys

import click

from lfdata.errors import LfdataError, OptionError

VERBS = ("convert", "inspect", "show", "verify", "stats", "index", "repair")
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
        command = importlib.import_module(f"shard_builder.verbs.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="lfdata")
def cli() -> None:
    """Convert data sets into memory-mapped shards, look at them, and prove them intact."""


def main() -> None:
    """Entry point: typed errors become one line on stderr and an exit status."""
    try:
        status = cli.main(standalone_mode=False)
        sys.exit(status if isinstance(status, int) else 0)
    except click.exceptions.Exit as end:
        sys.exit(end.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted; nothing half-written is visible. `--resume` goes on from the last committed shard", err=True)
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
