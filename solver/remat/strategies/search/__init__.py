"""The search behind `Auto` and `Exact`: a pipeline of steps that share incumbents and a bound."""
