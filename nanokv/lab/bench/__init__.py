"""Speed on this machine: our models, caches and weight formats, beside other runtimes and the
limit set by memory bandwidth.

    machine    the machine's limits: bytes per second, FLOPs per second, and load by other programs
    runners    one interface for everything that is measured: prefill, then decode step by step
    remote     a runner in a separate process, which may fail; peer is the program in that process
    command    `nanokv generate` itself as a runner
    rotation   all runners in turn, round after round; medians and spread
    profile    where the time of a prefill and of a decode step goes, part by part
    gguf       the same weights as a file for llama.cpp
    plot       the diagram

A decode step must read every weight and the whole cache once, so a step takes at least
bytes / bandwidth. Compare only figures from the same run: absolute speeds depend on the machine
and on the versions installed.
"""
