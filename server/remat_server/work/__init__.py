"""What solves: workers, the processes that they start, and where these run."""
