"""What is written and read: JSON documents that are checked, all of them data.

`base` is what every document has; `trace`, `program`, `plan` and `sweep` are the documents, and
`records`, `arguments` and `structure` what traces and programs are made of.
"""
