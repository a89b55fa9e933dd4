"""The command ``lftrain``."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lfdata.errors import LfdataError
from lftrain import config as configuration
from lftrain.errors import PeerError

if TYPE_CHECKING:
    from lftrain.runtime.loop import Result


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Train models from shards."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")


@main.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="TABLE.KEY=VALUE", help="one value over the file's; may be repeated")
@click.option("--check", is_flag=True, help="only read the configuration and say what is wrong with it")
def run(config: Path, overrides: tuple[str, ...], check: bool) -> None:
    """Train as CONFIG (TOML or YAML) says, from the newest checkpoint on.

    With several ranks: torchrun --nproc-per-node N -m lftrain run CONFIG. Exit status 0: all steps are done; 3: a signal ended the run
    after a checkpoint, the same command goes on from it; 1: an error.
    """
    try:
        options = configuration.load(config, overrides)
        # Imported late: a wrong configuration is told without waiting for torch.
        from lftrain.build import build
        from lftrain.build import check as check_all

        if check:
            check_all(options)
            click.echo(f"{config}: good")
            return
        runtime = build(options)
        result = runtime.run()
    except LfdataError as error:
        rank = os.environ.get("RANK")
        told = ". ".join([str(error), *getattr(error, "__notes__", ())])
        click.echo(f"lftrain: {f'rank {rank}: ' if rank else ''}{type(error).__name__}: {told}", err=True)
        if isinstance(error, PeerError):
            # What is left of the group would wait for those that are gone.
            sys.stderr.flush()
            os._exit(1)
        sys.exit(1)
    if runtime.group.rank == 0:
        click.echo(_summary(result, options.run.steps, runtime.folder))
    sys.exit(0 if result.finished else 3)


def _summary(result: Result, steps: int, folder: Path) -> str:
    """What a run came to, in a line."""
    known = [f"loss {result.loss:.6g}"] if math.isfinite(result.loss) else []
    known += [f"held-out loss {result.held_out:.6g}"] if result.held_out is not None else []
    told = ", ".join([*known, f"{result.skipped} skipped"])
    if result.finished and result.began == result.step:
        more = "" if result.step == steps else f" (run.steps is {steps})"
        return f"this run is finished already, nothing was done: step {result.step}{more}: {told}; records in {folder}"
    return f"step {result.step}: {told}; records in {folder}"


@main.command()
def options() -> None:
    """All options of a configuration, as Markdown."""
    from lftrain.models import reference

    click.echo(reference(), nl=False)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="as one JSON object")
def doctor(as_json: bool) -> None:
    """What this machine has for training, what is missing, and what to type. Exit status 1: something that is needed is missing."""
    from lfdata import doctor as data_doctor
    from lftrain.health.doctor import examine, render

    found = examine()
    click.echo(json.dumps(found, indent=2) if as_json else render(found), nl=as_json)
    sys.exit(0 if data_doctor.healthy(found["data"]) else 1)


if __name__ == "__main__":
    main()
