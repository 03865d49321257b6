"""Workers, and the processes in which they solve jobs.

- `worker`: claims jobs from the store, and has each solved in a process.
- `processes`: the worker as a process, standalone or supervised by the service.
- `placements`: where solving processes run: on this machine or on a Ray cluster.
- `child`: the process that solves one request.
- `solving`: solves a request, within that process.
- `messages`: messages between a worker and a solving process.
- `devices`: device types on which this machine can measure.
- `linux_process`: functions of Linux for processes.
"""
