"""The command line that the client scripts share: jobs in, a report out.

A job is one model to run. A report is a JSON object with one entry for each job; it goes to a file, since the
frameworks write their own log lines to the standard output.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Job = dict[str, Any]


def run(run_job: Callable[[Job], Job], parser: argparse.ArgumentParser) -> int:
    """Add the common options to `parser`, read the job or the jobs, run them and write the report."""
    parser.add_argument("ids", nargs="?", help="JSON file: a list of equally long lists of token ids (B, T)")
    parser.add_argument("out", nargs="?", help="npz file to write: logits (B, T, vocabulary), generated (B, N)")
    parser.add_argument("--generate", type=int, default=0, metavar="N", help="continue greedily by N tokens")
    parser.add_argument("--jobs", type=Path, metavar="FILE", help="JSON file: a list of jobs, keyed as the options")
    parser.add_argument("--report", type=Path, metavar="FILE", help="where to write the report, else stdout")
    args = parser.parse_args()
    if args.jobs is None and args.out is None:
        parser.error("give one job as positional arguments, or many with --jobs")
    jobs = json.loads(args.jobs.read_text()) if args.jobs else [{"name": "job", **vars(args)}]
    report = json.dumps({job["name"]: run_job(job) for job in jobs}, indent=1)
    if args.report:
        args.report.write_text(report)
    else:
        print(report)
    return 0
