"""Run by a test in a child process: MindFormers says from which file each of N ranks would resume training.

`mindformers_resumes.py FOLDER FORMAT N` prints one line of JSON at the end: the names, by rank.
"""

from __future__ import annotations

import json
import os
import sys

from mindformers.tools.resume_ckpt import get_resume_checkpoint


def main(folder: str, kind: str, ranks: str) -> None:
    names = []
    for rank in range(int(ranks)):
        os.environ["RANK_ID"] = str(rank)
        names.append(get_resume_checkpoint(folder, resume_training=True, resume_by_meta=True, ckpt_format=kind))
    print(json.dumps(names))


if __name__ == "__main__":
    main(*sys.argv[1:])
