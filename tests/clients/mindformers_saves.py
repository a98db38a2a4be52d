"""Run by a test in a child process: MindFormers' CheckpointMonitor saves a tiny net as each of two ranks.

`mindformers_saves.py FOLDER FORMAT STEP...` saves each step, in two runs: the second one finds the files of the first
and saves the first STEP only.
"""

from __future__ import annotations

import os
import sys

from mindformers.core.callback import CheckpointMonitor
from mindspore import nn
from mindspore.train.callback._callback import InternalCallbackParam


def save(folder: str, kind: str, steps: list[int]) -> None:
    """Save as the callback does at the end of each of `steps`, of 100 in an epoch."""
    net = nn.Dense(2, 3)
    optimizer = nn.AdamWeightDecay(net.trainable_params(), 0.1)
    cell = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer)
    monitor = CheckpointMonitor(
        directory=folder, checkpoint_format=kind, integrated_save=False, save_network_params=True
    )  # fmt: skip
    for step in steps:
        now = InternalCallbackParam()
        now.update(cur_step_num=step, cur_epoch_num=1, batch_num=100, net_outputs=None)
        now.update(train_network=cell, network=cell, optimizer=optimizer)
        monitor._save_ckpt(now, True)


def main(folder: str, kind: str, *steps: str) -> None:
    numbers = [int(step) for step in steps]
    for run in (numbers, numbers[:1]):
        for rank in range(2):
            os.environ["RANK_ID"] = str(rank)
            save(folder, kind, run)


if __name__ == "__main__":
    main(*sys.argv[1:])
