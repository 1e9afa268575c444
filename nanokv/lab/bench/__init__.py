"""How fast is it here, and how far from the limit: this model, its caches and formats, beside other runtimes.

    machine    what this machine can do: bytes per second, FLOPs per second, and whether others use it too
    runners    one object for everything that can be measured: prefill, then decode step by step
    remote     a runner whose work is done by a process of its own, which may fail; peer: what that process runs
    command    `nanokv generate` itself as one of the runners
    rotation   all runners in turn, round after round; medians and spread
    profile    where the time of one prefill and of one decode step goes, beside its floor
    gguf       the same weights as a file for llama.cpp
    plot       the picture

A decode step must read every weight and the whole cache once, so bytes / bandwidth is the least time it can take.
Figures of one run on one machine compare; absolute ones age.
"""
