"""Will a training loop fit a device, and what makes it fit? On a trace, without torch.

- `question`: the step in eager mode, the optimizer, and the memory that is usable.
- `settings`, `plans`, `checkpoints`, `smaller_batches`, `shards`: one kind of option each.
- `routing`: what to know about mixtures of experts.
- `answer`: searches all of them.
- `data_sheet`: the answer for a trace and a GPU with a data sheet.
- `lengths`: the longest sequences that fit.
"""
