"""Inductor: what it will run for a graph, and how it is made to run what was planned.

- `probe`: the kernels that Inductor would generate for a graph
- `peak_check`: the peak of Inductor's kernels and buffers, checked against the budget
- `buffer_reuse`: which kernels write their output over an input
- `matmul_additions`: additions of matrix products that Inductor computes with `addmm`
- `extern_workspace`: measured workspace of extern kernels
- `fusion_control`: limits fusion to the kernels of the schedule
- `cpp_batching`: compiles several C++ kernels in one file
- `patches`: patches applied to torch during compilation
"""
