"""``distinct`` is ``numpy.unique``."""

from __future__ import annotations

import numpy as np
import pytest

from perfscope.trace.distinct import distinct


@pytest.mark.parametrize("values", [[], [3], [2, 2, 2], [5, -1, 5, 3, -1], [[4, 1], [1, 0]], [True, False, True]])
@pytest.mark.parametrize("kind", [np.int8, np.int32, np.int64, np.bool_])
def test_it_is_what_numpy_finds(values: list[int], kind: type[np.generic]) -> None:
    array = np.array(values, dtype=kind)
    found = distinct(array)
    assert found.dtype == array.dtype
    assert found.tolist() == np.unique(array).tolist()
