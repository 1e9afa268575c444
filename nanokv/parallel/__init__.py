"""One model on several processes (ranks), on torch.distributed.

Tensor parallelism as in Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053), and context
parallelism for one long sequence.

    group.py    the group of ranks: join, sum, gather, broadcast, each with a timeout
    shards.py   the part of each weight that a rank holds, and the model that computes with it
    sizes.py    whether a model can be split over a number of ranks
    context.py  spreads the positions of one long sequence over the ranks
    merge.py    merges the results of attention over parts of the keys
    reading.py  loads a rank's part of a checkpoint
    watch.py    checks that all ranks run the same forwards
    launch.py   starts the ranks on this machine; torchrun starts them on several machines

model.py, the caches, the generation loop and the engine are the same as for one process.
"""
