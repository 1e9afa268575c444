"""Several ranks as threads of one process: the arithmetic of a group without its network, in milliseconds.

Ranks of their own processes, over gloo, are in test_context_processes.py.
"""

import threading

import torch

from nanokv.errors import ParallelError


class Threads:
    """One rank: `gather` as nanokv.parallel.group.Group has it. Counts the bytes that it receives."""

    def __init__(self, rank, size, barrier, board):
        self.rank, self.size, self.barrier, self.board = rank, size, barrier, board
        self.received = self.messages = 0

    def gather(self, x):
        self.board[self.rank] = x.clone()
        self.wait()
        out = torch.stack(self.board)
        self.wait()  # nobody writes the next before all have read this
        self.received, self.messages = self.received + (self.size - 1) * x.nbytes, self.messages + 1
        return out

    def wait(self):
        try:
            self.barrier.wait(20)
        except threading.BrokenBarrierError as error:
            raise ParallelError("a rank has ended") from error


def on_ranks(size: int, work) -> list:
    """work(group) on so many ranks → what each returned, by rank; the exception of the first one that failed."""
    barrier, board = threading.Barrier(size), [None] * size
    results, failed = [None] * size, []

    def run(rank):
        try:
            results[rank] = work(Threads(rank, size, barrier, board))
        except BaseException as error:
            failed.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if failed:
        raise failed[0]
    return results
