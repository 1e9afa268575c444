"""One model on several processes (ranks), on torch.distributed: tensor parallel as in Megatron-LM (arXiv 1909.08053).

    group.py    the ranks: join, sum, gather, broadcast, within seconds or with an error
    shards.py   what of each weight a rank holds, and the model that computes with it
    context.py  the positions of one long sequence spread over ranks
    merge.py    attention over parts of the keys, merged
    reading.py  a rank's part of a checkpoint
    watch.py    do all ranks decide the same?
    launch.py   start the ranks on this machine; torchrun starts them on several

The model file, the caches, the loop and the engine are those of one process, and know nothing of this.
"""
