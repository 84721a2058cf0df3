"""What a decode leg's end says of the pair of workers that its KV went between."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pdserve.errors import TransferCorrupted, TransferFailed

if TYPE_CHECKING:
    from pdserve.types import StreamDelta
    from router.quarantine import Pair, Quarantine

logger = logging.getLogger(__name__)


def judge(
    quarantine: Quarantine, pair: Pair, last: StreamDelta, now: float, *, is_trial: bool
) -> None:
    """Takes the leg's last delta into account; `is_trial` where the leg tried a quarantined
    pair."""
    code = "" if last.error is None else last.error.code
    if last.error is not None and code == TransferCorrupted.code:
        quarantine.strike(pair, now, last.error.message)
        logger.warning("KV from worker %s to %s: %s", *pair, last.error.message)
    elif last.error is not None and code == TransferFailed.code:
        if quarantine.failed(pair, now, last.error.message):
            logger.warning("workers %s and %s kept apart: %s", *pair, last.error.message)
    elif last.report is None or not last.report.transfer:
        return
    elif is_trial:
        quarantine.whole(pair, now)
        logger.info("KV from worker %s to %s comes whole again", *pair)
    else:
        quarantine.came(pair, now)
