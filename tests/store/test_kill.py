"""kill -9 at seeded instants; the same command again must end with the bytes of an undisturbed run."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_run import run

SCRIPT = Path(__file__).parent / "small_run.py"
STEPS = 22


def tree(folder):
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def start_and_kill(output, steps, delay):
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[2] / "pipeline")}
    with subprocess.Popen([sys.executable, SCRIPT, output], stdout=subprocess.PIPE, env=environment) as process:
        for _ in range(steps):
            process.stdout.readline()
        time.sleep(delay)
        process.kill()
    return process.returncode


@pytest.mark.parametrize("name", ["out", "out.parquet"])
@pytest.mark.parametrize("seed", range(6))
def test_killed_and_run_again_is_undisturbed(tmp_path, name, seed):
    rng = random.Random(seed)
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    run(undisturbed / name)
    for last in (False, True):
        ended = start_and_kill(killed / name, rng.randint(1, STEPS if last else STEPS // 2), rng.uniform(0, 0.03))
        assert last or ended == -signal.SIGKILL  # and not just the end of a run
        published = {path: path.stat().st_ino for path in killed.glob("out/part-*")}

    run(killed / name)
    assert tree(killed) == tree(undisturbed)
    assert {path: path.stat().st_ino for path in published} == published
