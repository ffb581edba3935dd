"""A few cases of every fault; and wrong code in place of the right one, which they have to show."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults import run
from faults.harness import Harness, references
from faults.run import CAUGHT_BY, MISSING, REAL, SMALL, Fault, caught

# Kills and signals at random instants through the command line are in ../test_promises.py.
_QUICK_REAL = (run.real.storage_fails, run.real.worker_killed)
_QUICK = ("no_folder_fsync", "fsync_retried", "replace_for_link", "nan_check_off", "page_checksums_off")


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    root = tmp_path_factory.mktemp("faults")
    return Harness(root / "right", references(root))


@pytest.fixture(scope="module")
def real_harness(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    root = tmp_path_factory.mktemp("real-faults")
    return Harness(root / "right", {"real": run.real.reference(root)})


@pytest.mark.parametrize("fault", SMALL, ids=lambda fault: fault.__name__)
def test_a_run_with_faults_ends_as_an_undisturbed_one(harness: Harness, fault: Fault) -> None:
    if why := MISSING.get(fault, str)():
        pytest.skip(why)
    _inject(fault, harness)


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, marks=() if fault in _QUICK_REAL else pytest.mark.slow) for fault in REAL]
)
def test_a_command_with_faults_ends_as_an_undisturbed_one(real_harness: Harness, fault: Fault) -> None:
    _inject(fault, real_harness)


def _inject(fault: Fault, harness: Harness) -> None:
    before = len(harness.outcomes)
    fault(harness)
    assert [outcome for outcome in harness.outcomes[before:] if outcome.wrong] == []
    assert any(outcome.faults for outcome in harness.outcomes[before:])


MUTANTS = [pytest.param(mutant, marks=() if mutant in _QUICK else pytest.mark.slow) for mutant in CAUGHT_BY]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_wrong_code_is_shown(request: pytest.FixtureRequest, tmp_path: Path, mutant: str) -> None:
    right = request.getfixturevalue("real_harness" if CAUGHT_BY[mutant] in REAL else "harness")
    assert caught(mutant, Harness(tmp_path / mutant, right.references, mutant=mutant))
