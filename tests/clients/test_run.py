"""A client script runs in a working folder of its own; when it fails, what it printed is shown."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from clients.run import ClientError, relative_difference, run_client, run_jobs

SCRIPT = """
import json, os, sys, time
print("began")
sys.stdout.flush()
option, report = sys.argv[-2:]
assert option == "--report"
if "fail" in sys.argv:
    sys.exit("broken")
if "sleep" in sys.argv:
    time.sleep(60)
json.dump({"folder": os.getcwd(), "args": sys.argv[1:-2]}, open(report, "w"))
"""
JOBS_SCRIPT = """
import json, sys
import numpy as np
jobs = json.load(open(sys.argv[2]))
for job in jobs:
    ids = np.array(json.load(open(job["ids"])))
    np.savez(job["out"], logits=ids * job["factor"])
json.dump({job["name"]: {"place": job["place"]} for job in jobs}, open(sys.argv[4], "w"))
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    file = tmp_path / "client.py"
    file.write_text(SCRIPT)
    return str(file)


def test_a_report_comes_back_and_the_working_folder_is_gone(script: str) -> None:
    report = run_client(script, "some", "words", timeout=30)
    assert report["args"] == ["some", "words"]
    assert Path(report["folder"]) != Path.cwd()
    assert not Path(report["folder"]).exists()


def test_a_client_that_fails_shows_what_it_printed(script: str) -> None:
    with pytest.raises(ClientError, match=r"client\.py ended with 1:\nbegan\nbroken"):
        run_client(script, "fail", timeout=30)


def test_a_client_that_takes_too_long_is_ended_and_shows_what_it_printed(script: str) -> None:
    with pytest.raises(ClientError, match=r"longer than 1 s:\nbegan"):
        run_client(script, "sleep", timeout=1)


def test_each_job_gets_its_own_ids_and_results(tmp_path: Path) -> None:
    file = tmp_path / "client.py"
    file.write_text(JOBS_SCRIPT)
    jobs = [
        {"name": "one", "ids": [[1, 2]], "factor": 10, "place": tmp_path},
        {"name": "other/name", "ids": [[3]], "factor": 2, "place": "x"},
    ]
    results = run_jobs(str(file), jobs, timeout=30)
    assert json.dumps({name: result.logits.tolist() for name, result in results.items()}) == (
        '{"one": [[10, 20]], "other/name": [[6]]}'
    )
    assert results["one"].report == {"place": str(tmp_path)}
    assert results["one"].generated is None


def test_a_difference_is_relative_to_the_largest_and_infinite_where_a_value_is_nan() -> None:
    expected = np.array([1.0, -4.0])
    assert relative_difference(np.array([1.0, -4.0]), expected) == 0
    assert relative_difference(np.array([2.0, -4.0]), expected) == 0.25
    assert relative_difference(np.array([np.nan, -4.0]), expected) == float("inf")
