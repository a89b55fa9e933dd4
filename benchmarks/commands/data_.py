"""``lfbench data``: fetches real data by recipe."""

from __future__ import annotations

from pathlib import Path

import click

from benchmarks.harness.data import RECIPES, RecipeError, fetch
from benchmarks.harness.environments import HOME


@click.command("data", epilog="; ".join(f"{name}: {recipe.about} ({recipe.licence})" for name, recipe in RECIPES.items()))
@click.argument("name", type=click.Choice(tuple(RECIPES)))
@click.option("--home", type=click.Path(file_okay=False, path_type=Path), default=HOME, help="Where to keep it.")
def command(name: str, home: Path) -> None:
    """Fetch the data set NAME from Debian packages, once, and print its folder."""
    try:
        click.echo(fetch(name, home, lambda text: click.echo(text, err=True)))
    except RecipeError as error:
        raise click.ClickException(str(error)) from error
