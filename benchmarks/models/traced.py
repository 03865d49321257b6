"""Training graphs of real architectures at real sizes, traced on fake tensors.

    python -m benchmarks.models.traced                          # all of them, into the cache
    python -m benchmarks.models.traced --models gpt12 unet --fresh

Fake tensors have shapes and no storage, so that the largest model needs no more memory than its
graph. Costs come from a roofline. Traces are stored as JSON in a cache folder.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import remat
from benchmarks.models.networks import DenseNet, SegmentationUNet
from benchmarks.models.workloads import DenoisingLoss

Example = tuple[nn.Module, dict[str, Any]]


@dataclass(frozen=True)
class TracedModel:
    """A model to trace: a description of its size, and the function that builds it with a batch."""

    size: str
    make: Callable[[], Example]


def _tokens(vocabulary: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, shape)


def _images(rows: int, side: int) -> dict[str, torch.Tensor]:
    return {
        "pixel_values": torch.randn(rows, 3, side, side),
        "labels": torch.randint(0, 1000, (rows,)),
    }


def _gpt(layers: int, rows: int = 4, tokens: int = 1024) -> TracedModel:
    def make() -> Example:
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(n_layer=layers, n_positions=tokens, use_cache=False)
        ids = _tokens(config.vocab_size, rows, tokens)
        return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}

    return TracedModel(
        f"GPT-2, {layers} layers of width 768, batch {rows} x {tokens} tokens, dropout 0.1", make
    )


def _narrow_gpt(layers: int) -> TracedModel:
    def make() -> Example:
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            n_layer=layers, n_embd=256, n_head=4, vocab_size=1000, n_positions=256, use_cache=False
        )
        ids = _tokens(config.vocab_size, 8, 256)
        return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}

    return TracedModel(
        f"GPT-2, {layers} layers of width 256, batch 8 x 256 tokens, dropout 0.1", make
    )


def _narrow_albert(layers: int) -> TracedModel:
    def make() -> Example:
        from transformers import AlbertConfig, AlbertForMaskedLM

        config = AlbertConfig(
            vocab_size=1000, embedding_size=64, num_hidden_layers=layers, hidden_size=256,
            num_attention_heads=4, intermediate_size=1024,
        )  # fmt: skip
        ids = _tokens(config.vocab_size, 8, 128)
        return AlbertForMaskedLM(config), {"input_ids": ids, "labels": ids}

    return TracedModel(f"ALBERT, {layers} layers of width 256, batch 8 x 128 tokens", make)


def _llama(layers: int, width: int, rows: int, tokens: int) -> TracedModel:
    def make() -> Example:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            num_hidden_layers=layers, hidden_size=width, intermediate_size=width * 11 // 4,
            num_attention_heads=width // 64, num_key_value_heads=width // 512, use_cache=False,
        )  # fmt: skip
        ids = _tokens(config.vocab_size, rows, tokens)
        return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}

    return TracedModel(
        f"Llama, {layers} layers of width {width}, batch {rows} x {tokens} tokens", make
    )


def _t5(layers: int, rows: int, tokens: int) -> TracedModel:
    def make() -> Example:
        from transformers import T5Config, T5ForConditionalGeneration

        config = T5Config(
            num_layers=layers, num_decoder_layers=layers, d_model=768, d_ff=3072, num_heads=12,
            use_cache=False,
        )  # fmt: skip
        ids = _tokens(config.vocab_size, rows, tokens)
        # Without decoder ids, the model reads the values of the labels to mask some of them.
        return T5ForConditionalGeneration(config), {
            "input_ids": ids, "decoder_input_ids": ids, "labels": ids,
        }  # fmt: skip

    return TracedModel(
        f"T5 base, {layers} + {layers} layers of width 768, batch {rows} x {tokens} tokens, "
        "dropout 0.1",
        make,
    )


def _resnet(depths: Sequence[int], rows: int, side: int) -> TracedModel:
    def make() -> Example:
        from transformers import ResNetConfig, ResNetForImageClassification

        config = ResNetConfig(depths=list(depths), layer_type="bottleneck")
        config.num_labels = 1000
        return ResNetForImageClassification(config), _images(rows, side)

    return TracedModel(
        f"bottleneck layers {list(depths)}, batch {rows} x 3 x {side} x {side}", make
    )


def _swin(rows: int) -> TracedModel:
    def make() -> Example:
        from transformers import SwinConfig, SwinForImageClassification

        config = SwinConfig(embed_dim=128, depths=[2, 2, 18, 2], num_heads=[4, 8, 16, 32])
        config.num_labels = 1000
        return SwinForImageClassification(config), _images(rows, 224)

    return TracedModel(f"Swin base, layers [2, 2, 18, 2], batch {rows} x 3 x 224 x 224", make)


def _unet(rows: int, side: int) -> TracedModel:
    def make() -> Example:
        from diffusers import UNet2DModel

        model = UNet2DModel(
            sample_size=side, in_channels=3, out_channels=3, layers_per_block=2,
            block_out_channels=(128, 256, 512, 512),
            down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
        )  # fmt: skip
        image = torch.randn(rows, 3, side, side)
        steps = torch.randint(0, 1000, (rows,))
        return DenoisingLoss(model), {
            "noisy": image,
            "steps": steps,
            "noise": torch.randn_like(image),
        }

    return TracedModel(
        f"diffusion U-Net, widths [128, 256, 512, 512], batch {rows} x 3 x {side} x {side}", make
    )


def _segmentation(rows: int, side: int) -> TracedModel:
    def make() -> Example:
        labels = torch.randint(0, 21, (rows, side, side))
        return SegmentationUNet(), {
            "pixel_values": torch.randn(rows, 3, side, side), "labels": labels,
        }  # fmt: skip

    return TracedModel(f"segmentation U-Net, width 64, batch {rows} x 3 x {side} x {side}", make)


def _densenet(rows: int) -> TracedModel:
    return TracedModel(
        f"DenseNet-121, growth 32, batch {rows} x 3 x 224 x 224",
        lambda: (DenseNet(), _images(rows, 224)),
    )


TRACED_MODELS: dict[str, TracedModel] = {
    "gpt4_narrow": _narrow_gpt(4),
    "albert4_narrow": _narrow_albert(4),
    "gpt12": _gpt(12),
    "resnet50": _resnet((3, 4, 6, 3), 32, 224),
    "unet": _unet(16, 64),
    "gpt48": _gpt(48),
    "t5": _t5(12, 8, 512),
    "llama32": _llama(32, 2048, 2, 2048),
    "swin": _swin(32),
    "densenet121": _densenet(32),
    "resnet152": _resnet((3, 8, 36, 3), 32, 224),
    "unet_segmentation": _segmentation(8, 256),
    "gpt96": _gpt(96),
    "gpt_10000": _gpt(132),
}


def trace(name: str, costs: str = "h200") -> remat.Trace:
    """Return the trace of a named model's training step, with roofline costs."""
    with FakeTensorMode():
        model, batch = TRACED_MODELS[name].make()
    return remat.measure(remat.trace(model.train(), (), batch), remat.Roofline(costs))


def default_cache() -> Path:
    """Return the folder of traces in the user's cache folder."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "remat-benchmarks"


def tracer_digest() -> str:
    """Return a digest of the code that traces and estimates costs, and of torch's version."""
    digest = hashlib.sha256(torch.__version__.encode())
    package = Path(remat.__file__).parent
    code = [*package.glob("frontend/**/*.py"), *package.glob("costs/*.py")]
    for file in (*sorted(code), Path(__file__)):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def load_or_trace(
    name: str, folder: Path, fresh: bool = False, costs: str = "h200"
) -> tuple[Path, dict[str, Any]]:
    """Return a trace's file and facts about it: operations, peak, seconds of tracing.

    A missing file is traced now. The fact `outdated` is True if another version of the code traced
    the file.
    """
    path, about = folder / f"{name}.trace.json", folder / f"{name}.about.json"
    if fresh or not (path.exists() and about.exists()):
        folder.mkdir(parents=True, exist_ok=True)
        began = time.perf_counter()
        traced_step = trace(name, costs)
        trace_s = time.perf_counter() - began
        traced_step.save(path)
        graph = traced_step.graph()
        peak_bytes = remat.simulate(graph, remat.Schedule.keep_all(graph)).peak_bytes
        facts = {
            "model": name,
            "size": TRACED_MODELS[name].size,
            "costs": costs,
            "operations": len(graph),
            "trace_s": round(trace_s, 2),
            "baseline_peak_bytes": peak_bytes,
            "constant_bytes": graph.constant_bytes,
            "tracer": tracer_digest(),
        }
        about.write_text(json.dumps(facts, indent=1) + "\n")
    facts = json.loads(about.read_text())
    return path, facts | {"outdated": facts["tracer"] != tracer_digest()}


def main(argv: Sequence[str] | None = None) -> int:
    """Trace the models that the cache lacks, and print a line for each model."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models.traced", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--models", nargs="+", choices=list(TRACED_MODELS), default=list(TRACED_MODELS)
    )
    parser.add_argument("--cache", type=Path, default=default_cache(), help="folder of the traces")
    parser.add_argument("--fresh", action="store_true", help="also trace cached models")
    options = parser.parse_args(argv)
    print(f"{'model':<18} {'operations':>10} {'trace s':>8} {'peak GiB':>9}  size")
    for name in options.models:
        _, facts = load_or_trace(name, options.cache, options.fresh)
        peak_gib = facts["baseline_peak_bytes"] / 2**30
        note = "  (traced by another version; --fresh repeats)" if facts["outdated"] else ""
        print(
            f"{name:<18} {facts['operations']:>10} {facts['trace_s']:>8.1f} {peak_gib:>9.2f}  "
            f"{facts['size']}{note}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
