"""``lfbench report``: writes the tables of the README and docs/benchmarks.md from the committed records."""

from __future__ import annotations

import click

from benchmarks.harness.report import DOCUMENTS, updated
from benchmarks.record import RecordError


@click.command("report")
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if a document differs from the records.")
def command(check: bool) -> None:
    """Put every committed record's table where a document has its marker."""
    stale = []
    for document in DOCUMENTS:
        text = document.read_text()
        try:
            fresh = updated(text)
        except RecordError as error:
            raise click.ClickException(f"{document.name}: {error}") from error
        if fresh != text:
            stale.append(document.name)
            if not check:
                document.write_text(fresh)
    click.echo(f"{'stale' if check else 'written'}: {', '.join(stale)}" if stale else "all tables are as the records say")
    if stale and check:
        raise click.exceptions.Exit(1)
