"""Lightning's `Trainer`, with the model inside of its module enabled: the same run as in eager
mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.training.models import gpt2

import remat

lightning: Any = pytest.importorskip("pytorch_lightning")

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

STEPS, ROWS, TOKENS = 20, 4, 48


class Module(lightning.LightningModule):
    """A module that trains a language model; `seen` are its losses."""

    def __init__(self, budget: str = "", scope: str = "model") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = gpt2().model
        self.seen: list[float] = []
        if budget:
            remat.enable(
                self.model, budget, scope=scope, outputs="dropped", strategy=remat.Auto(gap=0.05),
                split="off",
            )  # fmt: skip

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.seen.append(loss.item())
        return loss

    def validation_step(self, batch: torch.Tensor, _: int) -> None:
        self.log("validation", self.model(input_ids=batch, labels=batch).loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


def trained(module: Module, folder: Path, **options: Any) -> Any:
    lightning.seed_everything(7, verbose=False)
    generator = torch.Generator().manual_seed(1)
    texts = torch.randint(0, 120, (8 * ROWS, TOKENS), generator=generator)
    loader = torch.utils.data.DataLoader(texts, batch_size=ROWS)
    trainer = lightning.Trainer(
        max_steps=options.pop("max_steps", STEPS),
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
    )
    trainer.fit(module, loader, loader, ckpt_path=_checkpoint(folder))
    return trainer


def _checkpoint(folder: Path) -> Path | None:
    checkpoint_file = folder / "half.ckpt"
    return checkpoint_file if checkpoint_file.exists() else None


def assert_same_weights(one: torch.nn.Module, other: torch.nn.Module) -> None:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(p, q) for p, q in pairs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "scope"),
    [
        ({"gradient_clip_val": 1.0}, "model"),
        pytest.param({"accumulate_grad_batches": 2}, "model", marks=pytest.mark.slow),
        pytest.param({"precision": "bf16-mixed"}, "model", marks=pytest.mark.slow),
        pytest.param({}, "blocks", marks=pytest.mark.slow),
    ],
)
def test_a_run_is_that_of_the_eager_module(
    options: dict[str, Any], scope: str, tmp_path: Path
) -> None:
    eager, enabled = Module(), Module("70%", scope)
    for number, module in enumerate((eager, enabled)):
        trained(module, tmp_path / str(number), **options).save_checkpoint(tmp_path / "last.ckpt")
    assert enabled.seen == eager.seen
    assert len(enabled.seen) == STEPS * options.get("accumulate_grad_batches", 1)
    assert_same_weights(enabled, eager)
    for plan in remat.plans(enabled.model):
        assert plan.peak_bytes <= plan.budget_bytes
        assert plan.time_s > plan.baseline_time_s
    saved = Module.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=False)
    assert_same_weights(saved, enabled)


@pytest.mark.slow
def test_a_run_can_be_resumed(tmp_path: Path) -> None:
    runs = []
    for name, budget in (("eager", ""), ("ours", "70%")):
        folder = tmp_path / name
        half = trained(Module(budget), folder, max_steps=STEPS // 2)
        half.save_checkpoint(folder / "half.ckpt")
        module = Module(budget)
        trained(module, folder)
        runs.append(module)
    assert runs[1].seen == runs[0].seen
    assert len(runs[1].seen) == STEPS // 2
    assert_same_weights(*runs)


@pytest.mark.slow
def test_a_callback_enables_the_module_for_a_fit(tmp_path: Path) -> None:
    from remat.integrations.lightning import RematCallback

    plans: list[remat.Plan] = []

    class Looking(lightning.Callback):
        def on_train_end(self, _: Any, module: Any) -> None:
            plans[:] = remat.plans(module.model)

    eager, enabled = Module(), Module()
    trained(eager, tmp_path, max_steps=3)
    callback = RematCallback(
        "70%", "model", outputs="dropped", strategy=remat.Auto(gap=0.05), split="off"
    )
    trained(enabled, tmp_path, max_steps=3, callbacks=[callback, Looking()])
    assert enabled.seen == eager.seen
    assert all(plan.time_s > plan.baseline_time_s for plan in plans)
    assert len(plans) > 0
    with pytest.raises(remat.TraceError, match="not enabled"):
        remat.plans(enabled.model)
    with pytest.raises(remat.TraceError, match="has no module 'models'; it has model"):
        trained(Module(), tmp_path, max_steps=3, callbacks=[RematCallback("70%", "models")])
