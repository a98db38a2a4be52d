"""Let MindSpore's own tools read, merge and use strategy files, without running a network.

    python mindspore_strategies.py --jobs JOBS.json [--report FILE]

A job does one of:

    {"parse": FILE}                                        each tensor's layout, as MindSpore's transforms take it
    {"merge": FOLDER, "to": FILE}                          `merge_pipeline_strategys`
    {"ranks": N, "src": FILE, "dst": FILE or null}         `rank_list_for_transform` for each of N ranks
    {"transform": FOLDER, "to": FOLDER, "src": FILE, "dst": FILE or null}      `transform_checkpoints` of .ckpt files,
                                                           with `"format": "safetensors"` of those

An exception of MindSpore is its answer: `{"error": TEXT}`.
"""

from __future__ import annotations

import argparse
import os
import sys

os.environ.setdefault("GLOG_v", "3")  # configured at import

from command import Job, run
from mindspore.parallel import (
    build_searched_strategy,
    merge_pipeline_strategys,
    rank_list_for_transform,
    transform_checkpoints,
)
from mindspore.parallel._parallel_serialization import _convert_to_list


def run_job(job: Job) -> Job:
    """Run one job and return its part of the report."""
    try:
        if "parse" in job:
            return {"layouts": _convert_to_list(build_searched_strategy(job["parse"]))}
        if "merge" in job:
            merge_pipeline_strategys(job["merge"], job["to"])
        elif "ranks" in job:
            needed = [rank_list_for_transform(rank, job["src"], job["dst"]) for rank in range(job["ranks"])]
            return {"ranks": [[int(rank) for rank in ranks] for ranks in needed]}
        else:
            kind = job.get("format", "ckpt")
            transform_checkpoints(job["transform"], job["to"], "net", job["src"], job["dst"], output_format=kind)
    except (ValueError, TypeError) as error:
        return {"error": str(error)}
    return {}


if __name__ == "__main__":
    sys.exit(run(run_job, argparse.ArgumentParser(description=__doc__)))
