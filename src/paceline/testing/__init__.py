"""Tools for testing distributed training on real ranks.

With pytest, ``@pytest.mark.ranks(2)`` runs a test's body on ranks. The assertions work in any process that has a
process group, and with any wrapper, including torch's.
"""

from paceline.testing.assertions import assert_data_is_split, assert_equals_one_process, assert_replicas_equal
from paceline.testing.pool import Pools, RankFailed

__all__ = ["Pools", "RankFailed", "assert_data_is_split", "assert_equals_one_process", "assert_replicas_equal"]
