"""The model during a capture: how it is called, and what must not change around it.

Recorded are the attributes that its code reads and writes (`attribute_access`), and the variables
that it reaches (`reached_code`). Guards compare their values at each call (`attribute_guards`).
Planned steps store what a call stores (`stores`). After a capture, Python values (`python_state`),
tensors and generators (`preserved_state`) are as before.
"""
