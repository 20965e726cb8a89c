"""What `connect` and layers with divided heads refuse before any rank is asked."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from cufa import distributed
from cufa.errors import ArgumentError, DTypeError, UnsupportedError

HERE = {"address": "127.0.0.1:1", "rank": 0, "size": 1}


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        ({"timeout": 0}, ArgumentError, "timeout is 0.0; it must be above 0 seconds"),
        ({"timeout": "1"}, DTypeError, "timeout is '1'"),
        ({"xp": "numpy"}, DTypeError, "xp is 'numpy'; it must be a module"),
        ({"rank": 1}, ArgumentError, "rank is 1 and address is None; MPI says it"),
        ({"size": 1}, ArgumentError, "size is 1 and address is None"),
        (HERE, ArgumentError, "xp is numpy, whose arrays travel by MPI"),
    ],
)
def test_arguments_that_do_not_fit_together_are_named(arguments, kind, said):
    with pytest.raises(kind, match=said):
        distributed.connect(**arguments)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rank": 1}, "rank is 1 and size is 1; it must be below size"),
        ({"rank": -1}, "rank is -1; it must be at least 0"),
        ({"size": 0}, "size is 0; it must be at least 1"),
        ({"comm": "a group"}, "comm is given; leave one of them out"),
        ({"address": "here"}, "address is 'here'; it must be 'host:port'"),
    ],
)
def test_an_address_comes_with_rank_and_size(change, said):
    with pytest.raises(ArgumentError, match=said):
        distributed.connect(xp=ModuleType("cupy"), **{**HERE, **change})


def test_without_mpi4py_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(UnsupportedError, match=r"install cufa\[distributed\]"):
        distributed.connect()


def test_ranks_must_divide_the_heads_of_a_layer():
    comm = SimpleNamespace(rank=0, size=3)
    with pytest.raises(ArgumentError, match="heads is 12 and kv_heads is 4; 3 ranks must divide"):
        distributed.TensorParallelAttention(comm, 24, 12, kv_heads=4)
