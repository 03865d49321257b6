"""The recorded joint graph, read into a `Trace`.

captured_joint_graph  the graph with its model; its trace for given symbol values
reader             `JointGraph`: forward and backward as one graph; reads all of it
trace_builder      fx nodes as the records of a trace; its tensors, storages and views by name
mutations          writes of new values into mutated buffers and inputs
gradients          gradients in the layout that autograd expects, summed for tied weights
constant_folding   values of constant tensors during the capture, to answer `bool(t)`
"""
