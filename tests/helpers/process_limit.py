"""The time limit for processes that tests start, and for what tests wait for."""

PROCESS_LIMIT_S = 240.0
"""Far more than they take on a machine that runs other jobs, too, as no test is about their speed;
less than the limit of a test (`timeout` in pyproject.toml), so that the failure says what hangs."""
