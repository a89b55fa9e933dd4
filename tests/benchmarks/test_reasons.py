"""The one line of a table says why a subject failed."""

from __future__ import annotations

import pytest

from benchmarks.harness.reasons import MOST_LETTERS, short

TRACE = 'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\n    raise\n    ^^^^^\n'


@pytest.mark.parametrize(
    ("reason", "wanted"),
    [
        ("", ""),
        ("it has no way to do W3", "it has no way to do W3"),
        (
            "No module named 'a'; `lfbench environment a` installs it",
            "No module named 'a'; `lfbench environment a` installs it",
        ),
        (f"exit status 1: {TRACE}ValueError: bad | worse", "ValueError: bad / worse"),
        ("exit status -9: ", "exit status -9, without a word"),
        (f"exit status -11: {TRACE}source: a.jpg: no picture", "exit status -11, without a word; source: a.jpg: no picture"),
        (
            "exit status 1:   + Exception Group Traceback (most recent call last):\n  |   File\n  +-+---------------- 1 ----------------\n"
            "    | Traceback (most recent call last):\n    |     task.result()\n    | RuntimeError: Failed to parse the packet\n"
            "    +---------------- 2 ----------------\n    | RuntimeError: The pipeline stage (0:2:aggregate) failed 1 times.\n"
            "    | Pipeline stage: 0:2:aggregate\n    +------------------------------------\nsource: a.jpg: no picture",
            "RuntimeError: Failed to parse the packet; source: a.jpg: no picture",
        ),
        (
            f"exit status 1: {TRACE}subprocess.CalledProcessError: Command '{'long ' * 90}' returned non-zero exit status 1."
            "\nsource: a.jpg: bad",
            f"subprocess.CalledProcessError: Command '{'long ' * 31}lo...; source: a.jpg: bad",
        ),
        (
            f"exit status 1: shard-builder: 05.jpg: not a JPEG file\n{TRACE}subprocess.CalledProcessError: Command '['python', '-m']' "
            "returned non-zero exit status 1.",
            "shard-builder: 05.jpg: not a JPEG file (CalledProcessError)",
        ),
        (
            f"exit status 1: 2026-11-30 10:00:00,123 [ERROR] stage failed: RuntimeError: Failed to decode\n{TRACE}"
            "spdl.pipeline.PipelineFailure: The pipeline failed\nsource: /data/05.jpg: no picture; mend it",
            "stage failed: RuntimeError: Failed to decode (PipelineFailure); source: /data/05.jpg: no picture; mend it",
        ),
        (
            f"exit status 1: {TRACE}RuntimeError: Caught UnidentifiedImageError in DataLoader worker process 0.\nOriginal {TRACE}"
            "PIL.UnidentifiedImageError: cannot identify image file",
            "PIL.UnidentifiedImageError: cannot identify image file",
        ),
    ],
)
def test_the_line_that_says_why(reason: str, wanted: str) -> None:
    assert short(reason) == wanted


def test_a_reason_is_one_line_of_bounded_length() -> None:
    text = short("exit status 1: ValueError: " + "long " * 200 + "\nsecond line")
    assert "\n" not in text and len(text) <= MOST_LETTERS
