"""One rank of torch.distributed.pipelining over gloo: the peer of the comparison, with the same model and batches.

``python -m edgesplit.bench.gloo RANK FILE METHOD MICROS`` reads a number of steps a line on stdin, takes them, and
answers with a line of JSON: when each of them ended, and (on the last rank) their losses. It ends with its stdin.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from edgesplit.bench.tasks import LR, MOMENTUM, SMALL_CNN, SMALL_CNN_CUT, SMALL_CNN_IMAGE, Batches

RANKS = 2
SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


class Rank:
    """One stage of the pipeline and its optimizer."""

    def __init__(self, rank: int, method: str, micros: int) -> None:
        torch.manual_seed(0)
        layers = list(SMALL_CNN.model().children())
        mine = nn.Sequential(*(layers[:SMALL_CNN_CUT] if rank == 0 else layers[SMALL_CNN_CUT:]))
        stage = PipelineStage(mine, rank, RANKS, torch.device("cpu"))
        self.rank = rank
        self.schedule: Any = SCHEDULES[method](stage, n_microbatches=micros, loss_fn=SMALL_CNN.loss)
        self.optimizer = torch.optim.SGD(mine.parameters(), lr=LR, momentum=MOMENTUM)
        self.batches = Batches(SMALL_CNN_IMAGE, 0)
        self.taken = 0

    def step(self) -> float | None:
        """Take one step; the last rank returns its loss."""
        x, target = self.batches.of_step(self.taken)
        self.taken += 1
        self.optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if self.rank == 0:
            self.schedule.step(x)
        else:
            self.schedule.step(target=target, losses=losses)
        self.optimizer.step()
        return float(sum(losses)) / len(losses) if losses else None

    def steps(self, count: int) -> dict[str, Any]:
        """Take some steps; return when each ended, in seconds since the epoch, and their losses."""
        ends, losses = [], []
        for _ in range(count):
            losses.append(self.step())
            ends.append(time.time())
        return {"ends": ends, "losses": losses}


def _asked() -> queue.SimpleQueue[int]:
    """Numbers of steps from stdin. At its end the process ends, whatever it is waiting for."""
    asked: queue.SimpleQueue[int] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            asked.put(int(line))
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return asked


def main(rank: int, store: str, method: str, micros: int) -> None:
    """Run a rank until stdin ends."""
    asked = _asked()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mine = Rank(rank, method, micros)
    while True:
        sys.stdout.write(json.dumps(mine.steps(asked.get())) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
