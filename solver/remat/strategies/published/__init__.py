"""Published strategies that only comparisons need; neither `Auto` nor `Exact` imports them."""
