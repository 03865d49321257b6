"""`Reader`: walks a joint graph once, and writes what it finds into a `Draft`."""

from __future__ import annotations

import base64
import math
import operator

import torch
from torch import fx
from torch._functorch._aot_autograd import descriptors as d
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from remat.documents.arguments import Argument, Ref
from remat.documents.records import Node, Output, Placeholder, Result
from remat.errors import TraceError
from remat.frontend.capture.model.flat_model import MODULE_KEY, Flat
from remat.frontend.capture.reading.gradients import own_gradients
from remat.frontend.capture.reading.mutations import (
    BATCH_NORM_BACKWARDS,
    BATCH_NORM_TRAINING,
    pin_batch_norms,
    write_back,
)
from remat.frontend.capture.reading.trace_builder import Draft
from remat.frontend.capture.symbolic_sizes import Sizes
from remat.frontend.common.operators import encode_argument, is_seeded

COPY = "aten.copy.default"
MSE_LOSS = "aten.mse_loss.default"

MAX_CONSTANT_BYTES = 1 << 20
"""A tensor constant in the model's code travels with the trace; larger ones must be buffers."""

_PREFIX = "model."


class Reader:
    """One walk over the graph; `draft` is what came of it."""

    def __init__(self, module: fx.GraphModule, flat: Flat, sizes: Sizes) -> None:
        self.module = module
        self.flat = flat
        self.draft = Draft(sizes=sizes)
        self._arguments: dict[fx.Node, Argument] = {}
        self._tied: dict[int, Placeholder] = {}  # id of a parameter -> its one placeholder
        self._placeholder_of: dict[tuple[str, str], Placeholder] = {}
        returned = module.graph.find_nodes(op="output")[0]
        self._returned: list[tuple[fx.Node | None, object]] = list(
            zip(returned.args[0], returned.meta["desc"], strict=True)  # type: ignore[arg-type]
        )
        self._forward = self._find_forward()

    def read(self) -> None:
        for node in self.module.graph.nodes:
            match node.op:
                case "placeholder":
                    self._read_placeholder(node)
                case "get_attr":
                    self._read_constant(node)
                case "call_function":
                    self._read_call(node)
        for node, desc in self._returned:
            if isinstance(desc, d.InputMutationAOTOutput) and node is not None:
                buffer = self._placeholder_of[_describe(desc.mutated_input)]
                write_back(self.draft, buffer, self._name(node))
        pin_batch_norms(self.draft)
        self._read_outputs()
        own_gradients(
            self.draft,
            [
                (self._placeholder_of[_describe(desc.grad_of)], self._name(node))
                for node, desc in self._returned
                if isinstance(desc, d.GradAOTOutput) and node is not None
            ],
        )

    # -- forward and backward ---------------------------------------------------------------

    def _find_forward(self) -> set[fx.Node]:
        """Ancestors of what the forward returns or writes, and whatever draws random numbers in
        the forward (the generator must advance as in eager mode)."""
        stack = [
            node
            for node, desc in self._returned
            if node is not None and isinstance(desc, (d.PlainAOTOutput, d.InputMutationAOTOutput))
        ]
        stack += [
            node
            for node in self.module.graph.nodes
            if is_seeded(node) and node.meta.get("partitioner_tag") != "is_backward"
        ]
        forward: set[fx.Node] = set()
        while stack:
            node = stack.pop()
            if node not in forward:
                forward.add(node)
                stack.extend(node.all_input_nodes)
        return forward

    # -- placeholders -----------------------------------------------------------------------

    def _read_placeholder(self, node: fx.Node) -> None:
        kind, target = _describe(node.meta["desc"])
        tensor = node.meta["val"]
        if not isinstance(tensor, torch.Tensor):
            raise TraceError(f"the step needs {node.name}, which is no tensor but {tensor!r}")
        real = self.flat.held[target] if kind == "parameter" else None
        if (first := self._tied.get(id(real))) is not None:
            self._arguments[node] = Ref(first.name)
            self._placeholder_of[kind, target] = first
            return
        self._arguments[node] = Ref(node.name)
        self.draft.place(
            Placeholder(
                name=node.name,
                kind=kind,  # type: ignore[arg-type]
                target=target,
                tensor=self.draft.meta(tensor),
                storage=self.draft.storage(tensor),
                requires_grad=self._requires_grad(kind, target),
                aliases=self._aliases(real, target),
            )
        )
        self._placeholder_of[kind, target] = self.draft.placeholders[-1]
        if real is not None:
            self._tied[id(real)] = self.draft.placeholders[-1]

    def _requires_grad(self, kind: str, target: str) -> bool:
        if kind == "input":
            return self.flat.info.inputs_differentiable[int(target)]
        return kind == "parameter" and self.flat.held[target].requires_grad

    def _aliases(self, real: torch.Tensor | None, target: str) -> tuple[str, ...]:
        if real is None:
            return ()
        names = self.flat.held.items()
        return tuple(name for name, p in names if p is real and name != target)

    def _read_constant(self, node: fx.Node) -> None:
        tensor = getattr(self.module, str(node.target))
        size = tensor.untyped_storage().nbytes()
        if size > MAX_CONSTANT_BYTES:
            raise TraceError(
                f"the model's code holds a constant tensor of {size} bytes (shape "
                f"{tuple(tensor.shape)}), made outside of its forward: register it as a buffer"
            )
        with _disable_current_modes():
            tensor = tensor.detach().contiguous()
            data = bytes(tensor.cpu().reshape(-1).view(torch.uint8).tolist())
        name = _clean(node.name)
        self._arguments[node] = Ref(name)
        self.draft.place(
            Placeholder(
                name=name,
                kind="constant",
                target="",
                tensor=self.draft.meta(tensor),
                storage=self.draft.storage(node.meta["val"]),
                data=base64.b64encode(data).decode(),
            )
        )

    # -- operations -------------------------------------------------------------------------

    def _read_call(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            return  # named with the operation that returns the tuple
        target, value = node.target, node.meta.get("val")
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            self._arguments[node] = self.draft.sizes.number(value)
            return
        if not isinstance(target, OpOverload):
            raise TraceError(
                f"the model uses {target}, which is no single operation (a higher-order operator "
                "or a Python function of a custom kernel); run that part outside of the model"
            )
        if not isinstance(value, (torch.Tensor, list, tuple)):
            self._read_number(node, value)
            return
        results = self._read_results(node, value)
        if str(target) == COPY and results[0].storage not in self.draft.owned:
            results = (self._widened(node, results[0]),)
        storages = {r.storage for r in results}
        view = bool(storages) and storages <= self.draft.owned
        if not view and storages & self.draft.owned:
            raise TraceError(
                f"{target} returns both new tensors and views of its inputs, which cannot be "
                "scheduled; clone its inputs or replace it"
            )
        self.draft.owned |= storages
        args = tuple(encode_argument(item, self._reference) for item in node.args)
        kwargs = {key: encode_argument(item, self._reference) for key, item in node.kwargs.items()}
        if str(target) in BATCH_NORM_BACKWARDS and args[BATCH_NORM_TRAINING + 2] is True:
            # In training it does not read the running statistics; do not keep them for it.
            args = (*args[:3], None, None, *args[5:])
        if kwargs.get("generator") is not None:
            raise TraceError(f"{target} uses a generator of its own; use the default generator")
        self.draft.nodes.append(
            Node(
                name=_clean(node.name),
                target=str(target),
                args=args,
                kwargs=kwargs,
                results=results,
                view=view,
                backward=node not in self._forward,
                seeded=is_seeded(node),
                module=node.meta.get("custom", {}).get(MODULE_KEY, ""),
            )
        )
        if str(target) == MSE_LOSS and not results[0].tensor.shape:
            self._trim(node, results[0])

    def _widened(self, node: fx.Node, copied: Result) -> Result:
        """`aten.copy` clones the whole storage that its first operand looks into, and looks into
        the same place of it, which the traced fake tensor does not show."""
        first = node.args[0]
        assert isinstance(first, fx.Node)
        draft, looked = self.draft, first.meta["val"]
        whole = draft.storages[draft.storage(looked)]
        draft.storages[copied.storage] = max(draft.storages[copied.storage], whole)
        offset = draft.sizes(looked.storage_offset())
        meta = copied.tensor.model_copy(update={"offset": offset})
        draft.meta_of[copied.name] = meta
        return copied.model_copy(update={"tensor": meta})

    def _trim(self, node: fx.Node, loss: Result) -> None:
        """The mean squared error leaves its scalar in the storage of all the squared errors, which
        a fake tensor does not show: count it so, and keep a copy of the scalar instead."""
        operands = [n.meta["val"] for n in node.all_input_nodes]
        shapes = (map(self.draft.sizes, t.shape) for t in operands)
        shape = torch.broadcast_shapes(*map(tuple, shapes))
        self.draft.storages[loss.storage] = math.prod(shape) * node.meta["val"].element_size()
        small = self.draft.fresh_result(f"{loss.name}_scalar", loss.tensor, ())
        self._arguments[node] = Ref(small.name)
        self.draft.owned.add(small.storage)
        clone = Node(
            name=small.name,
            target="aten.clone.default",
            args=(Ref(loss.name),),
            results=(small,),
            backward=node not in self._forward,
            module=self.draft.nodes[-1].module,
        )
        self.draft.nodes.append(clone)

    def _read_number(self, node: fx.Node, value: object) -> None:
        if value is None or isinstance(value, (bool, int, float)):
            self._arguments[node] = value
            return
        raise TraceError(
            f"{node.target} gives {value!r}, a number that depends on tensor values; compute it "
            "outside of the model and pass it as a Python value"
        )

    def _read_results(self, node: fx.Node, value: object) -> tuple[Result, ...]:
        name = _clean(node.name)
        if isinstance(value, torch.Tensor):
            self._arguments[node] = Ref(name)
            return (self.draft.result(name, value),)
        assert isinstance(value, (list, tuple))
        names: dict[int, str] = {}
        for user in node.users:
            position = user.args[1] if user.target is operator.getitem else None
            if not isinstance(position, int):
                raise TraceError(f"{node.target} returns a list that is used as a whole")
            item = value[position]
            first = names.setdefault(position, _clean(user.name))
            is_tensor = isinstance(item, torch.Tensor)
            self._arguments[user] = Ref(first) if is_tensor else self.draft.sizes.number(item)
        return tuple(
            self.draft.result(names.get(i, f"{name}_{i}_"), item, i)
            for i, item in enumerate(value)
            if isinstance(item, torch.Tensor)
        )

    def _reference(self, value: object) -> Argument:
        if isinstance(value, fx.Node):
            return self._arguments[value]
        raise TraceError(
            f"an operation of the graph has an argument of type {type(value).__name__}, which "
            "cannot be written as data"
        )

    # -- what the step returns --------------------------------------------------------------

    def _name(self, node: fx.Node) -> str:
        argument = self._arguments[node]
        assert isinstance(argument, Ref)
        return argument.name

    def _read_outputs(self) -> None:
        tangents = {p.target: p.name for p in self.draft.placeholders if p.kind == "tangent"}
        info = self.flat.info
        for node, desc in self._returned:
            if isinstance(desc, d.PlainAOTOutput):
                assert node is not None
                index = len(self.draft.outputs)
                assert desc.idx == index
                self.draft.outputs.append(
                    Output(
                        name=self._name(node),
                        differentiable=info.differentiable[index],
                        tangent=tangents.get(str(index), "") if info.differentiated[index] else "",
                    )
                )


def _describe(desc: object) -> tuple[str, str]:
    match desc:
        case d.ParamAOTInput():
            return "parameter", desc.target.removeprefix(_PREFIX)
        case d.BufferAOTInput():
            return "buffer", desc.target.removeprefix(_PREFIX)
        case d.PlainAOTInput():
            return "input", str(desc.idx)
        case d.TangentAOTInput() if isinstance(desc.output, d.PlainAOTOutput):
            return "tangent", str(desc.output.idx)
    raise TraceError(
        f"the step has an input of kind {type(desc).__name__}, which is not supported (tensor "
        "subclasses and effect tokens are not)"
    )


def _clean(name: str) -> str:
    return f"n{name}" if name.startswith("__") else name
