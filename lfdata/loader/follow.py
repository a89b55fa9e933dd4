"""The epoch as trainers tell it to samplers: Lightning resumes from the end of an epoch by that alone, without the loader's state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lfdata.loader import options

if TYPE_CHECKING:
    from lfdata.loader.loader import Loader


class EpochSampler:
    """Of one loader; it stands where torch's DataLoader has a batch sampler with a sampler, and is both.

    Attributes:
        batch_size: rows of a batch of this rank.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self.batch_size = loader._producer.share // loader._accumulate
        self.sampler = self

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch, unless the loader is in it or a state was loaded and nothing taken since.

        A state that was loaded for another epoch is taken as it is: the difference stays for the epochs that follow.
        """
        loader = self._loader
        epoch = options.whole("epoch", epoch, 0, options.MOST_EPOCHS)
        if loader._loaded:
            loader._told = loader._epoch - epoch
            return
        epoch = options.whole("epoch", epoch + loader._told, 0, options.MOST_EPOCHS)
        if loader._done == 0:
            # An iterator that was asked for and has given nothing begins there.
            loader._epoch = epoch
        elif epoch != loader._epoch or loader._done >= len(loader):
            loader._move(epoch, 0, loaded=False)
