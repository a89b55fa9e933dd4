"""``lfbench report``: writes the tables of the README and docs/benchmarks.md from the committed records."""

from __future__ import annotations

import click

from benchmarks.harness.audit import edited
from benchmarks.harness.plot import stale as stale_plots
from benchmarks.harness.plot import surplus
from benchmarks.harness.report import DOCUMENTS, REPO, run_record, shown, updated
from benchmarks.record import RESULTS, RecordError


@click.command("report")
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if a document differs from the records.")
def command(check: bool) -> None:
    """Put every committed record's table where a document has its marker. With --check, plots (`lfbench plot` draws them) and the records
    themselves are checked too: figures that their repeats do not give, records that no document shows, plots of no record."""
    stale, said = [], set()
    for document in DOCUMENTS:
        text = document.read_text()
        said |= shown(text)
        try:
            fresh = updated(text)
        except RecordError as error:
            raise click.ClickException(f"{document.name}: {error}") from error
        if fresh != text:
            stale.append(document.name)
            if not check:
                document.write_text(fresh)
    if check:
        stale += _faults(said)
    click.echo(f"{'stale' if check else 'written'}: {', '.join(stale)}" if stale else "all tables are as the records say")
    if stale and check:
        raise click.exceptions.Exit(1)


def _faults(said: set[str]) -> list[str]:
    """What is wrong with the records and plots beside the documents."""
    records, plots, found = sorted(RESULTS.glob("W*.json")), REPO / "docs" / "plots", []
    for path in records:
        try:
            record = run_record(path)
        except RecordError as error:
            raise click.ClickException(str(error)) from error
        found += [f"{path.name}: {fault}" for fault in edited(record)]
        if path.stem not in said:
            found.append(f"{path.name} (no document has a table of it)")
    found += [
        f"{path.name} (no document has a table of it)" for path in sorted(RESULTS.glob("gpu-*.json")) if path.stem not in said
    ]
    found += stale_plots(records, plots)
    return found + [f"{name} (a plot of no record)" for name in surplus(records, plots)]
