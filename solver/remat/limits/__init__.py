"""Memory limits of a plan."""
