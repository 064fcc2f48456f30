"""Test the fault injection script, which interrupts training runs, with a tiny model."""

from pathlib import Path

import fault_injection

from ..helpers.fresh import run_script


def test_a_killed_training_and_damaged_checkpoints_change_nothing(tmp_path: Path) -> None:
    result = run_script("fault_injection", tmp_path, "--subset", "classification", "--kills", "1", "--steps", "16")
    assert result.returncode == 0, result.stdout + result.stderr
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in result.stdout.splitlines()[2:]]
    assert [row[1] for row in rows] == ["kill", "disk full", "byte flipped", "half zeroed"]
    for _, fault, times, _, resumed, equal, lost in rows:
        assert (equal, lost) == ("yes", "none"), fault
        assert int(resumed) == int(times) > 0


def test_differing_or_lost_results_are_not_good() -> None:
    assert fault_injection.Row("a", "kill", equal=True).is_good
    assert not fault_injection.Row("a", "kill", equal=False).is_good
    assert not fault_injection.Row("a", "kill", equal=True, lost=1).is_good
    assert "| NO | 1 |" in str(fault_injection.Row("a", "kill", lost=1))
