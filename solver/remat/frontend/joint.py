"""Read a joint graph (fx, with AOTAutograd's descriptors) into a `Trace`.

The passes, in order: label forward and backward; name and number storages, so that views are told
from operations; write mutated buffers at the end of the forward; give every gradient a storage of
its own, laid out as autograd wants it.
"""

from __future__ import annotations

import base64
import operator
from collections.abc import Sequence

import torch
from torch import fx
from torch._functorch._aot_autograd import descriptors as d
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from remat.arguments import Argument, Literal, Ref, refs, rename
from remat.errors import TraceError
from remat.frontend.flat import MODULE_KEY, Flat
from remat.frontend.operators import encode_argument
from remat.structure import Structure
from remat.trace import (
    COPY,
    Environment,
    Gradient,
    Node,
    Output,
    Placeholder,
    Result,
    TensorMeta,
    Trace,
)

MAX_CONSTANT_BYTES = 1 << 20
"""A tensor constant in the model's code travels with the trace; larger ones must be buffers."""

BATCH_NORM = "aten._native_batch_norm_legit_functional.default"
BATCH_NORM_TRAINING = 5
"""Position of `training` among the arguments of `BATCH_NORM`; two later in its backward."""

BATCH_NORM_BACKWARD = "aten.native_batch_norm_backward.default"

_PREFIX = "model."


def read_joint(
    module: fx.GraphModule, flat: Flat, inputs: Structure, environment: Environment
) -> Trace:
    """The Trace of a joint graph that `aot_export_joint_with_descriptors` made of `flat`."""
    module.graph.eliminate_dead_code()
    reader = _Reader(module, flat)
    reader.read()
    result = flat.info.structure
    assert result is not None
    return Trace(
        model=f"{type(flat.model).__module__}.{type(flat.model).__qualname__}",
        device=reader.device(),
        placeholders=tuple(reader.placeholders),
        nodes=tuple(reader.nodes),
        outputs=tuple(reader.outputs),
        gradients=tuple(reader.gradients),
        storages=tuple(reader.storages),
        inputs=inputs,
        result=result,
        environment=environment,
    )


class _Reader:
    def __init__(self, module: fx.GraphModule, flat: Flat) -> None:
        self.module = module
        self.flat = flat
        self.placeholders: list[Placeholder] = []
        self.nodes: list[Node] = []
        self.outputs: list[Output] = []
        self.gradients: list[Gradient] = []
        self.storages: list[int] = []
        self._storage_ids: dict[int, int] = {}
        self._arguments: dict[fx.Node, Argument] = {}
        self._metas: dict[str, TensorMeta] = {}
        self._storage: dict[str, int] = {}
        self._owned: set[int] = set()
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
        self._read_mutations()
        self._read_outputs()
        self._read_gradients()
        self._pin_batch_norms()

    def device(self) -> str:
        """The device of most of the memory."""
        totals: dict[str, int] = {}
        for meta in self._metas.values():
            totals[meta.device] = totals.get(meta.device, 0) + 1
        return max(totals, key=lambda name: (name != "cpu", totals[name]))

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
            if _is_seeded(node) and node.meta.get("partitioner_tag") != "is_backward"
        ]
        forward: set[fx.Node] = set()
        while stack:
            node = stack.pop()
            if node not in forward:
                forward.add(node)
                stack.extend(node.all_input_nodes)
        return forward

    # -- tensors ----------------------------------------------------------------------------

    def _storage_of(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._storage_ids:
            self._storage_ids[key] = len(self.storages)
            self.storages.append(int(storage.nbytes()))
        return self._storage_ids[key]

    def _result(self, name: str, tensor: torch.Tensor, position: int = -1) -> Result:
        meta = tensor_meta(tensor)
        result = Result(
            name=name, tensor=meta, storage=self._storage_of(tensor), position=position
        )
        self._metas[name] = meta
        self._storage[name] = result.storage
        return result

    def _fresh_result(self, name: str, like: TensorMeta, stride: tuple[int, ...]) -> Result:
        """A result that no traced node has: contiguous storage of its own."""
        elements = 1 + sum((n - 1) * s for n, s in zip(like.shape, stride, strict=True))
        if 0 in like.shape:
            elements = 0
        dtype = getattr(torch, like.dtype)
        self.storages.append(elements * dtype.itemsize)
        meta = like.model_copy(update={"stride": stride, "offset": 0})
        result = Result(name=name, tensor=meta, storage=len(self.storages) - 1)
        self._metas[name] = meta
        self._storage[name] = result.storage
        return result

    # -- placeholders -----------------------------------------------------------------------

    def _read_placeholder(self, node: fx.Node) -> None:
        kind, target = _describe(node.meta["desc"])
        tensor = node.meta["val"]
        if not isinstance(tensor, torch.Tensor):
            raise TraceError(f"the step needs {node.name}, which is no tensor but {tensor!r}")
        self._arguments[node] = Ref(node.name)
        real = self._real(kind, target)
        self._place(
            Placeholder(
                name=node.name,
                kind=kind,  # type: ignore[arg-type]
                target=target,
                tensor=tensor_meta(tensor),
                storage=self._storage_of(tensor),
                requires_grad=bool(real is not None and real.requires_grad),
                aliases=self._aliases(real, target),
            )
        )

    def _place(self, placeholder: Placeholder) -> None:
        self.placeholders.append(placeholder)
        self._metas[placeholder.name] = placeholder.tensor
        self._storage[placeholder.name] = placeholder.storage
        self._owned.add(placeholder.storage)

    def _real(self, kind: str, target: str) -> torch.Tensor | None:
        if kind == "parameter":
            return self.flat.model.get_parameter(target)
        return None

    def _aliases(self, real: torch.Tensor | None, target: str) -> tuple[str, ...]:
        if real is None:
            return ()
        names = self.flat.model.named_parameters(remove_duplicate=False)
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
        self._place(
            Placeholder(
                name=name,
                kind="constant",
                target="",
                tensor=tensor_meta(tensor),
                storage=self._storage_of(node.meta["val"]),
                data=base64.b64encode(data).decode(),
            )
        )

    # -- operations -------------------------------------------------------------------------

    def _read_call(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            return  # named with the operation that returns the tuple
        target = node.target
        if not isinstance(target, OpOverload):
            raise TraceError(
                f"the model uses {target}, which is no single operation (a higher-order operator "
                "or a Python function of a custom kernel); run that part outside of the model"
            )
        value = node.meta.get("val")
        if not isinstance(value, (torch.Tensor, list, tuple)):
            self._read_number(node, value)
            return
        results = self._read_results(node, value)
        storages = {r.storage for r in results}
        view = bool(storages) and storages <= self._owned
        if not view and storages & self._owned:
            raise TraceError(
                f"{target} returns both new tensors and views of its inputs, which cannot be "
                "scheduled; clone its inputs or replace it"
            )
        self._owned |= storages
        args = tuple(encode_argument(item, self._reference) for item in node.args)
        kwargs = {
            key: encode_argument(item, self._reference) for key, item in node.kwargs.items()
        }
        if str(target) == BATCH_NORM_BACKWARD and args[BATCH_NORM_TRAINING + 2] is True:
            # In training it does not read the running statistics; do not keep them for it.
            args = (*args[:3], None, None, *args[5:])
        if kwargs.get("generator") is not None:
            raise TraceError(f"{target} uses a generator of its own; use the default generator")
        self.nodes.append(
            Node(
                name=_clean(node.name),
                target=str(target),
                args=args,
                kwargs=kwargs,
                results=results,
                view=view,
                backward=node not in self._forward,
                seeded=_is_seeded(node),
                module=node.meta.get("custom", {}).get(MODULE_KEY, ""),
            )
        )

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
            return (self._result(name, value),)
        assert isinstance(value, (list, tuple))
        names: dict[int, str] = {}
        for user in node.users:
            position = user.args[1] if user.target is operator.getitem else None
            if not isinstance(position, int):
                raise TraceError(f"{node.target} returns a list that is used as a whole")
            item = value[position]
            first = names.setdefault(position, _clean(user.name))
            self._arguments[user] = Ref(first) if isinstance(item, torch.Tensor) else item
        return tuple(
            self._result(names.get(i, f"{name}_{i}_"), item, i)
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

    def _read_mutations(self) -> None:
        """Write each new value into its buffer once its last forward reader has run. Whoever reads
        the old value must not run again, and the backward reads a copy of it."""
        for node, desc in self._returned:
            if not isinstance(desc, d.InputMutationAOTOutput) or node is None:
                continue
            kind, target = _describe(desc.mutated_input)
            buffer = next(p for p in self.placeholders if (p.kind, p.target) == (kind, target))
            if buffer.requires_grad:
                raise TraceError(
                    f"the model writes in place into {kind} {target}, which requires a gradient; "
                    "write into a clone"
                )
            self._protect_readers(buffer)
            at = 1 + max(
                (
                    i
                    for i, n in enumerate(self.nodes)
                    if not n.backward
                    and (
                        self._reads(n, buffer.storage)
                        or any(r.name == self._name(node) for r in n.results)
                    )
                ),
                default=-1,
            )
            self.nodes.insert(
                at,
                Node(
                    name=f"write_{buffer.name}",
                    target=COPY,
                    args=(Ref(buffer.name), Ref(self._name(node))),
                    recomputable=False,
                ),
            )

    def _reads(self, node: Node, storage: int) -> bool:
        return any(self._storage[name] == storage for name in refs((node.args, *node.kwargs.values())))

    def _protect_readers(self, buffer: Placeholder) -> None:
        copy: Result | None = None
        for i, node in enumerate(self.nodes):
            if not self._reads(node, buffer.storage) or _is_training_batch_norm(node):
                continue
            if node.view and any(r.storage == buffer.storage for r in node.results):
                if any(n.backward and self._reads(n, buffer.storage) for n in self.nodes[i:]):
                    raise TraceError(
                        f"the backward reads a view of {buffer.kind} {buffer.target}, which the "
                        "forward overwrites; use a clone of it in the forward"
                    )
                continue
            if not node.backward:
                self.nodes[i] = node.model_copy(update={"recomputable": False})
                continue
            copy = copy or self._fresh_result(
                f"old_{buffer.name}", buffer.tensor, buffer.tensor.stride
            )
            renamed = {buffer.name: copy.name}
            self.nodes[i] = _renamed(node, renamed)
        if copy is not None:
            self.nodes.insert(
                0,
                Node(
                    name=copy.name,
                    target="aten.clone.default",
                    args=(Ref(buffer.name),),
                    results=(copy,),
                    recomputable=False,
                ),
            )

    def _pin_batch_norms(self) -> None:
        """A batch norm that runs again makes no new running statistics. Where somebody other than
        the write into the buffers reads those, it must run once."""
        readers: dict[str, list[Node]] = {}
        for node in self.nodes:
            for name in refs((node.args, *node.kwargs.values())):
                readers.setdefault(name, []).append(node)
        for i, node in enumerate(self.nodes):
            if node.target != BATCH_NORM:
                continue
            statistics = [r.name for r in node.results if r.position >= 3]
            others = [n for s in statistics for n in readers.get(s, ()) if n.target != COPY]
            if others or not _is_training_batch_norm(node):
                self.nodes[i] = node.model_copy(update={"recomputable": False})

    def _read_outputs(self) -> None:
        tangents = {p.target: p.name for p in self.placeholders if p.kind == "tangent"}
        info = self.flat.info
        for node, desc in self._returned:
            if isinstance(desc, d.PlainAOTOutput):
                assert node is not None
                index = len(self.outputs)
                assert desc.idx == index
                self.outputs.append(
                    Output(
                        name=self._name(node),
                        differentiable=info.differentiable[index],
                        tangent=tangents.get(str(index), "") if info.differentiated[index] else "",
                    )
                )

    def _read_gradients(self) -> None:
        """Autograd takes a gradient over without a copy only if nothing else owns its memory and
        it is laid out like its parameter; where that is not so, the copy is made here, where the
        plan sees it."""
        taken = {self._storage[o.name] for o in self.outputs} | {
            p.storage for p in self.placeholders
        }
        of = {(p.kind, p.target): p for p in self.placeholders}
        for node, desc in self._returned:
            if not isinstance(desc, d.GradAOTOutput) or node is None:
                continue
            owner = of[_describe(desc.grad_of)]
            name = self._name(node)
            expected = _expected_stride(owner.tensor)
            if self._storage[name] in taken or not _same_layout(self._metas[name], expected):
                name = self._copy_gradient(name, owner, expected)
            taken.add(self._storage[name])
            self.gradients.append(Gradient(placeholder=owner.name, name=name))

    def _copy_gradient(self, name: str, owner: Placeholder, stride: tuple[int, ...]) -> str:
        copy = self._fresh_result(f"grad_{owner.name}", self._metas[name], stride)
        memory_format = (
            "contiguous_format" if stride == _contiguous(owner.tensor.shape) else "channels_last"
        )
        self.nodes.append(
            Node(
                name=copy.name,
                target="aten.clone.default",
                args=(Ref(name),),
                kwargs={"memory_format": Literal("memory_format", memory_format)},
                results=(copy,),
                backward=True,
            )
        )
        return copy.name


def tensor_meta(tensor: torch.Tensor) -> TensorMeta:
    """Shape, stride, dtype and device of a tensor, real or fake."""
    if type(tensor).__name__ not in ("Tensor", "Parameter", "FakeTensor", "Buffer"):
        raise TraceError(f"tensors of type {type(tensor).__name__} (subclasses) are not supported")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise TraceError(f"only strided dense tensors are supported, not {tensor.layout}")
    return TensorMeta(
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(int(n) for n in tensor.shape),
        stride=tuple(int(n) for n in tensor.stride()),
        offset=int(tensor.storage_offset()),
        device=str(tensor.device),
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


def _is_seeded(node: fx.Node) -> bool:
    """Whether a node draws random numbers. Attention carries the tag even without dropout."""
    target = node.target
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    for position, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":
            given = (
                node.args[position]
                if position < len(node.args)
                else node.kwargs.get("dropout_p", argument.default_value)
            )
            return given != 0.0
    return True


def _is_training_batch_norm(node: Node) -> bool:
    """Training-mode batch norm does not look at the running statistics that it updates."""
    return node.target == BATCH_NORM and node.args[BATCH_NORM_TRAINING] is True


def _renamed(node: Node, names: dict[str, str]) -> Node:
    def name_of(name: str) -> str:
        return names.get(name, name)

    return node.model_copy(
        update={
            "args": tuple(rename(item, name_of) for item in node.args),
            "kwargs": {key: rename(item, name_of) for key, item in node.kwargs.items()},
        }
    )


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    stride: list[int] = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def _expected_stride(owner: TensorMeta) -> tuple[int, ...]:
    """The stride that autograd's gradient layout contract asks for: the parameter's own where that
    is contiguous or channels-last, else contiguous."""
    n = owner.shape
    if len(n) == 4:
        channels_last = (n[1] * n[2] * n[3], 1, n[1] * n[3], n[1])
        if owner.stride == channels_last and owner.stride != _contiguous(n):
            return channels_last
    return _contiguous(n)


def _same_layout(meta: TensorMeta, stride: tuple[int, ...]) -> bool:
    """Equal strides, where sizes of one do not matter."""
    return all(
        a == b for a, b, size in zip(meta.stride, stride, meta.shape, strict=True) if size > 1
    )


def _clean(name: str) -> str:
    return f"n{name}" if name.startswith("__") else name
