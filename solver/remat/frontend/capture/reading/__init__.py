"""The recorded joint graph, read into a `Trace`.

joint_graph        `JointGraph`: forward and backward as one graph of functional operators
captured_joint_graph  the graph with its model; its trace for given symbol values
reader             walks the graph's nodes: graph inputs, constants, operations and outputs
trace_builder      the trace under construction: tensors, storages and views by name
mutations          writes of new values into mutated buffers and inputs
gradients          gradients in the layout that autograd expects, summed for tied weights
constant_folding   values of constant tensors during the capture, to answer `bool(t)`
"""
