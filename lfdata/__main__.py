"""``python -m lfdata doctor``: what this installation can do."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from lfdata import doctor


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0: all is active; 1: something is missing; 2: wrong arguments."""
    parser = argparse.ArgumentParser(prog="lfdata", description="Memory-mapped shards for multimodal training data.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    help_text = "which native modules and libraries are used, and what to install for those that are not"
    command = commands.add_parser("doctor", help=help_text, description=help_text)
    command.add_argument("--json", action="store_true", help="as one JSON object")
    chosen = parser.parse_args(arguments)
    found = doctor.examine()
    sys.stdout.write(json.dumps(found, indent=2) + "\n" if chosen.json else doctor.render(found))
    return 0 if doctor.healthy(found) else 1


if __name__ == "__main__":
    sys.exit(main())
