"""The README's Python blocks run as they stand, one after the other in one process."""

import subprocess
import sys

from tests.support.source_tree import ROOT, fenced_blocks


def test_the_quickstart_runs():
    blocks = fenced_blocks((ROOT / "README.md").read_text(), ("python",))
    assert blocks
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
