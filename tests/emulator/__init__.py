"""Runs the kernels of cufa on the CPU, every load and store checked. See docs/emulator.md.

`build` compiles a kernel with g++, `run` runs it once, `machine` stands in for a card in the
launcher, `coverage` tells which lines of the kernels were executed.
"""
