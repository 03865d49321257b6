"""Explanations of out-of-memory errors, without torch.

- `unpickle`: reads the pickle of a memory snapshot as plain data, within limits.
- `model`: a snapshot as data: allocations with their lifetimes, segments, failed requests.
- `read`: reads the formats of torch's snapshots.
- `moment`: the memory at one moment: live bytes, segments, free blocks.
- `steps`: the steps of a recording, and what each allocation is for.
- `findings`: `Finding`, and the kinds of findings.
- `growth`, `step_findings`, `allocator_findings`: look for findings.
- `error_text`: reads the text of `torch.OutOfMemoryError`.
- `explain`: `Explanation`, the answer of `remat.why`.
"""
