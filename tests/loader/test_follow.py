"""Trainers that tell samplers the epoch: Lightning continues a run with the batches that the uninterrupted one has."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from batchkit import digest, digests

from lfdata import Loader
from lfdata.errors import OptionError

EPOCH = 6


def loader_of(path: Path, **options: Any) -> Loader:
    return Loader(path, 16, ["label"], engine="inline", **options)


def given(batches: Iterable[Any]) -> list[str]:
    return [digest(batch) for batch in batches]


def test_an_iterator_that_has_given_nothing_follows(numbers: Path) -> None:
    whole, loader = digests(loader_of(numbers), epochs=3), loader_of(numbers)
    batches = iter(loader)
    loader.batch_sampler.sampler.set_epoch(1)
    assert given(batches) == whole[EPOCH : 2 * EPOCH]
    # The loader is there already.
    loader.batch_sampler.sampler.set_epoch(2)
    assert given(loader) == whole[2 * EPOCH :]


def test_the_epoch_under_way_goes_on_and_one_that_was_left_is_over(numbers: Path) -> None:
    whole, loader = digests(loader_of(numbers), epochs=2), loader_of(numbers)
    sampler, batches = loader.batch_sampler.sampler, iter(loader)
    next(batches)
    sampler.set_epoch(0)
    assert given(batches) == whole[1:EPOCH]
    sampler.set_epoch(0)
    for _ in zip(range(3), loader, strict=False):
        pass
    sampler.set_epoch(1)
    assert given(loader) == whole[EPOCH:]


def test_an_epoch_all_of_whose_batches_were_counted_comes_again(numbers: Path) -> None:
    loader = loader_of(numbers)
    whole, batches = digests(loader_of(numbers)), iter(loader)
    for _ in range(EPOCH):
        next(batches)
    loader.batch_sampler.sampler.set_epoch(0)
    assert given(loader) == whole


def test_a_loaded_state_keeps_its_place_and_its_epochs(numbers: Path) -> None:
    whole, saved = digests(loader_of(numbers), epochs=4), loader_of(numbers)
    saved.set_epoch(2)
    next(iter(saved))
    loader = loader_of(numbers)
    loader.load_state_dict(saved.state_dict())
    # A trainer that begins to count anew.
    loader.batch_sampler.sampler.set_epoch(0)
    batches = iter(loader)
    loader.batch_sampler.sampler.set_epoch(0)
    assert given(batches) == whole[2 * EPOCH + 1 : 3 * EPOCH]
    loader.batch_sampler.sampler.set_epoch(1)
    assert given(loader) == whole[3 * EPOCH :]


def test_an_epoch_that_is_none_is_refused(numbers: Path) -> None:
    loader = loader_of(numbers)
    for epoch in (-1, 1.5, "x"):
        with pytest.raises(OptionError, match="epoch is a whole number"):
            loader.batch_sampler.set_epoch(epoch)  # type: ignore[arg-type]
    assert loader.batch_sampler.batch_size == 16
    assert loader_of(numbers, rank=1, world_size=2, accumulate=2).batch_sampler.batch_size == 4


@pytest.mark.slow
class TestLightning:
    @pytest.fixture(autouse=True)
    def quiet(self) -> Any:
        pytest.importorskip("lightning")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield

    @staticmethod
    def fit(path: Path, checkpoint: Path | None = None, callbacks: Any = (), **options: Any) -> tuple[Any, list[list[int]]]:
        """A trainer that has run, and the rows of its batches."""
        import lightning

        class Model(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.layer, self.seen = torch.nn.Linear(1, 1), []

            def train_dataloader(self) -> Any:
                return loader_of(path)

            def val_dataloader(self) -> Any:
                return loader_of(path, shuffle="sequential")

            def training_step(self, batch: Any, _: int) -> Any:
                self.seen.append(batch["__index__"].tolist())
                return self.layer(batch["label"].float()[:, None]).mean()

            def validation_step(self, batch: Any, _: int) -> None:
                pass

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.0)

        trainer = lightning.Trainer(
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=bool(callbacks),
            callbacks=list(callbacks),
            **options,
        )
        model = Model()
        trainer.fit(model, ckpt_path=checkpoint, weights_only=False)
        return trainer, model.seen

    @staticmethod
    def whole(path: Path) -> list[list[int]]:
        loader = loader_of(path)
        return [batch["__index__"].tolist() for _ in range(3) for batch in loader]

    def test_epochs_that_are_limited_differ(self, numbers: Path) -> None:
        whole, (_, seen) = self.whole(numbers), self.fit(numbers, max_epochs=3, limit_train_batches=2)
        assert seen == [*whole[:2], *whole[EPOCH : EPOCH + 2], *whole[2 * EPOCH : 2 * EPOCH + 2]]

    @pytest.mark.parametrize("at_training_end", [True, False])
    def test_from_the_end_of_an_epoch(self, numbers: Path, tmp_path: Path, at_training_end: bool) -> None:
        from lightning.pytorch.callbacks import ModelCheckpoint

        saving = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, save_on_train_epoch_end=at_training_end)
        whole = self.whole(numbers)
        assert self.fit(numbers, max_epochs=2, callbacks=[saving])[1] == whole[: 2 * EPOCH]
        for epoch in (0, 1):
            seen = self.fit(numbers, tmp_path / f"epoch={epoch}.ckpt", max_epochs=3)[1]
            assert seen == whole[(epoch + 1) * EPOCH :]

    def test_from_any_step(self, numbers: Path, tmp_path: Path) -> None:
        from lightning.pytorch.callbacks import ModelCheckpoint

        saving, whole = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1), self.whole(numbers)
        assert self.fit(numbers, max_steps=14, callbacks=[saving])[1] == whole[:14]
        for step in (1, 5, 6, 7, 12, 14):
            seen = self.fit(numbers, tmp_path / f"step={step}.ckpt", max_epochs=3)[1]
            assert seen == whole[step:], step

    @pytest.mark.parametrize("steps", [4, 6, 9])
    def test_saved_after_the_last_step(self, numbers: Path, tmp_path: Path, steps: int) -> None:
        """Lightning has ended the epoch by then, wherever it was: the next one comes."""
        trainer, seen = self.fit(numbers, max_steps=steps)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        whole = self.whole(numbers)
        assert seen == whole[:steps]
        assert self.fit(numbers, tmp_path / "last.ckpt", max_epochs=3)[1] == whole[-(-steps // EPOCH) * EPOCH :]
