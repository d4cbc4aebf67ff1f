"""Silences what the Trainer says that does not apply when an epoch is a round."""

from __future__ import annotations

import logging
import warnings

_WARNINGS = (
    r".*configure_optimizers.*returned `None`.*",
    r".*does not have many workers.*",
    r".*is smaller than the logging interval.*",
    r".*lightning_fabric.*tensorboard.*",
    r".*tensorboardX.*",
    r".*GPU available but not used.*",
    r".*Checkpoint directory .* exists and is not empty.*",
    r".*module\(s\) in eval mode.*",
    r".*isinstance\(treespec, LeafSpec\).*",
    r".*`LeafSpec`.*",
    r".*dataloader_iter.*",
    r".*could not find the monitored key in the returned metrics.*",
    r".*torch\.load.*weights_only.*",
    r".*n_jobs value .* overridden to 1 by setting random_state.*",
    r"(?s).*JsonargparseDeprecationWarning.*",
    r".*np\.chararray. is deprecated.*",  # met when the help lists kinds of arrays
    r".*skip_none parameter was deprecated.*",
    r"(?s).*Instead use ``instantiate``.*",
    r".*Total length of `list` across ranks is zero.*",
    r".*The dirpath has changed from .*",  # BestCheckpoint takes the best round over by itself
    r".*callbacks used to create the checkpoint need to be provided.*",
    r".*No device id is provided via `init_process_group`.*",
)
_SAID = (
    "weights_only",
    "available:",
    "Automatic Mixed Precision",
    "Tip:",
    "`Trainer.fit` stopped",
    "Restor",
    "Loaded model weights",
    "Detected KeyboardInterrupt",
)
_LOGGERS = (
    "pytorch_lightning.trainer.connectors.checkpoint_connector",
    "pytorch_lightning.utilities.rank_zero",
    "lightning_fabric.utilities.rank_zero",
    "lightning.pytorch.utilities.rank_zero",
    "lightning_utilities.core.rank_zero",
)


class _NotForRounds(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return not any(part in text for part in _SAID)


def quiet_lightning() -> None:
    """Filters warnings and log lines of the Trainer that say nothing about a federated run; all others stay."""
    for text in _WARNINGS:
        warnings.filterwarnings("ignore", message=text)
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(known, _NotForRounds) for known in logger.filters):
            logger.addFilter(_NotForRounds())
