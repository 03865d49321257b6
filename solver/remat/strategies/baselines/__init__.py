"""What others published, one file each, and what these files share (`checkpointed`, `chain`,
`module_blocks`).
"""
