"""``paceline plan``: the speed, cost and reliability of a training on N devices."""
