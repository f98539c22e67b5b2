"""Folding of output: equal lines of several ranks appear once, and the others in order."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from paceline import errors
from paceline.tools.notebook.execution import Wait, wait_in
from paceline.tools.notebook.output import PATIENCE_S, Folding


def folded(*printed: str, ended: bool = True) -> str:
    """Return the output for ranks that print these words simultaneously."""
    folding = Folding(list(range(len(printed))))
    for rank, words in enumerate(printed):
        for word in words.split():
            folding.add(rank, word, 0.0)
        if ended:
            folding.end(rank)
    return " ".join(f"{word}:{''.join(map(str, ranks))}" for word, ranks in folding.ready(0.0))


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        (("a b", "a b"), "a:01 b:01"),
        (("x0 same", "x1 same"), "x0:0 x1:1 same:01"),
        (("extra a b", "a b"), "extra:0 a:01 b:01"),
        (("a b", "extra a b"), "extra:1 a:01 b:01"),
        (("a b", "b a"), "a:0 b:01 a:1"),
        (("a", ""), "a:0"),
        (("", "a"), "a:1"),
        (("a c", "a c", "b c"), "a:01 b:2 c:012"),
        (("a a a", "a"), "a:01 a:0 a:0"),
    ],
)
def test_equal_lines_are_shown_once(printed: tuple[str, ...], expected: str) -> None:
    assert folded(*printed) == expected


def test_line_waits_briefly_for_the_other_ranks() -> None:
    folding = Folding([0, 1])
    folding.add(0, "a", 10.0)
    assert list(folding.ready(10.1)) == []
    assert list(folding.ready(10.0 + PATIENCE_S)) == [("a", [0])]
    folding.add(0, "b", 20.0)
    folding.end(1)  # no more output can follow
    assert list(folding.ready(20.0)) == [("b", [0])]


STDLIB, OURS = sysconfig.get_path("stdlib"), Path(errors.__file__).parent
ALL_REDUCE = f"""Thread 0x1 (most recent call first):
  File "/x/threading.py", line 1 in run

Current thread 0x2 (most recent call first):
  File "{STDLIB}/selectors.py", line 9 in select
  File "{OURS}/comm/doorbells.py", line 75 in sleep
  File "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "/v/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "<ipython-input-4-abc>", line 6 in __init__
  File "<ipython-input-7-def>", line 1 in <module>
  File "/v/lib/python3.11/site-packages/IPython/core/interactiveshell.py", line 3699 in run_code
"""
BACKWARD = """Current thread 0x2 (most recent call first):
  File "/v/lib/python3.11/site-packages/torch/autograd/graph.py", line 979 in _engine_run_backward
  File "/v/lib/python3.11/site-packages/torch/_tensor.py", line 623 in backward
  File "<ipython-input-7-def>", line 3 in <module>
"""
FINISHES = BACKWARD.replace(  # inside the wrapper, outside any Python collective
    "first):\n", f'first):\n  File "{OURS}/ddp/finisher.py", line 154 in wait\n'
)
SLEEP = """Current thread 0x2 (most recent call first):
  File "<ipython-input-7-def>", line 3 in <module>
  File "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
"""


def test_stack_shows_the_call_and_cell_in_which_a_rank_waits() -> None:
    assert wait_in(ALL_REDUCE) == Wait("all_reduce", "In[4], line 6")
    assert str(wait_in(ALL_REDUCE)) == "all_reduce() (In[4], line 6)"
    assert wait_in(BACKWARD) == Wait("backward", "In[7], line 3", is_sure=False)  # it could also be computing
    assert wait_in(FINISHES) == Wait("backward", "In[7], line 3", is_sure=False)
    assert wait_in(SLEEP) is None
    assert wait_in("") is None
