"""What is true of the gradients of attention on any input."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import cufa
from cufa.testing import assert_gradients_within_rounding, cases


def attend(case, **options):
    """The result of the call with its lse, and the way back."""
    options = {**case.options(np), **options}
    return cufa.attention_vjp(*case.arrays(np), return_lse=True, **options)


@settings(max_examples=3 * settings().max_examples)
@given(case=cases(max_elements=1 << 21), through_lse=st.booleans())
def test_gradients_are_those_of_the_formula(case, through_lse):
    _, vjp = attend(case)
    dout, dlse = case.back(np)
    got = vjp(dout, dlse if through_lse else None)
    assert_gradients_within_rounding(got, case.exact_gradients(through_lse))
