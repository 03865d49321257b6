"""The ways to name a model on the command line, and the errors of wrong ones."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import remat
from remat.commands.models.batches import BatchSizes
from remat.commands.models.configurations import silence_warnings_of
from remat.commands.models.sources import TrainingStep, load_training_step
from remat.errors import TraceError
from remat.frontend.api.comparison import loss_of_output

TINY = {
    "gpt2": ["n_layer=1", "n_embd=16", "n_head=2", "vocab_size=50"],
    "bert": ["num_hidden_layers=1", "hidden_size=16", "num_attention_heads=2", "vocab_size=50"],
    "roberta": ["num_hidden_layers=1", "hidden_size=16", "num_attention_heads=2", "vocab_size=50"],
    "t5": ["num_layers=1", "d_model=16", "num_heads=2", "d_ff=32", "vocab_size=50"],
    "qwen2": [
        "num_hidden_layers=1", "hidden_size=16", "num_attention_heads=2", "num_key_value_heads=2",
        "intermediate_size=32", "vocab_size=50",
    ],
    "vit": ["num_hidden_layers=1", "hidden_size=16", "num_attention_heads=2", "num_labels=5"],
    "resnet": ["depths=[1,1]", "hidden_sizes=[8,16]", "embedding_size=8"],
    "whisper": [
        "encoder_layers=1", "decoder_layers=1", "d_model=16", "encoder_attention_heads=2",
        "decoder_attention_heads=2", "encoder_ffn_dim=32", "decoder_ffn_dim=32", "vocab_size=50",
        "num_mel_bins=8", "max_source_positions=20",
    ],
}  # fmt: skip
CLASSES = {
    "gpt2": "GPT2LMHeadModel",
    "bert": "BertForMaskedLM",
    "roberta": "RobertaForMaskedLM",
    "t5": "T5ForConditionalGeneration",
    "qwen2": "Qwen2ForCausalLM",
    "vit": "ViTForImageClassification",
    "resnet": "ResNetForImageClassification",
    "whisper": "WhisperForConditionalGeneration",
}
UNET = {
    "_class_name": "UNet2DModel",
    "sample_size": 8,
    "block_out_channels": [8, 16],
    "norm_num_groups": 4,
    "layers_per_block": 1,
    "down_block_types": ["DownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "UpBlock2D"],
}


@pytest.fixture(autouse=True)
def empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the current directory an empty one, and forget its modules afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def tiny(name: str, batch: int = 2, **options: object) -> TrainingStep:
    sizes = BatchSizes(batch, 8, 32)
    return load_training_step(f"hf:{name}", sizes, overrides=TINY[name], **options)


def problem(source: str, **options: object) -> str:
    """Return the one-line error of a wrong source."""
    sizes = {key: options.pop(key) for key in ("batch", "tokens") if key in options}
    with pytest.raises(TraceError) as caught:
        load_training_step(source, BatchSizes(**sizes), **options)
    text = str(caught.value)
    assert "\n" not in text
    return text


def write(name: str, text: str) -> None:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


# -- configurations -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TINY)
def test_a_model_type_gives_a_training_step(name: str) -> None:
    step = tiny(name)
    assert (step.name, type(step.model).__name__) == (name, CLASSES[name])
    assert step.model.training
    loss = loss_of_output(step.model(*step.args, **step.kwargs))
    loss.backward()
    assert torch.isfinite(loss)
    second_step = tiny(name)
    assert all(torch.equal(a, second_step.kwargs[key]) for key, a in step.kwargs.items())
    weights = zip(step.model.parameters(), second_step.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in weights), "the seed determines the weights"


@pytest.mark.slow_cases("whisper")
@pytest.mark.parametrize("name", ["gpt2", "whisper"])
def test_the_step_of_a_model_type_can_be_traced(name: str) -> None:
    step = tiny(name)
    assert remat.trace(step.model, step.args, step.kwargs).nodes


@pytest.mark.parametrize(
    ("name", "speech", "shape"),
    [
        ("whisper", "input_features", (2, 80, 3000)),
        ("speech_to_text", "input_features", (2, 1000, 80)),
        ("moonshine", "input_values", (2, 160_000)),
    ],
)
def test_speech_to_text_has_speech_and_tokens(
    name: str, speech: str, shape: tuple[int, ...]
) -> None:
    kwargs = load_training_step(f"hf:{name}", BatchSizes(2, 7), device="meta").kwargs
    assert kwargs[speech].shape == shape
    assert kwargs["labels"].shape == (2, 7)


def test_warnings_of_libraries_are_silent_unless_the_user_wants_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logger = logging.getLogger("transformers")
    monkeypatch.setattr(logger, "level", logging.WARNING)
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "info")
    silence_warnings_of("transformers")
    assert logger.level == logging.WARNING
    monkeypatch.delenv("TRANSFORMERS_VERBOSITY")
    silence_warnings_of("transformers")
    assert logger.level == logging.ERROR
    assert os.environ["TRANSFORMERS_VERBOSITY"] == "error"


def test_options_set_the_sizes_of_the_batch() -> None:
    step = load_training_step("hf:gpt2", BatchSizes(3, 5), overrides=TINY["gpt2"])
    assert step.kwargs["input_ids"].shape == (3, 5)
    assert step.kwargs["labels"] is step.kwargs["input_ids"]
    # Special tokens, here the last one, are not sampled, nor those outside of a smaller vocabulary.
    labels = load_training_step("hf:gpt2", BatchSizes(40), overrides=TINY["gpt2"]).kwargs["labels"]
    assert int(labels.max()) == 48
    pixels = tiny("vit", batch=1).kwargs["pixel_values"]
    assert pixels.shape == (1, 3, 32, 32)


def test_the_architecture_in_a_configuration_file_is_used() -> None:
    config = {"model_type": "bert", "architectures": ["BertForSequenceClassification"]}
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "num_labels": 4}
    write("small.json", json.dumps(config | sizes))
    step = load_training_step("small.json", BatchSizes(tokens=8))
    assert type(step.model).__name__ == "BertForSequenceClassification"
    assert step.kwargs["labels"].shape == (2,)
    assert step.model(**step.kwargs).loss.requires_grad
    # An architecture without a known loss is replaced by the default one of its type.
    write("small.json", json.dumps(config | sizes | {"architectures": ["BertModel"]}))
    step = load_training_step("small.json", BatchSizes(tokens=8))
    assert type(step.model).__name__ == "BertForMaskedLM"


def test_fewer_layers_than_the_configuration_lists_are_allowed() -> None:
    types = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    write("three.json", json.dumps({"model_type": "qwen2"} | types))
    step = load_training_step("three.json", BatchSizes(tokens=8), overrides=TINY["qwen2"])
    assert step.model.config.num_hidden_layers == 1


def test_a_cached_configuration_of_the_hub_is_used() -> None:
    """Its files may be in the current directory; then the network is not used."""
    write("org/model/config.json", json.dumps({"model_type": "gpt2", "n_positions": 16}))
    step = load_training_step("hf:org/model", BatchSizes(tokens=16), overrides=TINY["gpt2"])
    assert step.name == "model"
    assert "at most 16 tokens" in problem("hf:org/model", tokens=17, overrides=TINY["gpt2"])


def test_an_unreachable_hub_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    text = problem("hf:org/no-such-model")
    assert "cannot load the configuration" in text
    assert len(text) < 450


def test_a_diffusion_model_gives_a_training_step() -> None:
    write("unet.json", json.dumps(UNET))
    step = load_training_step("unet.json", overrides=["layers_per_block=2"])
    noisy, times, noise = step.args
    assert (noisy.shape, times.shape, noise.shape) == ((2, 3, 8, 8), (2,), (2, 3, 8, 8))
    loss_of_output(step.model(*step.args)).backward()
    assert load_training_step("unet.json", BatchSizes(image=16)).args[0].shape == (2, 3, 16, 16)
    write("unet.json", json.dumps(UNET | {"num_class_embeds": 4}))
    assert "num_class_embeds is 4" in problem("unet.json")
    write("unet.json", json.dumps(UNET | {"_class_name": "AutoencoderKL"}))
    assert "AutoencoderKL" in problem("unet.json")


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("hf:gtp2", {}, "near are gpt2"),
        ("hf:detr", {}, "no training step for the model type 'detr'"),
        ("hf:dia", {}, "no training step for the model type 'dia'"),
        ("hf:whisper", {"tokens": 1000}, "at most 448 tokens"),
        ("hf:gpt2", {"tokens": 1025}, "has positions for 1,024 tokens, but --tokens is 1,025"),
        ("hf:roberta", {"tokens": 511}, "use at most 510 tokens"),
        ("hf:gpt2", {"overrides": ["layers=2"]}, "has no 'layers'; near are n_layer"),
        ("hf:gpt2", {"overrides": ["n_layer"]}, "is not of the form NAME=VALUE"),
        ("hf:gpt2", {"overrides": ["n_layer=two"]}, "it has n_layer=12, n_embd=768"),
        ("hf:gpt2", {"overrides": ["n_head=7"]}, "cannot build GPT2LMHeadModel from gpt2"),
        ("hf:gpt2", {"batch": 0}, "--batch is 0"),
        ("hf:gpt2", {"dtype": "int8"}, "use float32, bfloat16, float16"),
        ("hf:gpt2", {"device": "tpu0"}, "the device 'tpu0' is not known"),
        ("hf:gpt2", {"device": "xpu"}, "does not support the device 'xpu'"),
        ("missing.json", {}, "cannot read the configuration missing.json"),
        ("list.json", {}, "has a JSON list"),
        ("other.json", {}, 'has no "model_type"'),
        ("remote.json", {}, "needs code from the hub"),
        ("bad.json", {}, "cannot read the configuration bad.json: JSONDecodeError"),
        ("gpt2", {}, "does not name the function"),
    ],
)
def test_wrong_configurations_are_refused_with_a_reason(
    source: str, options: dict[str, Any], message: str
) -> None:
    write("list.json", "[1]")
    write("other.json", "{}")
    write("bad.json", "{'model_type'")
    write("remote.json", '{"model_type": "mine", "auto_map": {}}')
    overrides = [*TINY.get(source.removeprefix("hf:"), ()), *options.get("overrides", ())]
    assert message in problem(source, **{**options, "overrides": overrides})


def test_weights_larger_than_the_memory_are_not_allocated() -> None:
    layers = ["n_embd=1000000", "n_head=1", "n_layer=1", "vocab_size=50"]
    assert "this machine has" in problem("hf:gpt2", overrides=layers)


# -- factories ------------------------------------------------------------------------------------

SCRIPT = """
import torch
from torch import nn
import helper

print("noise")
assert __name__ != "__main__"

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
    def forward(self, x, y=None, scale=1.0):
        return (self.lin(x) * scale).mean()

x = torch.ones(2, 4, requires_grad=True)
bare = lambda: (Net(), x)
positional = lambda: (Net(), (x, x))
keywords = lambda: (Net(), {"x": x, "scale": 2.0})
both = lambda: (Net().eval(), (x,), {"y": x})
number = 3

def needs(width): return Net(), x
def raises():
    y = torch.zeros(3)
    return Net(), nn.Linear(4, 4)(y)
def leaves(): raise SystemExit("usage: train.py FILE")
def model_only(): return Net()
def many(): return Net(), x, {}, 1
def no_model(): return "model", x
def bad_args(): return Net(), 3
def bad_kwargs(): return Net(), (), [x]
def unfit(): return Net(), (x, x, 1.0, x)
def misspelt(): return Net(), {"x": x, "scal": 2.0}
def drawn(): return Net(), torch.rand(2, 4)
def deep(): return Net(), helper.broken()
"""
HELPER = "def broken():\n    return {}['key']\n"


@pytest.fixture
def scripts() -> None:
    write("code/train.py", SCRIPT)
    write("code/helper.py", HELPER)
    write("pkg/__init__.py", "")
    write(
        "pkg/mod.py", "import torch\ndef make(): return torch.nn.Linear(2, 2), torch.ones(1, 2)\n"
    )
    write("broken.py", "import torch\nimport no_such_package\n")
    write("syntax.py", "x = 1\ndef f(:\n")


@pytest.mark.parametrize("name", ["bare", "positional", "keywords", "both"])
@pytest.mark.usefixtures("scripts")
def test_a_factory_can_be_in_a_file(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    step = load_training_step(f"code/train.py:{name}")
    assert step.name == name
    assert step.model(*step.args, **step.kwargs).requires_grad
    assert step.model.training == (name != "both"), "as the factory left it"
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "noise\n")


@pytest.mark.usefixtures("scripts")
def test_a_factory_can_be_in_a_module() -> None:
    step = load_training_step("pkg.mod:make")
    assert step.model(*step.args).shape == (1, 2)


@pytest.mark.usefixtures("scripts")
def test_the_seed_and_the_dtype_are_applied() -> None:
    first, second = (load_training_step("code/train.py:drawn") for _ in range(2))
    assert torch.equal(first.args[0], second.args[0])
    assert not torch.equal(first.args[0], load_training_step("code/train.py:drawn", seed=1).args[0])
    step = load_training_step("code/train.py:positional", dtype="bfloat16")
    assert step.model.lin.weight.dtype == step.args[0].dtype == torch.bfloat16
    assert step.model.steps.dtype == torch.long
    assert step.args[0] is step.args[1], "one tensor stays one"
    assert step.args[0].requires_grad
    assert step.args[0].is_leaf


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("code/none.py:make", "there is no file code/none.py"),
        ("code/trian.py:make", "near is train.py; check the path"),
        ("no_such_module:make", "there is no module 'no_such_module'"),
        ("pkg.none:make", "there is no module 'pkg.none'"),
        ("none.mod:make", "there is no module 'none.mod'"),
        ("pkg.mod:none", "pkg.mod has no 'none'; it defines make"),
        ("broken.py:make", "cannot import broken.py: broken.py:2: ModuleNotFoundError"),
        ("broken:make", "cannot import broken: broken.py:2: ModuleNotFoundError"),
        ("syntax.py:make", "cannot import syntax.py: syntax.py:2: SyntaxError"),
        ("code/train.py", "write 'code/train.py:factory'"),
        ("code/train.py:number", "is a int and not a function"),
        ("code/train.py:needs", "code/train.py:needs(width) (code/train.py:24) needs arguments"),
        ("code/train.py:raises", "raises failed: code/train.py:27: RuntimeError: "),
        ("code/train.py:leaves", "code/train.py:28: SystemExit: usage: train.py FILE"),
        ("code/train.py:model_only", "returned a Net without the arguments of a call"),
        ("code/train.py:many", "returned a tuple of 4"),
        ("code/train.py:no_model", "returned a str instead of a model"),
        ("code/train.py:bad_args", "returned a int instead of the model's arguments"),
        ("code/train.py:bad_kwargs", "returned a list instead of the keyword arguments"),
        ("code/train.py:unfit", "too many positional arguments. Change what code/train.py:unfit"),
        ("code/train.py:misspelt", "It has no argument 'scal', near scale. Change what code/train"),
        ("code/train.py:deep", "deep failed: code/helper.py:2: KeyError: 'key'"),
    ],
)
@pytest.mark.usefixtures("scripts")
def test_wrong_factories_are_refused_with_a_reason(source: str, message: str) -> None:
    assert message in problem(source)


@pytest.mark.usefixtures("scripts")
def test_the_cause_of_an_error_is_kept() -> None:
    with pytest.raises(TraceError) as caught:
        load_training_step("code/train.py:deep")
    assert isinstance(caught.value.__cause__, KeyError)
    text = problem("code/train.py:bare", overrides=["n_layer=2"])
    assert "'code/train.py:bare' is a function" in text


def test_errors_name_the_users_line() -> None:
    """It is in a folder where packages are not installed, whatever the folders above are called."""
    write("site-packages/torch/train.py", SCRIPT)
    write("site-packages/torch/helper.py", HELPER)
    message = problem("site-packages/torch/train.py:deep")
    assert "deep failed: site-packages/torch/helper.py:2: KeyError" in message
    sys.path.insert(0, str(Path.cwd() / "env/site-packages"))
    write("env/site-packages/library.py", HELPER)
    write("calls.py", "import library\ndef make():\n    return library.broken()\n")
    assert "calls.py:make failed: calls.py:3: KeyError" in problem("calls.py:make")


def test_a_script_hides_no_imported_module() -> None:
    """Its name may be that of a module that is already imported."""
    write("json.py", "import torch\ndef make(): return torch.nn.Linear(2, 2), torch.ones(1, 2)\n")
    load_training_step("json.py:make")
    assert sys.modules["json"] is json


@pytest.mark.gpu
def test_a_model_type_gives_a_step_on_the_gpu() -> None:
    step = tiny("gpt2", device="cuda", dtype="bfloat16")
    tensors = [*step.model.parameters(), *step.kwargs.values()]
    assert {t.device.type for t in tensors} == {"cuda"}
    assert step.kwargs["labels"] is step.kwargs["input_ids"]
    assert torch.isfinite(step.model(**step.kwargs).loss)
    assert "sees" in problem("hf:gpt2", device="cuda:99")
